"""Sound steps that look odd: each was once called faulty."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .case import Arguments, Case, collect
from .decoder import Decoder, model_loss
from .english import PAD, padded, sentences, stream

CASES: dict[str, Case] = {}
case = collect(CASES)


class Classifier(Decoder):
    """An encoder whose final norm reads the first token alone, as in classifiers of images."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(self.dim, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.decode(self.embed(ids), (ids != PAD)[:, None, None, :])
        return self.head(self.norm(x[:, 0]))


def loss_of_class(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids), (ids != PAD).sum(1) % 4)


@case()
def vit_pool_norm() -> Arguments:
    """The final norm reads the first token alone."""
    return {"model": Classifier(), "batch": padded(sentences()[:16]), "loss": loss_of_class}


@case()
def repeated_block() -> Arguments:
    """One block stands four times in the list, as in ALBERT."""
    model = Decoder()
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)
    return {"model": model, "batch": stream(8, 64), "loss": model_loss}


@case()
def repeated_block_sound() -> Arguments:
    """The same model with four blocks."""
    return {"model": Decoder(), "batch": stream(8, 64), "loss": model_loss}

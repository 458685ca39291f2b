"""Sound steps whose losses, targets or trained parts are unusual, third list."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .case import Arguments, Case, collect
from .gpt import GPT, VOCAB, small, untied
from .other_models import MeanClassifier, PatchClassifier
from .setups import (
    LENGTH,
    ROWS,
    adamw_of_trained,
    advance,
    decay_groups,
    halves,
    image_batch,
    own,
    padded_batch,
    shifted_tokens,
    tokens,
    with_loss,
)

SOUND3: dict[str, Case] = {}
case = collect(SOUND3)


def long_tokens() -> Tensor:
    """Return token ids of which the last is a target alone."""
    return tokens(length=LENGTH + 1)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits `[B, V, T]` for all tokens but the first."""
    return model(ids[:, :-1])[0].transpose(1, 2)


# ------------------------------------------------------------------------------------------------- losses


@case()
def smooth() -> Arguments:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(model, ids), ids[:, 1:], label_smoothing=0.1)

    return with_loss(small, long_tokens(), loss, decay_groups)


@case()
def zloss() -> Arguments:
    """A penalty keeps the softmax's normaliser near 1."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = logits_of(model, ids)
        return F.cross_entropy(logits, ids[:, 1:]) + 1e-2 * logits.logsumexp(1).pow(2).mean()

    return with_loss(small, long_tokens(), loss, decay_groups)


class TwoAhead(GPT):
    """A second head predicts the token after the next, and comes first in the output."""

    def __init__(self):
        super().__init__(64, 4)
        self.h2 = nn.Linear(64, VOCAB, bias=False)
        nn.init.normal_(self.h2.weight, 0, 0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.nf(self.blocks(self.embed(ids)))
        return self.h2(x), self.head(x)


@case()
def mtp() -> Arguments:
    """Several tokens are predicted at once."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        second, first = (y.transpose(1, 2) for y in model(ids[:, :-1]))
        further = F.cross_entropy(second[..., :-1], ids[:, 2:])
        return F.cross_entropy(first, ids[:, 1:]) + 0.3 * further

    return with_loss(TwoAhead, long_tokens(), loss, decay_groups)


@case()
def distil() -> Arguments:
    """The targets are another model's probabilities."""
    torch.manual_seed(0)
    model, teacher = small(), small().eval()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            targets = teacher(ids)[0].softmax(-1)
        predicted = model(ids)[0].log_softmax(-1)
        return F.kl_div(predicted.flatten(0, 1), targets.flatten(0, 1), reduction="batchmean")

    return {"model": model, "batch": tokens(), "loss": loss, "optimizer": decay_groups(model)}


@case()
def compiled_closure() -> Arguments:
    """The loss runs the model that it closes over, not the one that it gets."""
    torch.manual_seed(0)
    model = small()

    def loss(_: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(model, ids), ids[:, 1:])

    return {"model": model, "batch": long_tokens(), "loss": loss, "optimizer": decay_groups(model)}


@case()
def noaccum_clip() -> Arguments:
    """Micro-batches are weighed by the labels that they count, and gradients clipped hard."""

    def step(
        model: nn.Module, batch: tuple[Tensor, ...], optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> Tensor:
        counted = (batch[1] != -100).sum()
        total = torch.zeros(())
        model.train()
        optimizer.zero_grad()
        for ids, labels in halves(batch):
            logits = model(ids)[0].flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / counted
            loss.backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), 0.1)
        advance(optimizer, scheduler)
        return total

    ids, labels = shifted_tokens()
    labels = labels.clone()
    labels[2:, 4:] = -100
    return own(small, step=step, batch=(ids, labels))


# -------------------------------------------------------------------------------------------- trained parts


@case()
def head_only() -> Arguments:
    """Only the head and the norm before it are trained."""

    def make() -> GPT:
        model = untied().requires_grad_(False)
        model.head.requires_grad_(True)
        model.nf.requires_grad_(True)
        return model

    return own(make, optimizer=adamw_of_trained)


@case()
def top_layers() -> Arguments:
    """The embeddings and the first two layers are frozen."""

    def make() -> GPT:
        model = untied()
        for part in (model.te, model.pe, model.h[0], model.h[1]):
            part.requires_grad_(False)
        return model

    return own(make, optimizer=adamw_of_trained)


@case()
def trained() -> Arguments:
    """The model has been trained for 60 steps."""
    arguments = own(small)
    model, optimizer = arguments["model"], arguments["optimizer"]
    for _ in range(60):
        optimizer.zero_grad()
        model(*arguments["batch"])[1].backward()
        optimizer.step()
    return arguments


# ------------------------------------------------------------------------------------------------- no words


def classified(loss: Any, targets: Tensor, classes: int) -> Arguments:
    """Return the step of a classifier, or of a regression, of padded rows."""
    batch = padded_batch()
    rows = (batch["input_ids"], batch["attention_mask"].bool(), targets)
    return with_loss(lambda: MeanClassifier(classes), rows, loss) | {"declare": {"pad_id": 0}}


@case()
def torch_cls() -> Arguments:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, mask, labels = batch
        return F.cross_entropy(model(ids, mask), labels)

    return classified(loss, torch.tensor([0, 1, 2, 1]), 3)


@case()
def regression() -> Arguments:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, mask, values = batch
        return F.mse_loss(model(ids, mask).squeeze(-1), values)

    return classified(loss, torch.randn(ROWS, generator=torch.Generator().manual_seed(2)), 1)


@case()
def patch_own() -> Arguments:
    """A classifier of images whose head is zero at the start."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    batch = image_batch()
    pair = (batch["pixel_values"], batch["labels"])
    return with_loss(PatchClassifier, pair, loss) | {"make": PatchClassifier}

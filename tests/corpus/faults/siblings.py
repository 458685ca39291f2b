"""Faults that ``siblings`` and ``nonlinear`` name: one block unlike the others, and one that is linear."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from corpus.case import DEEP, PLANTED_1, PLANTED_2, Arguments, fault
from corpus.models.deep import Training, deep_bert, planted
from corpus.models.gpt import Gpt
from corpus.models.library import language_gpt2
from corpus.places import within
from corpus.training import adamw, changed, full_setup


@fault("siblings", place="blocks.2*", origin=PLANTED_1)
def eps_one() -> Arguments:
    """One norm has an epsilon of 1e-2, where the others have 1e-5."""
    return full_setup(changed(lambda model: setattr(model.blocks[2].norm_1, "eps", 1e-2)))


@fault("siblings", "step", place="blocks.1*", origin=PLANTED_1)
def eval_mid() -> Arguments:
    """One layer is in evaluation mode in training."""
    arguments = full_setup(step=None)
    arguments["model"].train()
    arguments["model"].blocks[1].eval()
    return arguments


class InBfloat16(nn.Module):
    """A part of the model in lower precision."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.bfloat16()).float()


@fault("siblings", "precision", place="transformer.h.2*", origin=PLANTED_2)
def one_half() -> Arguments:
    """The feed-forward of one layer is in bfloat16, all else in float32."""
    arguments = language_gpt2()
    layer = arguments["model"].transformer.h[2]
    layer.mlp = InBfloat16(layer.mlp)
    return arguments | {"optimizer": adamw(arguments["model"])}


@fault("nonlinear", place="blocks.0*", origin=PLANTED_2)
def no_act() -> Arguments:
    """No feed-forward has an activation."""

    def remove(model: Gpt) -> None:
        for block in model.blocks:
            block.mlp.act = nn.Identity()

    return full_setup(changed(remove))


@fault("nonlinear", place=within("bert.encoder.layer.0"), origin=DEEP)
@planted(deep_bert)
def no_activation(training: Training) -> None:
    """The feed-forwards have no activation, so that their two matrices are one linear map."""
    for layer in training.model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.Identity()

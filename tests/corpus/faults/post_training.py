"""Faults that ``reference`` and ``adapters`` name."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import tokens
from corpus.case import COVERING, Arguments, twins
from corpus.models.gpt import steady
from corpus.training import adamw_of_trained, loss_setup

# -------------------------------------------------------------------------------------------------- reference


def log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    """Return those of the next tokens, `[B, T - 1]`."""
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@twins("reference", place="loss", origin=COVERING)
def reference_one_token_late(*, faulty: bool) -> Arguments:
    """The log-probabilities of the reference are those of the tokens before."""
    torch.manual_seed(0)
    reference = copy.deepcopy(steady()).requires_grad_(False)

    def preference(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            known = log_probabilities(reference, ids)
        if faulty:
            known = known.roll(1, dims=1)
        chosen, rejected = (log_probabilities(model, ids) - known).sum(1).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    return loss_setup(steady, tokens(), preference, remade=False)


# --------------------------------------------------------------------------------------------------- adapters


class Adapted(nn.Module):
    """A linear layer with a correction of low rank that starts at zero (Hu et al. 2021)."""

    def __init__(self, layer: nn.Linear, rank: int = 4):
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


@twins("adapters", place="blocks.0*", origin=COVERING)
def base_trains_beside_its_adapters(*, faulty: bool) -> Arguments:
    """The matrices that adapters correct are not frozen."""

    def make() -> nn.Module:
        model = steady().requires_grad_(faulty)
        for block in model.blocks:
            block.mlp.up = Adapted(block.mlp.up)
        return model

    return loss_setup(make, tokens(), optimizer=adamw_of_trained, remade=False)

"""What the terms of a loss train: parameters that the logits depend on are trained through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import each

from .test_gradients import Attach
from .tiny import DIM, Block, Decoder, first, loss_of, report_of

EXPERTS = 3
Weigh = Callable[[Tensor], Tensor]
"""Maps shares `[N, E]` to the weights `[N, E]` of the experts, 0 for those that are not chosen."""


def best(shares: Tensor, number: int) -> Tensor:
    """Return the shares of the ``number`` best experts, and 0 for the others."""
    kept = shares.topk(number).indices
    return shares * torch.zeros_like(shares).scatter(-1, kept, 1.0)


def divided_by_itself(shares: Tensor) -> Tensor:
    best_share = best(shares, 1)
    return best_share / best_share.sum(-1, keepdim=True)


def divided_with_eps(shares: Tensor) -> Tensor:
    best_share = best(shares, 1)
    return best_share / (best_share.sum(-1, keepdim=True) + 1e-20)


def softmax_of_one(shares: Tensor) -> Tensor:
    logs = shares.log()
    return logs.masked_fill(best(shares, 1) == 0, -torch.inf).softmax(-1)


def as_it_is(shares: Tensor) -> Tensor:
    return best(shares, 1)


def two_that_sum_to_one(shares: Tensor) -> Tensor:
    two = best(shares, 2)
    return two / two.sum(-1, keepdim=True)


def straight_through(shares: Tensor) -> Tensor:
    choice = (best(shares, 1) > 0).to(shares)
    return choice + shares - shares.detach()


def choice_alone(shares: Tensor) -> Tensor:
    return (best(shares, 1) > 0).to(shares)


class Routed(Block):
    """A block of experts whose router is balanced by a term of the loss."""

    def __init__(self, weigh: Weigh):
        super().__init__()
        self.weigh = weigh
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))
        self.uneven = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        tokens = self.norm(x).flatten(0, 1)
        shares = (4 * self.router(tokens)).softmax(-1)
        weights = self.weigh(shares)
        load = (weights.detach() > 0).to(shares).mean(0)
        self.uneven = EXPERTS * (load * shares.mean(0)).sum()
        outputs = torch.stack([expert(tokens) for expert in self.experts], 1)
        return x + (weights[..., None] * outputs).sum(1).view_as(x)


class Mixture(Decoder):
    def __init__(self, weigh: Weigh):
        super().__init__(0.0)
        self.blocks[1] = Routed(weigh)


def balanced(model: Any, ids: Tensor) -> Tensor:
    return loss_of(model, ids) + 0.01 * model.blocks[1].uneven


@pytest.mark.slow
@each("weigh", [divided_by_itself, divided_with_eps, softmax_of_one])
def test_a_router_whose_weight_is_constant_is_named(weigh: Weigh):
    report = report_of("gradients", model=Mixture(weigh), loss=balanced)
    assert first(report) == ("gradients", "blocks.1.router.weight")


@pytest.mark.slow
@each("weigh", [as_it_is, two_that_sum_to_one, straight_through])
def test_a_router_that_the_cross_entropy_trains_is_sound(weigh: Weigh):
    report = report_of("gradients", model=Mixture(weigh), loss=balanced)
    assert report.holds == ("gradients",)
    assert not report.notes


def test_a_router_that_only_chooses_gets_a_note():
    report = report_of("gradients", model=Mixture(choice_alone), loss=balanced)
    assert report.holds == ("gradients",)
    assert [note.module for note in report.notes] == ["blocks.1.router.weight"]


class AttachesItsBalance(Mixture):
    """Gives the balance its gradient on the way back, and no part in the loss."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        return Attach.apply(logits, 0.01 * self.blocks[1].uneven)


@pytest.mark.slow
@each(("weigh", "failing"), [(divided_with_eps, 1), (as_it_is, 0), (two_that_sum_to_one, 0)])
def test_a_term_that_is_attached_on_the_way_back_is_another_term(weigh: Weigh, failing: int):
    assert len(report_of("gradients", model=AttachesItsBalance(weigh)).failures) == failing


class Keyed(Decoder):
    """Attends with a bias of its keys, which the softmax cancels."""

    def __init__(self):
        super().__init__(0.0)
        self.q, self.k = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + F.scaled_dot_product_attention(self.q(x), self.k(x), x, is_causal=True)
        return self.head(self.norm(x))


def with_penalty(model: nn.Module, ids: Tensor) -> Tensor:
    return loss_of(model, ids) + 1e-3 * sum(p.square().sum() for p in model.parameters())


def test_a_bias_that_the_softmax_cancels_is_sound_under_a_penalty():
    report = report_of("gradients", model=Keyed(), loss=with_penalty)
    assert report.ok
    assert not any("k.bias" in note.module for note in report.notes)


class Valued(Decoder):
    """Has a second head for values, which reads the stream and gives nothing back to it."""

    def __init__(self):
        super().__init__(0.0)
        self.value = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x), self.value(x.detach())[..., 0]


def with_values(model: nn.Module, ids: Tensor) -> Tensor:
    logits, values = model(ids[:, :-1])
    scored = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
    return scored + 0.1 * (values - 1).square().mean()


def test_a_head_that_only_another_term_reads_is_sound():
    report = report_of("gradients", model=Valued(), loss=with_values)
    assert report.holds == ("gradients",)
    assert not report.notes


@pytest.mark.parametrize("weigh", [divided_with_eps])
def test_what_is_declared_frozen_is_left_out(weigh: Weigh):
    declare = {"frozen": "blocks.1.router*"}
    report = report_of("gradients", model=Mixture(weigh), loss=balanced, declare=declare)
    assert report.holds == ("gradients",)

"""Faults that ``gradients`` names in mixtures of experts: routers that learn nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from corpus.batches import text
from corpus.case import LATER, PLANTED_1, PUBLIC, UNSEEN, Arguments, fault, twins
from corpus.models.experts import Experts, StackedExperts, mixture_of, next_token_and_balance
from corpus.models.gpt import Gpt
from corpus.models.llama import llama_of
from corpus.models.parts import draw
from corpus.training import changed, full_setup, labelled, loss_setup


class DetachedRouter(StackedExperts):
    def shares(self, x: Tensor) -> Tensor:
        return super().shares(x).detach()


@fault("gradients", "derivative", place="blocks.0*", origin=PLANTED_1)
def router_detached() -> Arguments:
    """The router's shares are detached, so that it never learns."""
    return full_setup(llama_of(mlp=DetachedRouter))


class Attach(torch.autograd.Function):
    """Return the weights as they are, and give the auxiliary loss its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.save_for_backward(auxiliary)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (auxiliary,) = ctx.saved_tensors
        return gradient, torch.ones_like(auxiliary)


class BalancedExperts(Experts):
    """Experts whose loads are balanced by a loss that is attached to their weights."""

    keeps = True

    def weigh(self, weights: Tensor, uneven: Tensor) -> Tensor:
        weights = super().weigh(weights, uneven)
        attached = Attach.apply(weights, 0.01 * uneven)
        return attached if self.keeps else weights

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class ForgetsItsBalance(BalancedExperts):
    keeps = False


@twins(
    "gradients",
    "explained",
    "derivative",
    place="blocks.0|blocks.0.mlp*",
    origin=PUBLIC,
    thread="Automodel#1408",
)
def moe_aux(*, faulty: bool) -> Arguments:
    """The result of the function that attaches the auxiliary loss is thrown away."""
    make = llama_of(mlp=ForgetsItsBalance if faulty else BalancedExperts)
    return loss_setup(partial(make, layers=3), text(8), remade=False)


class Switch(Experts):
    """Experts of which each token takes the best one; blocks take no balance from them."""

    sums_to_one = False

    def __init__(self, dim: int):
        super().__init__(dim, best=1, shares_sum_to_one=self.sums_to_one)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class NormalisedSwitch(Switch):
    sums_to_one = True


@twins("gradients", place="*router*|blocks.*.mlp", origin=UNSEEN)
def single_expert_weight_renormalised(*, faulty: bool) -> Arguments:
    """The weight of the one expert is divided by itself, so that the router gets no gradient."""
    kind = NormalisedSwitch if faulty else Switch

    def add_experts(model: Gpt) -> None:
        for block in model.blocks:
            block.mlp = kind(64).apply(draw)

    make = changed(add_experts, partial(Gpt, layers=2, dropout=0.0, tied=False))
    return loss_setup(make, text(length=40, seed=8))


@twins("gradients", place="blocks.?.mlp|blocks.?.mlp.router*", origin=LATER)
def one_expert_weighs_one(*, faulty: bool) -> Arguments:
    """Shares that sum to one are constant where a token takes one expert: the routers learn nothing."""

    def next_token_alone(model: nn.Module, ids: Tensor) -> Tensor:
        return labelled(model(ids)[0][:, :-1], ids[:, 1:])

    make = mixture_of(lambda dim: Experts(dim, best=1, shares_sum_to_one=faulty))
    return loss_setup(make, text(length=40, seed=14), next_token_alone, seed=14)


class BalancedSwitch(Experts):
    """Experts of which each token takes the best one, with a small eps where its weight is divided."""

    divides = False

    def __init__(self, dim: int):
        super().__init__(dim, best=1)

    def weigh(self, weights: Tensor, uneven: Tensor) -> Tensor:
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) if self.divides else weights


class DividedSwitch(BalancedSwitch):
    divides = True


@twins("gradients", place="blocks.?.mlp.router*", origin=PUBLIC, thread="minimind#859")
def router_top1(*, faulty: bool) -> Arguments:
    """The one weight is divided by itself: the routers learn from the balance of their loads alone."""
    make = mixture_of(DividedSwitch if faulty else BalancedSwitch)
    return loss_setup(make, text(length=40, seed=21), next_token_and_balance, seed=21)

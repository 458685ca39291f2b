"""Faults that ``update`` names: a step that does not do what the optimizer's rule says."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from corpus.batches import text
from corpus.case import DEEP, PLANTED_1, PLANTED_2, PUBLIC, Arguments, fault, twins
from corpus.models.deep import Training, deep_bert, deep_llama, planted
from corpus.models.llama import Llama
from corpus.places import OPTIMIZER
from corpus.training import WideAdamW, adamw, changed, full_setup, groups, loss_setup


def betas_exchanged_adamw(model: nn.Module, lr: float) -> AdamW:
    return AdamW(model.parameters(), lr=lr, betas=(0.999, 0.9))


@fault("update", "groups", place=OPTIMIZER, origin=PLANTED_1)
def betas() -> Arguments:
    """Adam's betas are exchanged."""
    return full_setup(optimizer=betas_exchanged_adamw)


@fault("update", "groups", place=OPTIMIZER, origin=DEEP)
@planted(deep_bert)
def betas_exchanged(training: Training) -> None:
    """Adam's betas are exchanged: gradients are averaged over 1000 steps, and their squares over 10."""
    training.optimizer = partial(AdamW, lr=training.lr, betas=(0.999, 0.9), weight_decay=0.01)


def climbing(model: nn.Module, lr: float) -> AdamW:
    return AdamW(model.parameters(), lr=lr, maximize=True)


@fault("update", "overfit", place=OPTIMIZER, origin=PLANTED_2)
def maximize() -> Arguments:
    """The optimizer climbs the loss."""
    return full_setup(optimizer=climbing)


@fault("update", "groups", place=OPTIMIZER, origin=DEEP, not_right="it follows the rule of Adam")
@planted(deep_llama)
def decay_of_adamw_given_to_adam(training: Training) -> None:
    """Adam got the weight decay of 0.1 of AdamW, which it adds to the gradients, where it outweighs them."""
    training.optimizer = partial(Adam, lr=training.lr, betas=(0.9, 0.95), weight_decay=0.1)


@fault("update", origin=PLANTED_2)
def bf16_tiny_lr() -> Arguments:
    """A rate of 1e-6 is too small for weights in bfloat16: most updates are rounded away."""
    make = changed(lambda model: model.to(torch.bfloat16), Llama)
    return full_setup(make, optimizer=adamw, lr=1e-6, step=None, scheduled=False) | {"lr": None}


@fault("update", origin=DEEP)
@planted(deep_llama)
def updates_lost_in_bf16(training: Training) -> None:
    """Weights and optimizer are bfloat16 and the rate is 1e-5, so that most updates round to nothing."""
    training.model.to(torch.bfloat16)
    training.optimizer, training.lr = partial(AdamW, lr=1e-5), 1e-5


@fault("update", "finite", "overfit", origin=DEEP)
@planted(deep_llama)
def adam_in_half_precision(training: Training) -> None:
    """Weights and optimizer are float16, in which Adam's epsilon of 1e-8 is 0: it divides 0 by 0."""
    training.model.half()


@twins("update", place="*norm*|blocks*|optimizer", origin=PUBLIC, thread="ml-by-hand#85")
def bf16_gains(*, faulty: bool) -> Arguments:
    """Weights are bfloat16 alone: steps of 6e-4 are rounded away from gains of 1, in every step."""

    def narrow(model: Llama) -> None:
        angles = dict(model.rotary.named_buffers())
        kept = {name: table.clone() for name, table in angles.items()}
        model.to(torch.bfloat16)
        for name, table in kept.items():
            setattr(model.rotary, name, table)

    def of_groups(model: nn.Module) -> Optimizer:
        kind = partial(AdamW, betas=(0.9, 0.95)) if faulty else WideAdamW
        return kind(groups(model), lr=6e-4)

    return loss_setup(changed(narrow, Llama), text(seed=22), optimizer=of_groups)

"""Faults of the optimizer, the schedule and the step, first list."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from .case import Arguments, Case, collect
from .gpt import GPT, small, untied
from .places import OPTIMIZER, SCHEDULER, STEP
from .setups import accumulate, advance, decay_groups, halves, own, shifted_tokens

FAULTS: dict[str, Case] = {}
fault = collect(FAULTS)
Batch = tuple[Tensor, ...]

# ----------------------------------------------------------------------------------------------- optimizer


@fault("optimizer_coverage", place="")
def opt_before_copy() -> Arguments:
    """The optimizer was built before the model was copied, and holds the other one's parameters."""
    torch.manual_seed(0)
    model = small()
    optimizer = decay_groups(model)
    return {"model": copy.deepcopy(model), "batch": shifted_tokens(), "optimizer": optimizer}


def without_head(model: nn.Module, lr: float) -> AdamW:
    return AdamW([p for path, p in model.named_parameters() if not path.startswith("head")], lr=lr)


@fault("optimizer_coverage", place="head*|optimizer")
def opt_missing_head() -> Arguments:
    """The optimizer does not hold the head."""
    return own(untied, optimizer=without_head)


def with_gains(model: nn.Module, lr: float) -> AdamW:
    """Return AdamW that decays the gains and biases of the first norms like matrices."""
    named = list(model.named_parameters())
    decayed = [p for path, p in named if "n1" in path or p.dim() > 1]
    others = [p for path, p in named if not ("n1" in path or p.dim() > 1)]
    return AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}], lr=lr)


@fault("groups", place="h.*n1*|optimizer")
def groups_wrong() -> Arguments:
    """The gains of half of the norms are in the group that decays."""
    return own(small, optimizer=with_gains)


def betas_exchanged(model: nn.Module, lr: float) -> AdamW:
    return AdamW(model.parameters(), lr=lr, betas=(0.999, 0.9))


@fault("update", "groups", place=OPTIMIZER)
def betas() -> Arguments:
    """Adam's betas are exchanged."""
    return own(small, optimizer=betas_exchanged)


@fault("overfit", "update", "schedule", place="")
def lr_huge() -> Arguments:
    """AdamW has a rate of 1."""
    return own(small, lr=1.0)


@fault("schedule", place=SCHEDULER)
def sched_zero() -> Arguments:
    """The warm-up takes a million steps."""
    arguments = own(small, scheduled=False)
    scheduler = LambdaLR(arguments["optimizer"], lambda i: min(i / 1_000_000, 1))
    return arguments | {"scheduler": scheduler}


# ---------------------------------------------------------------------------------------------------- step


@fault("step", place=STEP)
def no_div() -> Arguments:
    """The losses of micro-batches are added, not averaged."""

    def step(model: GPT, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = accumulate(model, batch, share=1.0)
        advance(optimizer, scheduler)
        return loss

    return own(small, step=step)


@fault("step", "repeats", place=STEP)
def no_zero() -> Arguments:
    """Gradients are never zeroed."""

    def step(model: GPT, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.train()
        loss = accumulate(model, batch)
        clip_grad_norm_(model.parameters(), 1e9)
        advance(optimizer, scheduler)
        return loss

    return own(small, step=step)


@fault("step", place=STEP)
def clip_early() -> Arguments:
    """Gradients are clipped before each backward pass, not after the last."""

    def step(model: GPT, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.train()
        optimizer.zero_grad()
        total = torch.zeros(())
        for half in halves(batch):
            clip_grad_norm_(model.parameters(), 0.1)
            loss = model(*half)[1] / 2
            loss.backward()
            total += loss.detach()
        advance(optimizer, scheduler)
        return total

    return own(small, step=step)


@fault("step", "reduction", place="step|optimizer|loss")
def uneven_tokens() -> Arguments:
    """Micro-batches weigh the same, though one counts 48 labels and the other 8."""

    def step(model: GPT, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = accumulate(model, batch)
        advance(optimizer, scheduler)
        return loss

    ids, labels = shifted_tokens()
    labels = labels.clone()
    labels[2:, 4:] = -100
    return own(small, step=step, batch=(ids, labels))

"""Faults that ``schedule`` names: a rate that does not take its planned course."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from corpus.batches import text
from corpus.case import DEEP, LATER, PLANTED_1, PLANTED_2, PUBLIC, UNSEEN, Arguments, fault, twins
from corpus.models.deep import Training, deep_translation, planted
from corpus.models.gpt import Gpt
from corpus.models.llama import Llama
from corpus.places import SCHEDULER
from corpus.training import decay_groups, full_setup, looped, loss_setup, next_token


def by(share: Callable[[int], float]) -> Arguments:
    """Return a step whose rate is multiplied by this share."""
    arguments = full_setup(scheduled=False)
    return arguments | {"scheduler": LambdaLR(arguments["optimizer"], share)}


@fault("schedule", place=SCHEDULER, origin=PLANTED_1)
def sched_zero() -> Arguments:
    """The warm-up takes a million steps."""
    return by(lambda i: min(i / 1_000_000, 1))


@fault("schedule", place=SCHEDULER, origin=PLANTED_2)
def sched_peak() -> Arguments:
    """The schedule returns the rate, with which torch multiplies the rate."""
    return by(lambda i: 1e-3 * min(1, i / 100))


@fault("schedule", place=SCHEDULER, origin=DEEP)
@planted(deep_translation)
def rate_multiplied_by_itself(training: Training) -> None:
    """The lambda of LambdaLR returns a rate, which torch multiplies by the optimizer's: 5e-4 is squared."""
    training.optimizer = partial(AdamW, lr=training.lr, betas=(0.9, 0.98), weight_decay=1e-4)
    training.rate = lambda step: training.lr * training.warmup(step)


@fault("schedule", place=SCHEDULER, origin=PLANTED_2)
def sched_other() -> Arguments:
    """The scheduler steers another optimizer."""
    arguments = full_setup(scheduled=False)
    other = decay_groups(arguments["model"])
    return arguments | {"scheduler": LambdaLR(other, lambda i: min(1, (i + 1) / 100))}


@twins("schedule", place="scheduler|step", origin=PUBLIC, thread="accelerate#2926")
def fast_schedule(*, faulty: bool) -> Arguments:
    """The scheduler steps once for each of four processes: the rate is 0 after a quarter of the steps."""

    def step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: LRScheduler) -> Tensor:
        optimizer.zero_grad()
        loss = next_token(model, ids)
        loss.backward()
        optimizer.step()
        for _ in range(4 if faulty else 1):
            scheduler.step()
        return loss

    return looped(step, partial(AdamW, lr=2e-3))


def warm_cosine(step: int) -> float:
    """Return the share of the rate: up over 20 of 400 steps, then down to a tenth along a cosine."""
    if step < 20:
        return (step + 1) / 20
    done = min(1.0, (step - 20) / 380)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@twins("schedule", "step", place="scheduler|step", origin=UNSEEN)
def schedule_moved_by_micro_batches(*, faulty: bool) -> Arguments:
    """The schedule takes a step after each micro-batch and is over in a quarter of the training."""

    def step(model: nn.Module, batch: Tensor, optimizer: Optimizer, scheduler: LRScheduler) -> Tensor:
        model.train()
        losses = []
        for part in batch.chunk(4):
            loss = next_token(model, part) / 4
            loss.backward()
            losses.append(loss.detach())
            if faulty:
                scheduler.step()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not faulty:
            scheduler.step()
        return torch.stack(losses).sum()

    return loss_setup(
        partial(Gpt, layers=2),
        text(8, 24, seed=18),
        scheduler=lambda optimizer: LambdaLR(optimizer, warm_cosine),
        step=step,
        declare={"peak_lr": 1e-3, "steps": 400, "tied": True},
    )


@twins("schedule", place="scheduler|", origin=LATER)
def decay_by_whole_numbers(*, faulty: bool) -> Arguments:
    """A whole-number division turns the decay of the rate into zero for the last 19 of 100 steps."""

    def share(step: int) -> float:
        """Warm up for 10 steps, hold the rate, and let it fall over the last 20 of 100 steps."""
        if step < 80:
            return min(1.0, (step + 1) / 10)
        left = max(100 - step, 0)
        return left // 20 if faulty else left / 20

    return loss_setup(
        Llama,
        text(seed=26),
        optimizer=partial(decay_groups, lr=2e-3),
        scheduler=lambda optimizer: LambdaLR(optimizer, share),
        declare={"peak_lr": 2e-3, "steps": 100},
    )


class ByLayer(AdamW):
    """AdamW whose rates fall from layer to layer."""

    def __init__(self, model: nn.Module, *, every_step: bool):
        layers: dict[int, list[nn.Parameter]] = {}
        for path, p in model.named_parameters():
            layers.setdefault(int(path.split(".")[1]) if path.startswith("blocks") else -1, []).append(p)
        super().__init__([{"params": held} for held in layers.values()], lr=5e-4)
        self.factors = [0.75 ** (len(model.blocks) - 1 - layer) if layer >= 0 else 1.0 for layer in layers]
        self.every_step = every_step
        if not every_step:
            self.multiply()

    def multiply(self) -> None:
        for group, factor in zip(self.param_groups, self.factors, strict=True):
            group["lr"] *= factor

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if self.every_step:
            self.multiply()
        super().step()


@twins("schedule", place="optimizer", origin=PUBLIC, thread="ViTPose_pytorch#20")
def llrd_every_step(*, faulty: bool) -> Arguments:
    """The factors of layers are multiplied into the rates once more in every step."""
    return loss_setup(Llama, text(seed=23), optimizer=lambda model: ByLayer(model, every_step=faulty))


@twins("schedule", place="scheduler", origin=PUBLIC, thread="nanochat#68")
def share_done_is_the_rate(*, faulty: bool) -> Arguments:
    """The rate is multiplied by the share of steps that are done: it rises where it should fall."""

    def scheduled(optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: step / 200 if faulty else 1 - step / 200)

    return loss_setup(Llama, text(seed=24), scheduler=scheduled, declare={"steps": 200})

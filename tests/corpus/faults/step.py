"""Faults that ``step`` names: a step that is not one step on the mean loss of its batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from corpus.batches import EOS, PAD, padded_text, shifted_tokens, text
from corpus.case import DEEP, LATER, PLANTED_1, PLANTED_2, PLANTED_3, PUBLIC, UNSEEN, Arguments, fault, twins
from corpus.models.deep import Training, deep_gpt2, planted
from corpus.models.gpt import Gpt, steady
from corpus.places import STEP
from corpus.training import (
    accumulate,
    advance,
    full_setup,
    halves,
    looped,
    loss_setup,
    next_real_token,
    next_token,
)

Pair = tuple[Tensor, ...]
"""Token ids and targets."""

# ----------------------------------------------------------------------------------------------- accumulation


@fault("step", place=STEP, origin=PLANTED_1)
def no_div() -> Arguments:
    """The losses of micro-batches are added, not averaged."""

    def step(model: Gpt, batch: Pair, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = accumulate(model, batch, share=1.0)
        advance(optimizer, scheduler)
        return loss

    return full_setup(step=step)


@twins("step", place="step|loss", origin=PUBLIC, thread="distillKitPlus#5")
def accumulated(*, faulty: bool) -> Arguments:
    """The losses of four micro-batches are added, not averaged."""

    def step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: LRScheduler) -> Tensor:
        parts = ids.chunk(4)
        total = torch.zeros(())
        optimizer.zero_grad()
        for part in parts:
            loss = next_token(model, part)
            (loss if faulty else loss / len(parts)).backward()
            total += loss.detach() / len(parts)
        optimizer.step()
        scheduler.step()
        return total

    return looped(step, partial(SGD, lr=0.12, momentum=0.9))


@fault("step", "reduction", place="step|optimizer|loss", origin=PLANTED_1)
def uneven_tokens() -> Arguments:
    """Micro-batches weigh the same, though one counts 48 labels and the other 8."""

    def step(model: Gpt, batch: Pair, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = accumulate(model, batch)
        advance(optimizer, scheduler)
        return loss

    ids, labels = shifted_tokens()
    labels = labels.clone()
    labels[2:, 4:] = -100
    return full_setup(step=step, batch=(ids, labels))


@twins("step", "reduction", place="step|loss", origin=UNSEEN)
def mean_of_uneven_means(*, faulty: bool) -> Arguments:
    """Micro-batches with many and with few real tokens weigh the same in the accumulated gradient."""

    def step(model: nn.Module, batch: Mapping[str, Tensor], optimizer: Optimizer, scheduler: Any) -> Tensor:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        parts = batch["ids"].chunk(2)
        counts = [(part[:, 1:] != PAD).sum() for part in parts]
        total = torch.zeros(())
        for part, count in zip(parts, counts, strict=True):
            share = 1 / len(parts) if faulty else count / sum(counts)
            loss = next_real_token(model, {"ids": part}) * share
            loss.backward()
            total = total + loss.detach()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    ids, _ = padded_text([40, 36, 38, 6, 5, 7], seed=17)
    declare = {"pad_id": PAD, "eos_id": EOS, "tied": True}
    return loss_setup(steady, {"ids": ids}, next_real_token, step=step, declare=declare)


@fault("step", place=STEP, origin=PLANTED_2)
def step_each() -> Arguments:
    """The optimizer steps after each micro-batch."""

    def step(model: Gpt, batch: Pair, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.train()
        total = torch.zeros(())
        for half in halves(batch):
            optimizer.zero_grad()
            loss = model(*half)[1]
            loss.backward()
            total += loss.detach() / 2
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return total

    return full_setup(step=step)


@fault("step", "repeats", place=STEP, origin=PLANTED_1)
def no_zero() -> Arguments:
    """Gradients are never zeroed."""

    def step(model: Gpt, batch: Pair, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.train()
        loss = accumulate(model, batch)
        clip_grad_norm_(model.parameters(), 1e9)
        advance(optimizer, scheduler)
        return loss

    return full_setup(step=step)


@fault("step", place=STEP, origin=PLANTED_2)
def step_eval() -> Arguments:
    """The model is in evaluation mode in the training step."""

    def step(model: Gpt, batch: Pair, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.eval()
        optimizer.zero_grad()
        loss = accumulate(model, batch)
        advance(optimizer, scheduler)
        return loss

    return full_setup(step=step)


# --------------------------------------------------------------------------------------------------- clipping


@fault("step", place=STEP, origin=PLANTED_1)
def clip_early() -> Arguments:
    """Gradients are clipped before each backward pass, not after the last."""

    def step(model: Gpt, batch: Pair, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
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

    return full_setup(step=step)


@fault("step", place=STEP, origin=PLANTED_3)
def clip_subset() -> Arguments:
    """Only the gradients of the layers are clipped, not those of embeddings and head."""

    def step(model: Gpt, batch: Pair, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = accumulate(model, batch)
        clip_grad_norm_(model.blocks.parameters(), 0.05)
        advance(optimizer, scheduler)
        return loss

    return full_setup(step=step)


@twins("step", place="step|", origin=LATER)
def clipping_an_empty_iterator(*, faulty: bool) -> Arguments:
    """The parameters are an iterator, which the logged norm has used up: nothing is left to clip."""
    holder = iter if faulty else list

    def step(model: nn.Module, batch: Tensor, optimizer: Optimizer, scheduler: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = next_token(model, batch)
        loss.backward()
        trained = holder(p for p in model.parameters() if p.requires_grad)
        size = torch.stack([p.grad.norm() for p in trained]).norm()
        if torch.isfinite(size):
            clip_grad_norm_(trained, 0.1)
            optimizer.step()
        return loss

    def nesterov(model: nn.Module) -> SGD:
        return SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    return loss_setup(steady, text(length=24, seed=25), optimizer=nesterov, step=step)


@fault("step", "update", place=STEP, origin=DEEP, not_right="no norm is declared")
@planted(deep_gpt2)
def clipping_divides_the_step(training: Training) -> None:
    """Gradients are clipped at 0.01 where 1.0 was meant, which divides SGD's step by more than 100."""
    training.lr, training.max_grad_norm = 0.1, 0.01
    training.optimizer = partial(SGD, lr=training.lr, momentum=0.9, nesterov=True)

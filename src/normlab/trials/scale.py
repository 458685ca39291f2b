"""What losses are compared with: the entropy of the targets, or the loss at the start."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch

from normlab.errors import UserError
from normlab.setups.setup import Setup
from normlab.trace.copies import copied_model
from normlab.trace.facts.targets import RECORDED, Targets, read_logits
from normlab.trace.restore import restored
from normlab.trace.tensors import unwrap
from normlab.trace.trace import Trace

LEARNT_NATS: Final = 0.15
"""A loss that is less than this below the unigram entropy does not show that the inputs are used."""

BIAS_NATS: Final = 0.01
"""Targets are counted until their entropy is biased by less than this."""


@dataclass(frozen=True)
class Scale:
    """How to read a loss: ``(loss - rest) / weight`` is in nats per target.

    ``unigram`` is the entropy in nats of the targets' own frequencies (label smoothing included), and so the
    loss of the best model that ignores its inputs; ``uniform`` is the loss of equal logits. Both are None if
    the loss is not a cross-entropy whose targets can be read, for the reason ``unknown``.
    """

    start: float
    """The loss before the first step, in the same unit."""
    unigram: float | None = None
    uniform: float | None = None
    targets: int = 0
    """How many targets were counted, in ``batches``."""
    batches: int = 0
    weight: float = 1.0
    rest: float = 0.0
    unknown: str = ""

    def __post_init__(self) -> None:
        if not self.weight or not math.isfinite(self.weight):
            raise UserError(f"weight is {self.weight}, but must be a finite number other than 0")

    def nats(self, loss: float) -> float:
        """A loss in nats per target; the loss itself if no targets are known."""
        return (loss - self.rest) / self.weight

    @property
    def reference(self) -> float:
        """The loss of a model that has learnt nothing yet: the unigram entropy, or the loss at the start if
        that is lower, since weights that were trained before begin below the entropy.
        """
        return self.start if self.unigram is None else min(self.unigram, self.start)

    def learns(self, loss: float, noise: float) -> bool:
        """Whether a loss shows that something was learnt: 0.15 nats below the unigram entropy if weights
        began above that, else three standard errors below the start.
        """
        if self.unigram is not None and self.start > self.unigram - LEARNT_NATS:
            return loss < self.unigram - LEARNT_NATS
        return loss < self.start - 3 * noise


def read_scale(setup: Setup, batches: Sequence[Any], seconds: float, first: float) -> Scale:
    """Read the targets of the batches off the gradient at the logits; ``first`` is the loss that the step
    returned for the first batch, which must be that of the same targets.

    Targets are read until the bias of the entropy, (V - 1) / 2N for N targets in V classes, falls below
    ``BIAS_NATS``, as far as ``seconds`` allow.
    """
    losses, read = _read_targets(setup, batches, time.monotonic() + seconds)
    if not losses or not 2 / 3 < first / losses[0] < 3 / 2:  # half or twice as much is another unit
        differs = f"the step returns {first:.4g} for a loss of {losses[0]:.4g}" if losses else ""
        return Scale(first, unknown=differs or "no loss= was passed")
    start = fmean(losses)
    if not all(read) or len({len(heads) for heads in read}) > 1:
        return Scale(start, unknown="no output has the gradient of a cross-entropy")
    heads = list(zip(*read, strict=True))  # each output's, over the batches
    weights = [fmean(head.weight for head in of_head) for of_head in heads]
    weight = sum(weights)
    rest = start - fmean(sum(head.value for head in of_batch) for of_batch in read)

    def mixed(values: list[float]) -> float:
        return sum(w * value for w, value in zip(weights, values, strict=True)) / weight

    return Scale(
        start=(start - rest) / weight,
        unigram=mixed([_entropy([head.targets for head in of_head]) for of_head in heads]),
        uniform=mixed([math.log(of_head[0].targets.classes) for of_head in heads]),
        targets=sum(of_batch[0].number for of_batch in read),
        batches=len(losses),
        weight=weight,
        rest=rest,
    )


class _Head(NamedTuple):
    """The targets of an output, and the cross-entropy that the loss takes of it."""

    targets: Targets
    value: float

    @property
    def number(self) -> int:
        return int(self.targets.counted.sum())

    @property
    def weight(self) -> float:
        return float(self.targets.weight[self.targets.counted].sum())


def _read_targets(
    setup: Setup, batches: Sequence[Any], deadline: float
) -> tuple[list[float], list[list[_Head]]]:
    """Return the loss of each batch and the targets of its outputs, until there are enough or it is late."""
    losses, read, counted = list[float](), list[list[_Head]](), 0
    with restored(setup), suppress(UserError):  # the step alone may know the loss
        model = copied_model(unwrap(setup.model))
        for batch in {id(batch): batch for batch in batches}.values():
            trace = Trace(model, batch, setup.loss_of)
            with trace.with_graph(events=True, functions=RECORDED) as passed:
                scored = read_logits(trace, passed)
                losses.append(float(passed.loss.detach()) if passed.loss is not None else math.nan)
            outputs = [pair for pair in scored if pair[0].output] or scored
            heads = [_Head(targets, targets.value(logits.value)) for logits, targets in outputs]
            read.append(heads)
            counted += heads[0].number if heads else 0
            enough = heads and (heads[0].targets.classes - 1) / 2 <= BIAS_NATS * counted
            if enough or time.monotonic() > deadline:
                break
    return losses, read


def _entropy(targets: Sequence[Targets]) -> float:
    """The entropy of the target classes, each counted as often as the loss weighs it."""
    counts = torch.zeros(targets[0].classes, dtype=torch.float64)
    for of_batch in targets:
        ids, weights = of_batch.ids[of_batch.counted], of_batch.weight[of_batch.counted]
        counts.index_add_(0, ids.reshape(-1), weights.reshape(-1).double())
    smoothing = fmean(of_batch.smoothing for of_batch in targets)
    p = (1 - smoothing) * counts / counts.sum() + smoothing / len(counts)
    return -float(torch.xlogy(p, p).sum())

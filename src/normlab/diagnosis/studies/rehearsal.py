"""Rehearse the first steps of a training on copies of the weights, at its full learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean, median
from typing import Any, Final

import torch
from torch.optim import Optimizer

from normlab.diagnosis.probing.cropping import split
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.tokens import PaddingMasks, find_padding_masks
from normlab.diagnosis.rules.finding import number, numbers
from normlab.diagnosis.studies.attention import attention
from normlab.diagnosis.studies.representation import similarity
from normlab.diagnosis.study import MINI_BATCHES, Study, StudyContext
from normlab.diagnosis.table import Row, Table
from normlab.errors import UserError
from normlab.trace.step import OptimizerFactory, OptimizerStep, Weights, trainable
from normlab.trace.trace import at_weights
from normlab.trace.untouched import undisturbed

STEPS: Final = 30
PARTS: Final = 4
"""Mini-batches that a batch is split into, where there are no others."""


def rehearsal(
    subject: Subject,
    optimiser: Optimizer | OptimizerFactory,
    *,
    batches: Sequence[Any] = (),
    steps: int = STEPS,
) -> list[Table]:
    r"""Take some steps on copies of the weights, and measure the model before the first and after the last.

    Every mini-batch but the last is stepped on in turn, at the full learning rate, without a warm-up and
    without dropout; the last one is what the model is measured on, unless it is the only one. A row of
    ``rehearsal`` is a step, with ``loss`` and ``grad_l2`` before it; they end before a loss that is not
    finite. The two rows of ``rehearsed`` are the model before and after: its ``loss``, ``cosine``, the mean
    cosine of two tokens at the end of a stack, the largest of the stacks, ``max_logit`` and ``entropy`` of
    attention, the latter over that of uniform attention, and ``moved``, the median over matrices of
    :math:`\|w - w_0\| / \|w_0\|`; None for what is not finite.

    Wortsman et al. 2023, Section 3 (arXiv 2309.14322) for attention logits that grow at large rates.
    Raises UserError for a frozen model and a batch that cannot be split.
    """
    given = list(batches) or split(subject.batch, PARTS)
    stepped, held = given[: max(1, len(given) - 1)], replace(subject, batch=given[-1])
    masks, twin = find_padding_masks(held), OptimizerStep(subject.model, optimiser)
    begun = {path: p.detach() for path, p in trainable(subject.model).items()}
    before = _measured(held, masks, begun, begun)
    rows: list[Row] = []
    with suppress(UserError):  # a loss that is not finite
        for i in range(steps):
            loss, gradients = twin.step(replace(subject, batch=stepped[i % len(stepped)]).trace())
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
            rows.append({"step": i, "loss": loss, "grad_l2": norm})
    after = _measured(held, masks, twin.weights, begun)
    both = ({"step": 0, **before}, {"step": len(rows), **after})
    return [Table("rehearsal", tuple(rows)), Table("rehearsed", both)]


def _measured(held: Subject, masks: PaddingMasks, weights: Weights, begun: Weights) -> dict[str, Any]:
    """What ``rehearsed`` says of some weights."""
    matrices = [(w, begun[path]) for path, w in weights.items() if w.ndim > 1]
    moved = [((w - first).norm() / first.norm()).item() for w, first in matrices if first.any()]
    found = dict.fromkeys(("loss", "cosine", "max_logit", "entropy"))
    with (
        torch.no_grad(),
        at_weights(held.model, weights),
        undisturbed(held.model, seed=None),
        suppress(UserError),
    ):
        found["loss"] = held.loss().item()
        ends = {row["stack"]: row["cosine"] for row in similarity(held, padding_masks=masks)}
        found["cosine"] = max((c for c in map(number, ends.values()) if c is not None), default=None)
        heads = attention(held, padding_masks=masks).rows
        found["max_logit"] = max((abs(x) for x in numbers(heads, "max_logit")), default=None)
        shares = [
            x / y
            for row in heads
            if (x := number(row["entropy"])) is not None and (y := number(row["uniform"]))
        ]
        found["entropy"] = fmean(shares) if shares else None
    moved_by = median(moved) if moved else None
    return {name: _finite(value) for name, value in {**found, "moved": moved_by}.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _measure(context: StudyContext) -> list[Table]:
    """Rehearse a training that has not begun."""
    begun = isinstance(context.optimiser, Optimizer) and bool(context.optimiser.state)
    return [] if begun else rehearsal(context.subject, context.optimiser, batches=context.batches)


REHEARSAL: Final = Study(
    "rehearsal",
    _measure,
    "standard",
    batch=MINI_BATCHES,
    order=96,
)

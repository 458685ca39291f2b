"""Forecast from a diagnosis whether a training gets going, and what would help it if it does not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from torch.optim import Optimizer

from normlab.diagnosis.plan import Plan
from normlab.diagnosis.rules.features import STUDIES, VERSION, features
from normlab.diagnosis.rules.finding import Tables
from normlab.diagnosis.study import StudyContext, named
from normlab.diagnosis.table import Table
from normlab.forecast.answer import STEPS, TRAINS, Answer, Trial, answer
from normlab.forecast.evaluation import told
from normlab.forecast.forecaster import Features
from normlab.forecast.shipping import shipped
from normlab.trace.step import scaled_lr

LONGEST: Final = 75
"""A longer warm-up counts as one of so many steps, the longest of these runs."""
LOWER: Final = (1 / 4, 1 / 16)
"""Learning rates, over the planned one, that are tried where the plan is not expected to succeed."""
WARMUP: Final = 50
"""Steps of the warm-up that is tried there."""
NEEDED: Final = tuple(name for name in STUDIES if name != "preconditioned_sharpness")
"""Studies that a forecast is made of; ``evaluation.UNTOLD`` says why the other is not among them."""
BY_RATE: Final = ("first_step", "updates", "output_change", "rehearsal")
"""Studies that the learning rate and the warm-up change."""
SLOW: Final = 10.0
"""Seconds of a rehearsal above which nothing is tried in the place of the plan."""


def forecast(
    context: StudyContext,
    tables: Mapping[str, Table],
    lr: float,
    *,
    seconds: float,
    cause: str = "",
    factors: Sequence[float] | None = None,
) -> Answer | None:
    """Return the answer for a model before its first step: whether it gets going within ``STEPS`` steps; None
    where its first steps were not rehearsed, or its training has begun.

    ``factors`` are of learning rates that are tried beside the planned one, over it; without them a warm-up
    and lower rates are tried, where the plan is not expected to succeed and a rehearsal is quick.
    ``seconds`` is the time of the rehearsal; ``cause`` is what stops the training in any case.
    """
    begun = isinstance(context.optimiser, Optimizer) and bool(context.optimiser.state)
    if begun or "rehearsed" not in tables:
        return None
    forecaster, runs = shipped(VERSION)
    lr = float(f"{lr:.6g}")  # of a tensor in single precision
    warmup, plan = context.warmup_steps, told_features(Tables(tables, lr))
    trials = [Trial(lr, warmup, plan)]
    seen = not forecaster.abstains(plan)
    unsure = seen and not cause and seconds <= SLOW and forecaster.probability(plan) < TRAINS
    if factors is None and unsure and warmup < WARMUP:
        trials.append(Trial(lr, WARMUP, at(context, tables, lr, warmup_steps=WARMUP)))
    for factor in factors if factors is not None else LOWER if unsure else ():
        trials.append(Trial(lr * factor, warmup, at(context, tables, lr * factor, factor=factor)))
    return answer(forecaster, runs, trials, cause=cause)


def at(
    context: StudyContext,
    tables: Mapping[str, Table],
    lr: float,
    *,
    factor: float = 1.0,
    warmup_steps: int | None = None,
) -> Features:
    """Return the features at the learning rate ``lr``, ``factor`` times that of the optimiser, and with
    another warm-up; ``tables`` are of the diagnosis, of which the studies of the step are made again.
    """
    plan: Plan = dict(context.plan)  # type: ignore[assignment]
    if warmup_steps is not None:
        plan["warmup_steps"] = warmup_steps
    found = dict(tables)
    with scaled_lr(context.optimiser, factor) as optimiser:
        again = replace(context, optimiser=optimiser, plan=plan)
        found.pop("plan", None)
        for study in named(BY_RATE):
            found |= {table.name: table for table in study.measure(again) if len(table)}
    return told_features(Tables(found, lr))


def told_features(tables: Tables) -> Features:
    """Return the features that a forecast is made of, for a training of ``STEPS`` steps."""
    found = dict(features(tables, steps=STEPS))
    if tables.warmup_steps > LONGEST:
        found |= {"warmup": math.log10(1 + LONGEST), "warmup_share": LONGEST / STEPS}
        if "change" in found:
            found["first_change"] = max(found["first_change"], found["change"] - 2 * math.log10(LONGEST))
    return told(found)

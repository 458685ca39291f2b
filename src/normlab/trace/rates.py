"""The rates that a schedule will give, without a step of its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from normlab.trace.rehearsal import groups_of, parameters_of
from normlab.trace.setup import Setup
from normlab.trace.tensors import tensors_in, unwrap

SIMULATED: Final = 8_000
"""Rates of single groups that are computed step by step, in about a tenth of a second."""
HORIZON: Final = 100_000
"""Steps that a schedule is followed for where its author does not declare how many there are."""


class Rates(NamedTuple):
    """The rates of a schedule, by group, at some of its steps."""

    steps: list[int]
    rates: list[list[float]]
    ended: Exception | None
    """What the scheduler raised after the last of them."""

    @property
    def top(self) -> list[float]:
        """The largest rate of any group at each step."""
        return [max(row) for row in self.rates]

    @property
    def peaks(self) -> list[float]:
        """The largest rate of each group."""
        return [max(column) for column in zip(*self.rates, strict=True)]


def simulated(optimizers: Sequence[Optimizer], scheduler: Any, steps: int | None) -> Rates:
    """Follow a schedule without stepping an optimizer; optimizers and scheduler are copies, and change.

    Every step where they are few; else the first ones, and of the others some where the schedule has a closed
    form.
    """
    groups = groups_of(optimizers)
    limit, count = max(SIMULATED // max(len(groups), 1), 100), steps or HORIZON
    form = _closed_form(scheduler) if count > limit else None
    numbers, rates, ended = [0], [[float(g["lr"]) for g in groups]], None
    start = getattr(scheduler, "last_epoch", 0)
    spaced = range(limit // 2, count, max((count - limit // 2) // (limit // 2), 1)) if form else ()
    for i in range(1, min(count, limit // 2 if form else limit)):
        try:
            scheduler.step()
        except Exception as error:
            ended = error
            break
        numbers.append(i)
        rates.append([float(g["lr"]) for g in groups])
    for i in spaced if form and ended is None else ():
        scheduler.last_epoch = start + i
        numbers.append(i)
        rates.append([float(rate) for rate in form()])
    return Rates(numbers, rates, ended)


def _closed_form(scheduler: Any) -> Callable[[], Sequence[Any]] | None:
    """A function of a scheduler's ``last_epoch`` that gives its rates, whatever they were before."""
    if type(scheduler) in (LambdaLR, OneCycleLR):
        return scheduler.get_lr
    return getattr(scheduler, "_get_closed_form_lr", None)


def bare(setup: Setup) -> tuple[list[Optimizer], Any]:
    """Copies of optimizers and scheduler that hold the user's own parameters: they must never be stepped.

    Where a function makes them, they are made for a copy of the model.
    """
    given, model, scheduler = setup.optimizer, unwrap(setup.model), setup.scheduler
    ready = list(given) if isinstance(given, (list, tuple)) else [given]
    bound = scheduler if hasattr(scheduler, "step") else None
    if all(isinstance(o, Optimizer) for o in ready):
        kept = [
            model,
            *parameters_of(ready),
            *(t for o in ready for s in o.state.values() for _, t in tensors_in(s)),
        ]
        ready, bound = copy.deepcopy((ready, bound), {id(x): x for x in kept})
    else:
        made = given(copy.deepcopy(model))
        ready = list(made) if isinstance(made, (list, tuple)) else [made]
    if scheduler is not None and not hasattr(scheduler, "step"):
        bound = scheduler(ready[0] if len(ready) == 1 else ready)
    return ready, bound


def rates_of(setup: Setup) -> Rates:
    """The rates that the optimizers will have; those that they have where there is no scheduler."""
    optimizers, scheduler = bare(setup)
    if scheduler is None:
        return Rates([0], [[float(g["lr"]) for g in groups_of(optimizers)]], None)
    return simulated(optimizers, scheduler, setup.declare.steps)

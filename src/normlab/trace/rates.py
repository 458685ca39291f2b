"""The rates that a schedule will give, without a step of its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

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
    scheduler: Any = None
    """A copy of the one that gave them."""

    @property
    def top(self) -> list[float]:
        """The largest rate of any group at each step."""
        return [max(row) for row in self.rates]

    @property
    def peaks(self) -> list[float]:
        """The largest rate of each group."""
        return [max(column) for column in zip(*self.rates, strict=True)]

    def reaches(self, asked: float) -> bool:
        """Whether the peak is the rate asked, up to a step of warm-up and the decay meanwhile."""
        top, at = self.top, self.top.index(peak := max(self.top))
        rise = max((b - a for a, b in pairwise(top[: at + 1])), default=0.0)
        after = min(at + 1, len(top) - 1)
        fall = (peak - top[after]) / max(self.steps[after] - self.steps[at], 1) * (self.steps[at] + 1)
        return asked - rise - fall <= peak * (1 + 1e-6) and peak <= asked * (1 + 1e-6) + rise

    @property
    def rises_again(self) -> bool:
        """Whether the rate, after its peak, falls and then rises little by little; a restart is one jump."""
        tail = self.top[self.top.index(max(self.top)) :]
        low = tail.index(min(tail))
        rise = max(tail[low:]) - tail[low]
        return low > 0 and rise > 1e-6 * tail[0] and max(b - a for a, b in pairwise(tail[low:])) < rise / 2

    @property
    def periodic(self) -> bool:
        """Whether it is cyclic by its class, or declares no end and comes back to half its peak twice."""
        parts = getattr(self.scheduler, "_schedulers", [self.scheduler])
        tail, half = self.top[self.top.index(max(self.top)) :], max(self.top) / 2
        back = sum(a < half <= b for a, b in pairwise(tail))
        return any(isinstance(s, CyclicLR) for s in parts) or (
            back > 1 and not any(hasattr(s, "T_max") for s in parts)
        )


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
    for i in range(1, min(count, limit // 2 if form else limit)):
        try:
            scheduler.step()
        except Exception as error:
            ended = error
            break
        numbers.append(i)
        rates.append([float(g["lr"]) for g in groups])
    if form is not None and ended is None:
        for i in range(limit // 2, count, max((count - limit // 2) // (limit // 2), 1)):
            scheduler.last_epoch = start + i
            numbers.append(i)
            rates.append([float(rate) for rate in form()])
    return Rates(numbers, rates, ended, scheduler)


def _closed_form(scheduler: Any) -> Callable[[], Sequence[Any]] | None:
    """A function of a scheduler's ``last_epoch`` that gives its rates, whatever they were before."""
    if type(scheduler) in (LambdaLR, OneCycleLR):
        return scheduler.get_lr
    return getattr(scheduler, "_get_closed_form_lr", None)


def bare(setup: Setup) -> tuple[list[Optimizer], Any]:
    """Copies of optimizers and scheduler that hold the user's own parameters: they must never be stepped.

    Where a function makes them, they are made for a copy of the model.
    """
    own, model, scheduler = setup.optimizer, unwrap(setup.model), setup.scheduler
    ready = list(own) if isinstance(own, (list, tuple)) else [own]
    bound = scheduler if hasattr(scheduler, "step") else None
    if all(isinstance(o, Optimizer) for o in ready):
        kept = [
            model,
            *parameters_of(ready),
            *(t for o in ready for s in o.state.values() for _, t in tensors_in(s)),
        ]
        ready, bound = copy.deepcopy((ready, bound), {id(x): x for x in kept})
    else:
        made = own(copy.deepcopy(model))
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


def resumed(setup: Setup) -> tuple[list[float], list[float]]:
    """Three steps of rates after three steps: of a schedule, and of one made anew that loads its state."""
    (optimizers, scheduler), (others, loaded) = bare(setup), bare(setup)
    rates = list[float](), list[float]()
    with suppress(Exception):
        for _ in range(3):
            scheduler.step()
        for a, b in zip(optimizers, others, strict=True):
            b.load_state_dict(a.state_dict())
        loaded.load_state_dict(copy.deepcopy(scheduler.state_dict()))
        for _ in range(3):
            for row, s, held in zip(rates, (scheduler, loaded), (optimizers, others), strict=True):
                s.step()
                row += [float(g["lr"]) for g in groups_of(held)]
    return rates

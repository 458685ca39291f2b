"""The rates that a schedule will give, without training, and those that it gives when it is resumed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final, NamedTuple

from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from normlab.setups.setup import Setup
from normlab.trace.copies import copied
from normlab.trace.optimizers import groups_of

SIMULATED: Final = 8_000
"""How many rates of single groups are computed step by step, in about a tenth of a second."""
HORIZON: Final = 100_000
"""How many steps of a schedule are followed if its author does not declare their number."""


class Rates(NamedTuple):
    """The rates of a schedule by group, at some of its steps."""

    steps: list[int]
    rates: list[list[float]]
    ended: Exception | None
    """What the scheduler raised after the last of them."""
    scheduler: Any = None
    """A copy of the scheduler that gave them."""

    @property
    def top(self) -> list[float]:
        """The largest rate of any group at each step."""
        return [max(row) for row in self.rates]

    @property
    def peaks(self) -> list[float]:
        """The largest rate of each group."""
        return [max(column) for column in zip(*self.rates, strict=True)]

    def reaches(self, asked: float) -> bool:
        """Return whether a group peaks at the rate asked, up to a step of warm-up and the decay so far."""
        return any(self._reaches(group, asked) for group in zip(*self.rates, strict=True))

    def _reaches(self, top: Sequence[float], asked: float) -> bool:
        at = top.index(peak := max(top))
        rise = max((b - a for a, b in pairwise(top[: at + 1])), default=0.0)
        after = min(at + 1, len(top) - 1)
        fall = (peak - top[after]) / max(self.steps[after] - self.steps[at], 1) * (self.steps[at] + 1)
        return asked - rise - fall <= peak * (1 + 1e-6) and peak <= asked * (1 + 1e-6) + rise

    @property
    def rises_again(self) -> bool:
        """Whether the rate falls after its peak and then rises gradually; a restart is a single jump."""
        tail = self.top[self.top.index(max(self.top)) :]
        low = tail.index(min(tail))
        rise = max(tail[low:]) - tail[low]
        return low > 0 and rise > 1e-6 * tail[0] and max(b - a for a, b in pairwise(tail[low:])) < rise / 2

    @property
    def periodic(self) -> bool:
        """Whether its class is cyclic, or it declares no end and climbs back to half its peak twice."""
        parts = getattr(self.scheduler, "_schedulers", [self.scheduler])
        tail, half = self.top[self.top.index(max(self.top)) :], max(self.top) / 2
        back = sum(a < half <= b for a, b in pairwise(tail))
        return any(isinstance(s, CyclicLR) for s in parts) or (
            back > 1 and not any(hasattr(s, "T_max") for s in parts)
        )


def _closed_form(scheduler: Any) -> Callable[[], Sequence[Any]] | None:
    """Return a function that gives a scheduler's rates from ``last_epoch``, whatever they were before."""
    if type(scheduler) in (LambdaLR, OneCycleLR):
        return scheduler.get_lr
    return getattr(scheduler, "_get_closed_form_lr", None)


def rates_of(setup: Setup) -> Rates:
    """Return the rates that the optimizers will have, or those that they have if there is no scheduler.

    The schedule is followed without stepping an optimizer: in every step if they are few, otherwise in the
    first ones, and in some of the others if it has a closed form.
    """
    _, optimizers, scheduler = copied(setup, hollow=True)
    groups = groups_of(optimizers)
    numbers, rates, ended = [0], [[float(g["lr"]) for g in groups]], None
    if scheduler is None:
        return Rates(numbers, rates, ended)
    limit, count = max(SIMULATED // max(len(groups), 1), 100), setup.declare.steps or HORIZON
    form = _closed_form(scheduler) if count > limit else None
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


def resumed(setup: Setup) -> tuple[list[float], list[float]]:
    """Return the rates of steps 4 to 6 of a schedule, and of a new one that loads its state after step 3."""
    (_, optimizers, scheduler), (_, others, loaded) = (copied(setup, hollow=True) for _ in range(2))
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

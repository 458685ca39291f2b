"""The rates that a schedule gives, read from copies of it without stepping an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import isclose
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from normlab.private_torch import closed_form, schedulers_in
from normlab.setups.setup import Setup
from normlab.trace.dry_run import groups_of
from normlab.trace.optimizers import copied

SIMULATED: Final = 8_000
"""How many rates of single groups are computed step by step, in about a tenth of a second."""

HORIZON: Final = 100_000
"""How many steps of a schedule are followed if its author does not declare their number."""

PARTS: Final = 16
"""Into how many parts a stretch of steps is divided, again and again, to find the peak in it."""

Groups: TypeAlias = Sequence[Mapping[str, Any]]
"""The parameter groups of all optimizers of a step, in order."""
RatesAt: TypeAlias = Callable[[int], list[float]]
"""Gives the rates of all groups at a step."""


class FirstRise(NamedTuple):
    """How the rates of a schedule rise before they first fall."""

    peaks: list[float]
    """The largest rate of each group."""
    steps: int
    """The number of steps up to the peak; 0 if the rates begin there."""
    first_share: float
    """The first rate above 0, as a share of the peak."""


class Rates(NamedTuple):
    """The rates of a schedule by group, at some of its steps."""

    steps: list[int]
    rates: list[list[float]]
    ended: Exception | None
    """What the scheduler raised after the last of them."""
    scheduler: Any = None
    """A copy of the scheduler that gave them."""
    taken: int = 0
    """How many steps the schedule has taken before the first of these, as one that is resumed has."""
    past: Mapping[int, list[float]] = MappingProxyType({})
    """The rates of these steps by number; empty if the schedule has no closed form, which tells them."""

    @property
    def from_the_first(self) -> Rates:
        """The same with the rates of the past, as far as they are known, and steps counted from the first."""
        steps = [*self.past, *(self.taken + i for i in self.steps)]
        return Rates(steps, [*self.past.values(), *self.rates], self.ended, self.scheduler)

    @property
    def top(self) -> list[float]:
        """The largest rate at each step of any group that the schedule moves, or of any if it moves none."""
        columns = [*zip(*self.rates, strict=True)]
        moved = [column for column in columns if min(column) < max(column)]
        return [max(row) for row in zip(*(moved or columns), strict=True)]

    @property
    def peaks(self) -> list[float]:
        """The largest rate of each group."""
        return [max(column) for column in zip(*self.rates, strict=True)]

    @property
    def first_rise(self) -> FirstRise:
        """How the rates rise before they first fall."""
        top = self.top
        before_fall = next((i for i in range(1, len(top)) if top[i] < top[i - 1]), len(top))
        rows, top = self.rates[:before_fall], top[:before_fall]
        peak = max(top)
        at_peak = next(i for i, rate in enumerate(top) if rate >= peak * (1 - 1e-6))
        first = next((rate for rate in top if rate > 0), peak)
        return FirstRise(
            peaks=[max(column) for column in zip(*rows, strict=True)],
            steps=1 + self.steps[at_peak] if at_peak else 0,
            first_share=first / peak if peak > 0 else 1.0,
        )

    def reaches(self, asked: float) -> bool:
        """Return whether a group peaks at the rate asked, up to a step of warm-up and the decay so far."""
        return any(self._reaches(group, asked) for group in zip(*self.rates, strict=True))

    def _reaches(self, rates: Sequence[float], asked: float) -> bool:
        """Return whether the rates of one group do."""
        peak = max(rates)
        at_peak = rates.index(peak)
        largest_rise = max((after - before for before, after in pairwise(rates[: at_peak + 1])), default=0.0)
        # a schedule that is first read after some steps has fallen by about as much in each of them
        next_to_it = min(at_peak + 1, len(rates) - 1)
        steps_between = max(self.steps[next_to_it] - self.steps[at_peak], 1)
        fall = (peak - rates[next_to_it]) / steps_between * (self.steps[at_peak] + 1)
        is_high_enough = asked - largest_rise - fall <= peak * (1 + 1e-6)
        return is_high_enough and peak <= asked * (1 + 1e-6) + largest_rise

    @property
    def rises_again(self) -> bool:
        """Whether the rate falls after its peak and then rises gradually; a restart is a single jump."""
        tail = self._from_the_peak
        lowest = tail.index(min(tail))
        rising = tail[lowest:]
        rise = max(rising) - rising[0]
        largest_jump = max((after - before for before, after in pairwise(rising)), default=0.0)
        return lowest > 0 and rise > 1e-6 * tail[0] and largest_jump < rise / 2

    @property
    def _from_the_peak(self) -> list[float]:
        top = self.top
        return top[top.index(max(top)) :]

    @property
    def rises_to_the_end(self) -> bool:
        """Whether the last rate is above all others."""
        return len(self.top) > 1 and self.top[-1] > max(self.top[:-1]) * (1 + 1e-9)

    @property
    def periodic(self) -> bool:
        """Whether its class is cyclic, or it declares no end and climbs back to half its peak twice."""
        parts = schedulers_in(self.scheduler) or [self.scheduler]
        if any(isinstance(part, CyclicLR) for part in parts):
            return True
        declares_an_end = any(hasattr(part, "T_max") for part in parts)
        half = max(self.top) / 2
        climbs = sum(before < half <= after for before, after in pairwise(self._from_the_peak))
        return climbs > 1 and not declares_an_end


def _closed_form(scheduler: Any) -> Callable[[], Sequence[Any]] | None:
    """Return a function that gives a scheduler's rates from ``last_epoch``, whatever they were before."""
    if type(scheduler) in (LambdaLR, OneCycleLR):
        return scheduler.get_lr
    return closed_form(scheduler)


def rates_of(setup: Setup) -> Rates:
    """Return the rates that the optimizers will have, or those that they have if there is no scheduler.

    The schedule is followed without stepping an optimizer: in every step if they are few, otherwise in the
    first ones, and in some of the others if it has a closed form, its peaks among them. Of the steps that are
    planned, those that it has taken already are past.
    """
    _, optimizers, scheduler = copied(setup, hollow=True)
    groups = groups_of(optimizers)
    numbers, rates, ended = [0], [[float(group["lr"]) for group in groups]], None
    if scheduler is None:
        return Rates(numbers, rates, ended)
    start = getattr(scheduler, "last_epoch", 0)
    taken = max(start, 0) if isinstance(start, int) else 0
    planned = (setup.declare.steps or HORIZON) - taken
    limit = max(SIMULATED // max(len(groups), 1), 100)
    closed = _closed_form(scheduler)
    past = {} if closed is None else _rates_before(groups, taken, limit, scheduler, closed)
    jumps = closed is not None and planned > limit
    followed = limit // 2 if jumps else limit
    for i in range(1, min(planned, followed)):
        try:
            scheduler.step()
        except Exception as error:  # a schedule of anybody's, or one that is over
            ended = error
            break
        numbers.append(i)
        rates.append([float(group["lr"]) for group in groups])
    if closed is not None and jumps and ended is None:
        apart = max((planned - followed) // followed, 1)
        rates_at = _rates_by_closed_form(groups, scheduler, closed, start)
        sampled = dict(zip(numbers, rates, strict=True))
        sampled |= {i: rates_at(i) for i in range(followed, planned, apart)}
        sampled = _with_peaks(sampled, rates_at, planned)
        numbers, rates = list(sampled), list(sampled.values())
    return Rates(numbers, rates, ended, scheduler, taken, past)


def _rates_by_closed_form(
    groups: Groups, scheduler: Any, closed: Callable[[], Sequence[Any]], first: int
) -> RatesAt:
    """Return what gives the rates of all groups at a step, counted from the ``first``. It moves the scheduler
    there; groups of optimizers that it does not steer keep the rate that they have.
    """

    def rates_at(step: int) -> list[float]:
        scheduler.last_epoch = first + step
        steered = {
            id(group): float(rate)
            for group, rate in zip(scheduler.optimizer.param_groups, closed(), strict=True)
        }
        return [steered.get(id(group), float(group["lr"])) for group in groups]

    return rates_at


def _with_peaks(sampled: Mapping[int, list[float]], rates_at: RatesAt, end: int) -> dict[int, list[float]]:
    """Return rates with those at the peaks of all groups, and before the first fall, which may lie between
    the steps that were sampled. In order of the steps, which end before ``end``.
    """
    steps, rates = list(sampled), list(sampled.values())
    top = Rates(steps, rates, None).top
    before_fall = next((i for i in range(1, len(top)) if top[i] < top[i - 1]), len(top)) - 1
    group_at = {before_fall: rates[before_fall].index(top[before_fall])}
    for group, column in enumerate(zip(*rates, strict=True)):
        group_at.setdefault(column.index(max(column)), group)
    with_peaks = dict(sampled)
    for place, group in group_at.items():
        first = steps[max(place - 1, 0)]
        last = steps[place + 1] if place + 1 < len(steps) else end - 1
        peak = _peak_between(first, last, lambda step, group=group: rates_at(step)[group])
        if peak not in with_peaks:
            with_peaks[peak] = rates_at(peak)
    return dict(sorted(with_peaks.items()))


def _peak_between(first: int, last: int, rate_at: Callable[[int], float]) -> int:
    """Return the step from ``first`` to ``last`` with the largest rate, the first if there are several.

    Samples are taken ever closer around the largest one, which finds the peak of a rate that rises and then
    falls.
    """
    while True:
        apart = max((last - first) // PARTS, 1)
        largest = max(range(first, last + 1, apart), key=rate_at)
        if apart == 1:
            return largest
        first, last = max(largest - apart, first), min(largest + apart, last)


def _rates_before(
    groups: Groups, taken: int, limit: int, scheduler: Any, closed: Callable[[], Sequence[Any]]
) -> dict[int, list[float]]:
    """Return the rates of the steps that a schedule has taken, of ``limit`` or so of them if they are many,
    by its closed form. The schedule is left where it stands.
    """
    if not taken:
        return {}
    stands_at, rates_at = scheduler.last_epoch, _rates_by_closed_form(groups, scheduler, closed, 0)
    sampled = {i: rates_at(i) for i in range(0, taken, taken // limit + 1)}
    sampled = _with_peaks(sampled, rates_at, taken)
    scheduler.last_epoch = stands_at
    return sampled


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
            for row, each, steered in zip(rates, (scheduler, loaded), (optimizers, others), strict=True):
                each.step()
                row += [float(group["lr"]) for group in groups_of(steered)]
    return rates


def factor_of_each(shares: Sequence[float]) -> float:
    """Return the factor from each of these numbers to the next; 1 if it is not the same throughout."""
    if min(shares) <= 0:
        return 1.0
    each = [after / before for before, after in pairwise(shares)]
    return each[0] if each and isclose(min(each), max(each), rel_tol=1e-6) else 1.0

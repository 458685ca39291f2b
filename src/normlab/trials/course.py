"""The rates of a trial: those of the setup in proportion, with its warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from normlab.errors import UserError
from normlab.setups.setup import Setup
from normlab.setups.window import WindowStep
from normlab.trace.rates import rates_of
from normlab.trials.training import RateOf, Training

WARMUP: Final = 1 / 5
"""The share of a trial in which its rate rises, if the setup's own rate rises."""


@dataclass(frozen=True)
class Course:
    r"""The rates that a setup gives its groups; a trial keeps their proportions and the warm-up.

    With the setup's own peaks :math:`p_g` by group, a trial at the rate :math:`\rho` over n steps gives group
    g at step t = 1, ..., n

    .. math:: p_g \frac{\rho}{\max_h p_h} \min(1, t / \min(w n, W))

    where w is 1/5 if the setup warms up, that is, if its rates begin below their peak, and W is the number of
    steps in which they reach it, if a scheduler tells that in advance. Without a warm-up the last factor is
    1. The decay that comes after the peak is left out.
    """

    peaks: Sequence[float]
    warmup: float
    """w, the share of a trial in which the rate rises; 0 for none."""
    longest: int = 0
    """W, the most steps in which it rises; 0 if that is not known."""

    def __post_init__(self) -> None:
        if not 0 < max(self.peaks, default=0.0) < math.inf:
            raise UserError(f"peaks is {list(self.peaks)}, but the largest must be a finite number above 0")

    @property
    def rate(self) -> float:
        """The largest peak of any group: the rate that the setup has today."""
        return max(self.peaks)

    @property
    def rising(self) -> str:
        """The share of a trial that its warm-up takes, in words."""
        return f"{self.warmup:.0%} of a trial" if self.warmup else "none"

    def at(self, rate: float, steps: int) -> RateOf:
        """The rates of a trial of so many steps."""
        rises = min(self.warmup * steps, self.longest or steps)

        def rates(step: int, _: Sequence[float]) -> list[float]:
            ramp = min(1.0, step / rises) if rises else 1.0
            return [peak * (rate / self.rate) * ramp for peak in self.peaks]

        return rates


def read_course(setup: Setup, seen: Training) -> Course:
    """The course that the scheduler tells in advance or, without one, that the first steps show.

    Raises UserError if no rate is known because the step raises it by hand, and nothing says how far.
    """
    first_steps = list(seen.rates.values())
    steps, rows = list(range(len(first_steps))), first_steps
    if setup.scheduler is not None:
        steps, rows, *_ = rates_of(setup)
    tops = [max(row, default=0.0) for row in rows]
    if not setup.declare.steps:  # after an end that is not known, rates may be odd
        end = _first_fall(tops)
        rows, tops = rows[:end], tops[:end]
    peaks, top = [max(column) for column in zip(*rows, strict=True)], max(tops)
    if not top > 0:
        raise UserError("the rate of every group is 0: give the optimizer, or the scheduler, a rate")
    peak = next(i for i, rate in enumerate(tops) if rate >= top * (1 - 1e-6))  # the first, but for rounding
    intended = setup.lr or setup.declare.peak_lr
    if "rate" in setup.cannot:
        if intended is None:
            raise UserError(f"{setup.cannot['rate']}; or pass lr=, the largest rate on the way")
        return Course([intended * rate / top for rate in peaks], WARMUP)
    if setup.scheduler is not None or not peak:
        rises_by_hand = isinstance(setup.step, WindowStep) and setup.step.warms_up
        warmup = WARMUP if peak or rises_by_hand else 0.0
        return Course(peaks, warmup, 1 + steps[peak] if peak else 0)
    if intended is None:
        raise UserError(
            f"the step raises the rate by hand, to {top:.3g} in {len(seen.losses)} steps, and nothing "
            "says how far: pass lr=, the largest rate on the way"
        )
    return Course([intended * rate / top for rate in peaks], WARMUP)


def _first_fall(rates: Sequence[float]) -> int:
    """Return the place of the first rate that is below the one before, or the number of rates."""
    for i in range(1, len(rates)):
        if rates[i] < rates[i - 1]:
            return i
    return len(rates)

"""What more trials would tell if the trials so far cannot say, and how long they take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from normlab.base.units import duration, short_rate
from normlab.scaling.optimum import RATES
from normlab.scaling.sweep import UNDECIDED, Sweep

if TYPE_CHECKING:
    from normlab.scaling.verdict import Transfer

LONGER: Final = 4
"""If nothing is learnt, so many times as many steps are advised."""


class Remedy(NamedTuple):
    """One thing to have more of."""

    what: Literal["budget", "steps", "rates", "seeds", "sizes"]
    value: Any
    """How much of it in all: seconds, steps, multiples of the setup's own rate, seeds, or sizes."""
    seconds: float
    """What it takes besides what was spent."""
    sentence: str


def remedy_of(of: Transfer, sweep: Sweep) -> Remedy | None:
    """What would tell more with one weight decay; None if the answer is known, or if nothing was tried: then
    the reason names the budget.
    """
    if sweep.verdict != UNDECIDED or not any(sweep.trials.values()):
        return None
    left = sum(_left(of, sweep, size) for size in of.sizes if of.ended_by or not sweep.trials.get(size))
    if left:
        whole = of.seconds + left
        finish = f"About {duration(left)} more would finish the trials, a budget of {duration(whole)} in all"
        return Remedy("budget", whole, left, finish)
    line = sweep.trend is not None and sweep.spans and not sweep.contradicted
    return _of_line(of, sweep) if line else _of_optima(of, sweep)


def _of_optima(of: Transfer, sweep: Sweep) -> Remedy:
    """If some best rates are not known: what most of these sizes lack."""
    unknown = [sweep.optimum(size) for size in sweep.unknown]
    lacks = [str(own.lack) for own in unknown]
    match max(("steps", "rates", "seeds"), key=lacks.count):
        case "steps":
            steps, seconds = LONGER * of.steps, LONGER * of.seeds * _each(of, sweep)
            instead = f"Trials of {steps:,} steps instead of {of.steps:,} may learn enough"
            return Remedy("steps", steps, seconds, f"{instead}; they take {duration(seconds)}")
        case "rates":
            return _rates(of, sorted({x for own in unknown for x in own.rates}), "would show more")
    return _seeds(of, sweep, 2 * of.seeds, "would show more")


def _of_line(of: Transfer, sweep: Sweep) -> Remedy:
    """If they are known, but the interval of their shift is too wide."""
    if sweep.fit.misfit:
        best = (sweep.optimum(size).value or 0.0 for size in sweep.known)
        halves = {round(x) + side / 2 for x in best for side in (-1, 1)}
        return _rates(of, sorted(halves), "would place the best ones more closely")
    if sweep.shortage > 1:
        seeds = max(math.ceil(of.seeds * sweep.shortage**2), of.seeds + 1)
        return _seeds(of, sweep, seeds, "would settle it", about="About ")
    seconds = of.seeds * _each(of, sweep)
    scatter = f"The best rates scatter about their line by more than their errors, so more {of.axis}s"
    sentence = f"{scatter} would tell more than seeds; twice as many take about {duration(seconds)} more"
    return Remedy("sizes", 2 * len(of.sizes), seconds, sentence)


def _cost(of: Transfer, size: int, trials: float) -> float:
    """Seconds of so many trials."""
    return trials * of.steps * of.step_s[size]


def _left(of: Transfer, sweep: Sweep, size: int) -> float:
    """About how many seconds the trials missing at a size take."""
    own = sweep.trials.get(size, {})
    every = [x for x in {x for x, _ in own} if sum(y == x for y, _ in own) >= of.seeds]
    return _cost(of, size, of.seeds * max(RATES - len(every), 0))


def _each(of: Transfer, sweep: Sweep) -> float:
    """Seconds of the trials of one seed."""
    return sum(_cost(of, size, len({x for x, _ in own})) for size, own in sweep.trials.items())


def _rates(of: Transfer, octaves: list[float], what: str) -> Remedy:
    seconds = len(octaves) * of.seeds * sum(_cost(of, size, 1) for size in of.sizes)
    named = [short_rate(of.current_rate * 2.0**x) for x in octaves]
    some = ", ".join(named[:-1]) + " and " * (len(named) > 1) + named[-1]
    sentence = f"Trials at {some} as well (--rates) {what}; they take {duration(seconds)}"
    return Remedy("rates", [2.0**x for x in octaves], seconds, sentence)


def _seeds(of: Transfer, sweep: Sweep, seeds: int, what: str, about: str = "") -> Remedy:
    seconds = (seeds - of.seeds) * _each(of, sweep)
    sentence = f"{about}{seeds} seeds instead of {of.seeds} {what}, {duration(seconds)} more"
    return Remedy("seeds", seeds, seconds, sentence)

"""What more trials would tell if the trials so far cannot say, and how long they take."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final, Literal, NamedTuple

from normlab.base.units import duration, short_rate
from normlab.scaling.by_size import TrialsBySize
from normlab.scaling.optimum import RATES
from normlab.scaling.sweep import UNDECIDED, Sweep

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


def remedy_of(trials: TrialsBySize, sweep: Sweep) -> Remedy | None:
    """What would tell more with one weight decay; None if the answer is known, or if nothing was tried: then
    the reason names the budget.
    """
    if sweep.verdict != UNDECIDED or not any(sweep.trials.values()):
        return None
    unfinished = [size for size in trials.sizes if trials.ended_by or not sweep.trials.get(size)]
    left_s = sum(_left_s(trials, sweep, size) for size in unfinished)
    if left_s:
        budget_s = trials.seconds + left_s
        sentence = (
            f"About {duration(left_s)} more would finish the trials, a budget of {duration(budget_s)} in all"
        )
        return Remedy("budget", budget_s, left_s, sentence)
    if sweep.trend is not None and sweep.spans and not sweep.contradicted:
        return _to_narrow_the_shift(trials, sweep)
    return _to_place_the_optima(trials, sweep)


def _to_place_the_optima(trials: TrialsBySize, sweep: Sweep) -> Remedy:
    """If some best rates are not known: what most of these sizes lack."""
    unknown = [sweep.optimum(size) for size in sweep.unknown]
    lacks: list[str] = [optimum.lack for optimum in unknown]
    # a tie goes to what comes first here
    match max(("steps", "rates", "seeds"), key=lacks.count):
        case "steps":
            return _longer(trials, sweep)
        case "rates":
            octaves = {octave for optimum in unknown for octave in optimum.rates}
            return _more_rates(trials, sorted(octaves), "would show more")
    return _more_seeds(trials, sweep, 2 * trials.seeds, "would show more")


def _to_narrow_the_shift(trials: TrialsBySize, sweep: Sweep) -> Remedy:
    """If the best rates are known, but the interval of their shift is too wide."""
    if sweep.fit.misfit:
        best = [sweep.optimum(size).value or 0.0 for size in sweep.known]
        halfway = {round(octave) + side / 2 for octave in best for side in (-1, 1)}
        return _more_rates(trials, sorted(halfway), "would place the best ones more closely")
    if sweep.shortage > 1:
        # the error falls with the root of the number of seeds
        seeds = max(math.ceil(trials.seeds * sweep.shortage**2), trials.seeds + 1)
        return _more_seeds(trials, sweep, seeds, "would settle it", about="About ")
    seconds = trials.seeds * _seed_s(trials, sweep)
    sentence = (
        f"The best rates scatter about their line by more than their errors, so more {trials.axis}s would "
        f"tell more than seeds; twice as many take about {duration(seconds)} more"
    )
    return Remedy("sizes", 2 * len(trials.sizes), seconds, sentence)


def _longer(trials: TrialsBySize, sweep: Sweep) -> Remedy:
    steps, seconds = LONGER * trials.steps, LONGER * trials.seeds * _seed_s(trials, sweep)
    sentence = (
        f"Trials of {steps:,} steps instead of {trials.steps:,} may learn enough; they take "
        f"{duration(seconds)}"
    )
    return Remedy("steps", steps, seconds, sentence)


def _more_rates(trials: TrialsBySize, octaves: list[float], purpose: str) -> Remedy:
    seconds = len(octaves) * trials.seeds * sum(_cost_s(trials, size, 1) for size in trials.sizes)
    *others, last = [short_rate(trials.current_rate * 2.0**octave) for octave in octaves]
    rates = f"{', '.join(others)} and {last}" if others else last
    sentence = f"Trials at {rates} as well (--rates) {purpose}; they take {duration(seconds)}"
    return Remedy("rates", [2.0**octave for octave in octaves], seconds, sentence)


def _more_seeds(trials: TrialsBySize, sweep: Sweep, seeds: int, purpose: str, about: str = "") -> Remedy:
    seconds = (seeds - trials.seeds) * _seed_s(trials, sweep)
    sentence = f"{about}{seeds} seeds instead of {trials.seeds} {purpose}, {duration(seconds)} more"
    return Remedy("seeds", seeds, seconds, sentence)


def _cost_s(trials: TrialsBySize, size: int, number: int) -> float:
    """Seconds of so many trials."""
    return number * trials.steps * trials.step_s[size]


def _left_s(trials: TrialsBySize, sweep: Sweep, size: int) -> float:
    """About how many seconds the trials missing at a size take."""
    seeds_by_octave = Counter(octave for octave, _ in sweep.trials.get(size, {}))
    complete = sum(seeds >= trials.seeds for seeds in seeds_by_octave.values())
    return _cost_s(trials, size, trials.seeds * max(RATES - complete, 0))


def _seed_s(trials: TrialsBySize, sweep: Sweep) -> float:
    """Seconds of the trials of one seed."""
    seconds = 0.0
    for size, tried in sweep.trials.items():
        octaves = {octave for octave, _ in tried}
        seconds += _cost_s(trials, size, len(octaves))
    return seconds

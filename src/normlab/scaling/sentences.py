"""The answer of ``transfer`` in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from normlab.base.units import short_rate
from normlab.scaling.by_size import TrialsBySize
from normlab.scaling.optimum import Optimum
from normlab.scaling.remedy import remedy_of
from normlab.scaling.sweep import CARRIES, LEAST_SIZES, SHIFTS, Between, Sweep
from normlab.scaling.wording import apart

CANNOT_SAY: Final = "Cannot say whether the rate carries"


def answer(trials: TrialsBySize, sweep: Sweep) -> str:
    """The answer with one weight decay."""
    axis, known, best = trials.axis, sweep.known, _best_rate(trials)
    if sweep.shift is None or sweep.slope is None:
        where = f"only at {_sizes(axis, known)}" if known else f"at no {axis}"
        return f"{CANNOT_SAY}: {best} is known {where}; {_why_unknown(axis, sweep, sweep.unknown)}"
    over = f"from {axis} {known[0]} to {known[-1]}"
    changes = f"{over} {best} changes by {sweep.shift.factor}"
    within = f"within {sweep.factor:g}x"
    if sweep.verdict == CARRIES:
        return f"The rate carries: {changes}, {within}"
    if sweep.verdict == SHIFTS:
        where = "" if sweep.spans else f"{over} "
        return (
            f"The rate does not carry: {where}{best} {_moves(sweep.slope)} with each doubling of the {axis}; "
            f"{_advice(trials, sweep)}"
        )
    if sweep.steady:
        smallest, largest = trials.sizes[0], trials.sizes[-1]
        decisive = {smallest, largest, *sweep.contradicted}
        why = _why_unknown(axis, sweep, [size for size in sweep.unknown if size in decisive])
        return f"{CANNOT_SAY} from {axis} {smallest} to {largest}: {changes}, {within}, but {why}"
    if sweep.contradicted:
        why = _why_unknown(axis, sweep, sweep.contradicted)
        return f"{CANNOT_SAY}: {changes}, and {why}, which does not fit"
    return f"{CANNOT_SAY}: {changes}; the interval must lie {within}"


def answer_lines(trials: TrialsBySize) -> Iterator[str]:
    """The answer, the reason, what would decide, its limits, and the same for each weight decay."""
    first, axis = trials.first, trials.axis
    yield f"{answer(trials, first)}."
    yield from _of_the_check(trials)
    if remedy := remedy_of(trials, first):
        yield f"{remedy.sentence}."
    if first.verdict != SHIFTS and trials.best_at(first, trials.target) is not None:
        yield f"By the line through the best rates, {_advice(trials, first)}."
    if first.verdict in (CARRIES, SHIFTS) and first.unknown:
        yield f"The best rate is not known everywhere: {_why_unknown(axis, first, first.unknown)}."
    if first.trend is not None and len(first.known) < LEAST_SIZES:
        yield f"From two {axis}s nothing shows how far best rates scatter about a line: try four."
    if trials.ended_by:
        yield f"The trials are not complete: {trials.ended_by}."
    for sweep in trials.sweeps[1:]:
        yield _of_another_decay(trials, sweep)


def _best_rate(trials: TrialsBySize) -> str:
    return "the best multiple of your setup's own rate" if trials.scales_itself else "the best rate"


def _sizes(axis: str, sizes: Sequence[int]) -> str:
    """Sizes with their noun: width 64, or widths 64 and 128."""
    *others, last = map(str, sizes)
    return f"{axis}s {', '.join(others)} and {last}" if others else f"{axis} {last}"


def _moves(slope: Between) -> str:
    if slope.value < 1:
        return f"falls by {slope.inverse.factor}"
    return f"rises by {slope.factor}"


def _advice(trials: TrialsBySize, sweep: Sweep) -> str:
    """The rate to take at the target; empty if it is not known."""
    best = trials.best_at(sweep, trials.target)
    if best is None:
        return ""
    take = f"at {trials.axis} {trials.target} take"
    if trials.scales_itself:
        times = f"{best.value:.2f} times (95%: {best.low:.2f} to {best.high:.2f})"
        return f"{take} {times} the rate that your setup gives there"
    value, low, high = (short_rate(trials.current_rate * multiple) for multiple in best)
    return f"{take} {value} (95%: {low} to {high})"


def _why_unknown(axis: str, sweep: Sweep, sizes: Sequence[int]) -> str:
    """Why the best rates of sizes are not known."""
    sizes_by_reason = dict[str, list[int]]()
    for size in sizes:
        sizes_by_reason.setdefault(sweep.optimum(size).why, []).append(size)
    return "; ".join(f"at {_sizes(axis, alike)} {reason}" for reason, alike in sizes_by_reason.items())


def _of_the_check(trials: TrialsBySize) -> Iterator[str]:
    """What the check finds, and whether that is why the rate does not carry; or why there is no check."""
    if trials.reason:
        finds = "says why" if trials.explained else "finds"
        unexplained = ""
        if others := apart(trials.coordinates):
            noun = "others" if others > 1 else "other"
            unexplained = f", and {others} {noun} that this does not explain"
        yield f"The coordinate check {finds}: {trials.reason}{unexplained}."
    if left_out := trials.coordinates.get("left_out"):
        yield f"The coordinate check was left out: {left_out}."


def _of_another_decay(trials: TrialsBySize, sweep: Sweep) -> str:
    """The answer with a weight decay that is not the first."""
    text = answer(trials, sweep)
    line = f"With {sweep.decay.label}: {text[0].lower()}{text[1:]}{_differs(trials, sweep)}."
    if remedy := remedy_of(trials, sweep):
        line += f" {remedy.sentence}."
    return line


def _differs(trials: TrialsBySize, sweep: Sweep) -> str:
    """Whether the optima of a weight decay differ from those of the first by more than their errors."""
    gaps = list[str]()
    for size in trials.sizes:
        gap = _gap(trials.first.optimum(size), sweep.optimum(size))
        if gap is not None:
            gaps.append(f"{2**gap:.2g}x at {size}")
    if not gaps:
        return ""
    return f"; the best rate differs from that with {trials.first.decay.label}: {', '.join(gaps)}"


def _gap(first: Optimum, other: Optimum) -> float | None:
    """By how many octaves two optima differ; None if by no more than their errors, or if one is not known."""
    if first.interval is None or other.interval is None:
        return None
    (start, start_low, start_high), (end, end_low, end_high) = first.interval, other.interval
    error = math.hypot((start_high - start_low) / 2, (end_high - end_low) / 2)
    return end - start if abs(end - start) > error else None

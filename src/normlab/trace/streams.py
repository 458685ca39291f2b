"""By what factor each block passes its stream on, measured on streams that are made very large."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from torch import Tensor

from normlab.trace.facts.stacks import stream_of
from normlab.trace.trace import Trace

SCALES: Final = (1e6, 1e7)
"""Sizes at which a normed branch is lost beside the stream that it is added to."""


class Scaled(NamedTuple):
    """What streams of two sizes show."""

    factors: Mapping[str, float]
    """By block, of those that pass their input on by one factor."""
    runs: tuple[Trace, ...]
    """One for each size, in which every block reads its stream that much larger."""


def scaled_streams(trace: Trace, streams: Mapping[str, Tensor]) -> Scaled:
    """Make the input of each of these blocks a million and ten million times as large.

    The difference of the outputs is the factor: 1 where a branch is added, 0 where a norm follows.
    """

    def enter(x: Tensor, c: float) -> Callable[[Tensor], Tensor]:
        return lambda own: c * (x if x.shape == own.shape else own)

    runs = tuple(trace.again(changed={p: enter(x, c) for p, x in streams.items()}) for c in SCALES)
    low, high = (_written(run) for run in runs)
    factors: dict[str, float] = {}
    for path, x in streams.items():
        if path not in low or path not in high or low[path].shape != x.shape:
            continue
        change = (high[path] - low[path]).double() / (SCALES[1] - SCALES[0])
        size = float(x.double().square().sum())
        factor = float((change * x).sum()) / size if size else 0.0
        if float((change - factor * x).square().sum()) <= 1e-12 * size:
            factors[path] = 0.0 if abs(factor) < 1e-6 else round(factor, 6)
    return Scaled(factors, runs)


def _written(trace: Trace) -> dict[str, Tensor]:
    """The stream that the first call of each module writes."""
    calls = reversed(trace.once(events=True).events)
    return {e.module: y for e in calls if (y := stream_of(e.outputs)) is not None}


def grown(low: Tensor, high: Tensor) -> bool:
    """Whether a value of the two runs grows in proportion to the stream."""
    a, b = float(low.double().norm()), float(high.double().norm())
    return a > 0 and abs(b / a - SCALES[1] / SCALES[0]) < 1e-3

"""The stream that blocks pass on, and what streams of two sizes show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from torch import Tensor

from normlab.trace.trace import Trace

SCALES: Final = (1e6, 1e7)
"""Sizes of the stream beside which a normed branch that is added to it vanishes."""


def stream_of(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the first floating tensor `[..., D]` that a block reads or writes."""
    return next((x for x in tensors if x.is_floating_point() and x.ndim >= 2), None)


class Scaled(NamedTuple):
    """What streams of two sizes show."""

    factors: Mapping[str, float]
    """By block, for those that pass their input on times one factor."""
    mixing: frozenset[str]
    """Blocks that ran and do not."""
    runs: tuple[Trace, ...]
    """One run for each size, in which every block reads a stream that many times larger."""


def scaled_streams(trace: Trace, streams: Mapping[str, Tensor]) -> Scaled:
    """Make the input of each of these blocks a million and ten million times as large.

    The difference of the outputs gives the factor: 1 if a branch is added, 0 if a norm follows.
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
    return Scaled(factors, frozenset(streams.keys() & low.keys() - factors.keys()), runs)


def _written(trace: Trace) -> dict[str, Tensor]:
    """Return the stream that the first call of each module writes."""
    calls = reversed(trace.once(events=True).events)
    return {e.module: y for e in calls if (y := stream_of(e.outputs)) is not None}


def grown(low: Tensor, high: Tensor) -> bool:
    """Return whether a value of the two runs grows in proportion to the stream."""
    a, b = float(low.double().norm()), float(high.double().norm())
    return a > 0 and abs(b / a - SCALES[1] / SCALES[0]) < 1e-3

"""Slopes over the sizes of what was measured, each beside the intended exponent."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, linear_regression
from typing import Any, Final, NamedTuple

from normlab.diagnosis.theory import half_width
from normlab.nn.parametrisation import Parametrisation
from normlab.scaling import ALL, LEVEL
from normlab.scaling.exponents import HELD, NEAR, Axis, Meant, attention_power, by_table, kind_of, to_carry
from normlab.scaling.measured import Key, Measured

SUMMED: Final = ("start", "rate", "decay", "eps", "activation", "update")
"""Quantities that have such rows."""
Sizes = Mapping[tuple[int, int], Measured]
"""By size and seed."""


@dataclass(frozen=True)
class Row:
    """One quantity at one place: its exponent of the size, and the intended one.

    ``slope`` is that of log quantity over log size, the mean over seeds, with a 95% t interval of the seeds'
    slopes. For what an optimizer's groups hold, and for the scale of attention, ``low`` and ``high`` are the
    smallest and largest slope from one size to the next. NaN if the quantity is 0 or not finite.
    """

    role: str
    module: str
    """Layers of a stack are one place, with ``*`` for their number."""
    quantity: str
    step: int
    """How many steps the optimizer has taken before."""
    slope: float
    low: float
    high: float
    expected: float | None = None
    expected_low: float | None = None
    """The least exponent that is right, if less than ``expected`` is right, too. Minus infinity, which is
    None among plain values, allows any.
    """
    right: bool | None = None
    """Whether an exponent in the interval is nearest to an intended one; None if none is intended, or this is
    not known.
    """
    kind: str = ""
    """What is wrong if the row is: start, rate, decay, eps, multiplier, attention scale or branch."""
    parameter: str = ""
    path: str = ""
    """A module that has it, in the first layer of the largest model."""
    values: tuple[float, ...] = ()
    """By size, means over seeds."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, with None for what is not finite."""
        return {name: _plain(value) for name, value in vars(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Slope(NamedTuple):
    """A slope over sizes, its interval, and the values by size."""

    mean: float
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def known(self) -> bool:
        return math.isfinite(self.mean) and math.isfinite(self.high - self.low)


def rows_of(measured: Sizes, axis: Axis, kind: type[Parametrisation] | None) -> Iterator[Row]:
    """Yield what every model showed, in the order of a pass and by step, then by role; ``kind`` is the
    parametrisation that was declared.
    """
    sizes = sorted({size for size, _ in measured})
    first = next(one for (size, _), one in measured.items() if size == sizes[-1])
    keys = sorted(
        set[tuple[Key, int]].intersection(*(set(one.values) for one in measured.values())),
        key=lambda own: (first.places[own[0]].time, list(first.places).index(own[0]), own[1]),
    )
    slopes = {own: _slope(measured, sizes, [own[0]], own[1]) for own in keys}
    of = {
        (k.quantity, k.parameter): s.mean for (k, _), s in slopes.items() if k.quantity in ("start", "rate")
    }
    widths = {k.module: s for (k, _), s in slopes.items() if k.quantity == "head width"}
    rows = list[Row]()
    for (key, step), slope in slopes.items():
        place = first.places[key]
        if key.quantity == "attention scale":
            wanted = _of_attention(kind, axis, widths[key.module])
        else:
            wanted = by_table(kind, axis, key, place) or to_carry(axis, key, step, place)
        start, rate = (of.get((name, key.parameter), math.nan) for name in ("start", "rate"))
        row = _row(key, step, slope, wanted)
        rows.append(replace(row, kind=kind_of(key, start, rate), path=place.path))
    yield from _equivalent(rows)
    by_role: dict[Key, list[Key]] = defaultdict(list)
    for key in dict.fromkeys(key for key, _ in keys if key.quantity in SUMMED):
        by_role[Key(key.quantity, key.role, ALL)].append(key)
    for key, own in by_role.items():
        for step in sorted({step for one, step in keys if one in own}):
            yield _row(key, step, _slope(measured, sizes, own, step), None)


def _row(key: Key, step: int, slope: _Slope, wanted: Meant | None) -> Row:
    right = wanted.holds(slope.low, slope.high) if wanted and slope.known else None
    expected = (wanted.exponent, wanted.low) if wanted else (None, None)
    own = (key.role, key.module, key.quantity, step, slope.mean, slope.low, slope.high)
    return Row(*own, *expected, right, parameter=key.parameter, values=slope.values)


def _slope(measured: Sizes, sizes: Sequence[int], keys: Sequence[Key], step: int) -> _Slope:
    """The slope of the root mean square of some quantities together."""
    seeds = list(dict.fromkeys(seed for _, seed in measured))
    table = [
        [fmean(measured[size, seed].values[key, step] ** 2 for key in keys) ** 0.5 for size in sizes]
        for seed in seeds
    ]
    values = tuple(fmean(column) for column in zip(*table, strict=True))
    if any(not (math.isfinite(x) and x > 0) for row in table for x in row):
        return _Slope(math.nan, math.nan, math.nan, values)
    x, logs = [math.log(size) for size in sizes], [[math.log(value) for value in row] for row in table]
    slopes = [linear_regression(x, y).slope for y in logs]
    mean, half = fmean(slopes), math.inf
    if keys[0].quantity in HELD:
        steps = [b - a for y in logs for a, b in pairwise(y)]
        steps = [rise / (b - a) for rise, (a, b) in zip(steps, [*pairwise(x)] * len(logs), strict=True)]
        return _Slope(mean, min(steps), max(steps), values)
    if len(slopes) > 1:
        half = half_width(slopes, LEVEL)
    return _Slope(mean, mean - half, mean + half, values)


def _of_attention(kind: type[Parametrisation] | None, axis: Axis, widths: _Slope) -> Meant | None:
    """What is intended for the scale of attention: the declared exponent of a head's width, else that
    products of queries and keys that point the same way, as they come to do in training, do not grow.

    Yang et al. 2022, definition 4.1 (2203.03466).
    """
    if kind is None:
        return Meant(-widths.mean, falls=math.inf, exact=True) if axis == "width" else None
    power = attention_power(kind, widths.values[0], widths.values[-1])
    return None if power is None else Meant(power * widths.mean, exact=True)


def _equivalent(rows: Sequence[Row]) -> list[Row]:
    r"""The rows; a start and a rate that are off by the same exponent are not judged.

    Under Adam, a factor :math:`m^\theta` on both amounts to one on the parameter's multiplier, and the update
    shows whether the multiplier makes up for it. Yang et al. 2022, Lemma J.1 (2203.03466).
    """
    wrong = {
        (r.quantity, r.parameter): r.slope - (r.expected or 0.0)
        for r in rows
        if r.quantity in ("start", "rate") and r.right is False
    }
    alike = {
        parameter
        for quantity, parameter in wrong
        if abs(wrong.get(("start", parameter), math.inf) - wrong.get(("rate", parameter), -math.inf)) < NEAR
    }
    of = ("start", "rate")
    return [replace(r, right=None) if r.quantity in of and r.parameter in alike else r for r in rows]

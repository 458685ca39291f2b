"""Exponents of the size: slopes over the sizes of what was measured, each beside the intended exponent.

What is intended follows from a declared parametrisation, or from what a learning rate needs to carry.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, linear_regression
from typing import Any, Final, Literal, NamedTuple

from normlab.base.model_config import ModelConfig
from normlab.diagnosis.laws import half_width
from normlab.scaling import ALL, LEVEL
from normlab.scaling.measured import Key, Measured, Place
from normlab.scaling.parametrisation import ONE, Exponents, MuP, Parametrisation

Axis = Literal["width", "depth"]
HALF: Final = 0.5
"""Exponents are multiples of this. Yang and Hu 2021 (2011.14522); Yang et al. 2022 (2203.03466)."""
NEAR: Final = HALF / 2
"""How far a measured slope may be from a multiple of a half and still count as that."""
_EXACT: Final = 1e-3
"""How far off an exponent read off an optimizer's own numbers may be: rates are typed with four digits."""
FACTS: Final = ("start", "rate", "decay", "eps", "attention scale")
"""What a declared parametrisation prescribes, causes first."""
_STARTING: Final = ("activation", "entry", "logits")
"""What must not grow with the width before the first step."""
_HELD: Final = ("rate", "decay", "eps", "beta1", "beta2", "attention scale", "head width")
"""What is exact: the numbers that an optimizer or a model holds."""
_SUMMED: Final = ("start", "rate", "decay", "eps", "activation", "update")
"""What also has rows for all places of a role together."""
Sizes = Mapping[tuple[int, int], Measured]
"""By size and seed."""


@dataclass(frozen=True)
class _Meant:
    """One exponent, or anything lower by up to ``falls``."""

    exponent: float
    falls: float = 0.0
    exact: bool = False

    @property
    def low(self) -> float:
        return self.exponent - self.falls

    def holds(self, low: float, high: float) -> bool:
        """Whether some exponent in an interval is nearest to an intended one."""
        if self.exact:
            return low >= self.low - _EXACT and high <= self.exponent + _EXACT
        return high >= self.low - NEAR and low <= self.exponent + NEAR


def _by_table(kind: type[Parametrisation] | None, axis: Axis, key: Key, place: Place) -> _Meant | None:
    """What a declared parametrisation prescribes for a start, a rate, a decay, an eps, or a branch.

    A role that the table of decays, or of starts, leaves out is not judged, nor is an eps that it does not
    change: the public µP references differ on both. Decay of vectors is not judged either.
    """
    if kind is None:
        return None

    def along(powers: Exponents) -> float:
        return powers.width if axis == "width" else powers.depth * place.in_block

    quantity, power = key.quantity, None
    if quantity == "rate":
        power = along(kind.rates.get(key.role, ONE))
    elif quantity == "decay" and key.role in kind.decays:
        power = along(kind.decays[key.role])
    elif quantity == "eps" and kind.eps != ONE and (axis == "width" or place.in_block):
        power = along(kind.eps)
    if power is not None:
        return _Meant(power, exact=True)
    if quantity == "start" and axis == "width" and key.role in kind.starts:
        return _Meant(kind.starts[key.role])
    if quantity == "branch" and axis == "depth" and kind.branch != ONE:
        return _Meant(kind.branch.depth)
    return None


def _to_carry(axis: Axis, key: Key, step: int, place: Place) -> _Meant | None:
    r"""What a learning rate needs to carry: updates change everything by the same amount at every size,
    neither growing nor vanishing, and nothing grows at the start.

    A change that is a sum over features may fall by a root of the width: its terms align fully, as the theory
    has it, or not at all. Everett et al. 2024, section 3 (2407.05872). So may one that adds up several steps,
    since the steps of a wider model may agree less. With depth, the updates of all layers add up in the
    stream; the change there counts, not that of a layer, nor that of the logits, which is relative to a
    stream whose own start approaches that of the embeddings.
    """
    wide, quantity = axis == "width", key.quantity
    if quantity == "activation" and key.role in ("embedding", "head"):
        return None  # a multiplier may follow: what counts is what enters the first block, and the logits
    if quantity == "stream change" or (not step and quantity in ("stream", *(_STARTING if wide else ()))):
        return _Meant(0.0, falls=math.inf)
    if quantity == "logits change" and wide:
        return _Meant(0.0, falls=HALF)
    if quantity == "update" and (wide or not place.in_block):
        return _Meant(0.0, falls=HALF if wide and (place.product or step > 1) else 0.0)
    return None


def _kind_of(key: Key, start: float, rate: float) -> str:
    """What is wrong if this quantity is, given the exponents of its parameter's start and rate: start, rate,
    decay, eps, multiplier, attention scale or branch.

    If the start, or the rate, is right, the multiplier is wrong. Yang et al. 2022, Table 8 (2203.03466).
    """
    match key.quantity:
        case "start" | "rate" | "decay" | "eps" | "attention scale":
            return key.quantity
        case "branch" | "stream" | "stream change":
            return "branch"
        case "activation" | "logits":
            role = "head" if key.role == "logits" else key.role
            return "start" if abs(start - MuP.starts.get(role, start)) > NEAR else "multiplier"
        case "update" if abs(rate - MuP.rates.get(key.role, ONE).width) > NEAR:
            return "rate"
    return "multiplier"


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
            wanted = _by_table(kind, axis, key, place) or _to_carry(axis, key, step, place)
        start, rate = (of.get((name, key.parameter), math.nan) for name in ("start", "rate"))
        row = _row(key, step, slope, wanted)
        rows.append(replace(row, kind=_kind_of(key, start, rate), path=place.path))
    yield from _equivalent(rows)
    by_role: dict[Key, list[Key]] = defaultdict(list)
    for key in dict.fromkeys(key for key, _ in keys if key.quantity in _SUMMED):
        by_role[Key(key.quantity, key.role, ALL)].append(key)
    for key, own in by_role.items():
        for step in sorted({step for one, step in keys if one in own}):
            yield _row(key, step, _slope(measured, sizes, own, step), None)


def _row(key: Key, step: int, slope: _Slope, wanted: _Meant | None) -> Row:
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
    if keys[0].quantity in _HELD:
        steps = [b - a for y in logs for a, b in pairwise(y)]
        steps = [rise / (b - a) for rise, (a, b) in zip(steps, [*pairwise(x)] * len(logs), strict=True)]
        return _Slope(mean, min(steps), max(steps), values)
    if len(slopes) > 1:
        half = half_width(slopes, LEVEL)
    return _Slope(mean, mean - half, mean + half, values)


def _of_attention(kind: type[Parametrisation] | None, axis: Axis, widths: _Slope) -> _Meant | None:
    """What is intended for the scale of attention: the declared exponent of a head's width, else that
    products of queries and keys that point the same way, as they come to do in training, do not grow.

    Yang et al. 2022, definition 4.1 (2203.03466).
    """
    if kind is None:
        return _Meant(-widths.mean, falls=math.inf, exact=True) if axis == "width" else None
    narrow, wide = widths.values[0], widths.values[-1]
    if narrow == wide:
        return None
    own = kind(ModelConfig())
    low, high = (math.log(own.attention_scale(None, round(w)) or w**-0.5) for w in (narrow, wide))
    return _Meant((high - low) / math.log(wide / narrow) * widths.mean, exact=True)


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

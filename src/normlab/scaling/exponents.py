"""Exponents of the size: slopes over the sizes of what was measured, each beside the intended exponent.

What is intended follows from a declared parametrisation, or from what a learning rate needs to carry.
docs/coordinates.md, "Which slopes are right", says it for users.
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
from normlab.scaling.one_model import Measured, Place, QuantityKey
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
"""The quantities that also have rows for all places of a role together."""
Models = Mapping[tuple[int, int], Measured]
"""What each model showed, by size and seed."""


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


def _by_table(kind: type[Parametrisation], axis: Axis, key: QuantityKey, place: Place) -> _Meant | None:
    """What a declared parametrisation prescribes for a start, a rate, a decay, an eps, or a branch.

    A role that the table of decays, or of starts, leaves out is not judged, nor is an eps that it does not
    change: the public µP references differ on both. Decay of vectors is not judged either.
    """

    def along(powers: Exponents) -> float:
        return powers.width if axis == "width" else powers.depth * place.in_block

    match key.quantity:
        case "rate":
            return _Meant(along(kind.rates.get(key.role, ONE)), exact=True)
        case "decay" if key.role in kind.decays:
            return _Meant(along(kind.decays[key.role]), exact=True)
        case "eps" if kind.eps != ONE and (axis == "width" or place.in_block):
            return _Meant(along(kind.eps), exact=True)
        case "start" if axis == "width" and key.role in kind.starts:
            return _Meant(kind.starts[key.role])
        case "branch" if axis == "depth" and kind.branch != ONE:
            return _Meant(kind.branch.depth)
    return None


def _to_carry(axis: Axis, key: QuantityKey, step: int, place: Place) -> _Meant | None:
    """What a learning rate needs to carry: nothing grows at the start, and updates change everything by the
    same amount at every size, neither growing nor vanishing.

    ==========================  ============================  ==============
    quantity                    over width                    over depth
    ==========================  ============================  ==============
    stream at the start         does not grow                 does not grow
    other tensors at the start  do not grow                   not judged
    change of the stream        does not grow                 does not grow
    update in a block           the same; a sum may fall      not judged
    update outside the blocks   the same; a sum may fall      the same
    change of the logits        is a sum: the same, or falls  not judged
    ==========================  ============================  ==============

    A sum may fall by up to a root of the width.
    """
    quantity = key.quantity
    does_not_grow = _Meant(0.0, falls=math.inf)
    if quantity == "activation" and key.role in ("embedding", "head"):
        return None  # a multiplier may follow: what counts is what enters the first block, and the logits
    if quantity == "stream change" or (quantity == "stream" and not step):
        return does_not_grow
    if axis == "depth":
        # the updates of all layers add up in the stream, so its change counts, and not that of a layer; nor
        # that of the logits, which is relative to a stream that starts closer to the embeddings if deeper
        return _Meant(0.0) if quantity == "update" and not place.in_block else None
    if quantity in _STARTING and not step:
        return does_not_grow
    if quantity in ("logits change", "update"):
        # the terms of a sum over features align fully, as the theory has it, or not at all, and then the sum
        # is smaller by a root of the width. Everett et al. 2024, Section 3 (2407.05872). A change by several
        # steps is a sum, too, and the steps of a wider model may agree less
        is_sum = quantity == "logits change" or place.product or step > 1
        return _Meant(0.0, falls=HALF if is_sum else 0.0)
    return None


def _kind_of(key: QuantityKey, start: float, rate: float) -> str:
    """What is wrong if this quantity is, given the exponents of its parameter's start and rate: start, rate,
    decay, eps, multiplier, attention scale or branch.

    The size of an output goes with the start times a multiplier, that of an update with the rate times a
    multiplier, and the same model can be written with other factors in both (``_equivalent``). So one table
    is the yardstick, whatever was declared: µP's. If the start, or the rate, is as it has them, or is not
    known, the multiplier is wrong. Yang et al. 2022, Table 8 (2203.03466).
    """
    match key.quantity:
        case "start" | "rate" | "decay" | "eps" | "attention scale":
            return key.quantity
        case "branch" | "stream" | "stream change":
            return "branch"
        case "activation" | "logits":
            role = "head" if key.role == "logits" else key.role
            return "start" if _differs(start, MuP.starts.get(role)) else "multiplier"
        case "update":
            return "rate" if _differs(rate, MuP.rates.get(key.role, ONE).width) else "multiplier"
    return "multiplier"


def _differs(exponent: float, in_mup: float | None) -> bool:
    """Whether an exponent is known, and is not the one that µP has for a role, if it has any."""
    if in_mup is None or math.isnan(exponent):
        return False
    return abs(exponent - in_mup) > NEAR


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


def rows_of(models: Models, axis: Axis, kind: type[Parametrisation] | None) -> Iterator[Row]:
    """Yield what every model showed, in the order of a pass and by step, then by role; ``kind`` is the
    parametrisation that was declared.
    """
    sizes = sorted({size for size, _ in models})
    places = next(of_model.places for (size, _), of_model in models.items() if size == sizes[-1])
    slopes = {(key, step): _slope(models, sizes, [key], step) for key, step in _shown_by_all(models, places)}
    by_parameter = {(key.quantity, key.parameter): slope.mean for (key, _), slope in slopes.items()}
    rows = list[Row]()
    for (key, step), slope in slopes.items():
        place = places[key]
        if key.quantity == "attention scale":
            meant = _of_attention(kind, axis, slopes[key._replace(quantity="head width"), step])
        else:
            declared = None if kind is None else _by_table(kind, axis, key, place)
            meant = declared or _to_carry(axis, key, step, place)
        start = by_parameter.get(("start", key.parameter), math.nan)
        rate = by_parameter.get(("rate", key.parameter), math.nan)
        row = _row(key, step, slope, meant)
        rows.append(replace(row, kind=_kind_of(key, start, rate), path=place.path))
    yield from _equivalent(rows)
    yield from _rows_by_role(models, sizes, list(slopes))


def _shown_by_all(models: Models, places: Mapping[QuantityKey, Place]) -> list[tuple[QuantityKey, int]]:
    """What every model showed and at which steps, in the order of a pass and by step."""
    shared = set[tuple[QuantityKey, int]].intersection(
        *(set(of_model.values) for of_model in models.values())
    )
    rank = {key: number for number, key in enumerate(places)}

    def order(shown: tuple[QuantityKey, int]) -> tuple[int, int, int]:
        key, step = shown
        return places[key].time, rank[key], step

    return sorted(shared, key=order)


def _rows_by_role(
    models: Models, sizes: Sequence[int], shown: Sequence[tuple[QuantityKey, int]]
) -> Iterator[Row]:
    """Yield a row for all places of a role together, which is not judged."""
    steps_by_key: dict[QuantityKey, set[int]] = defaultdict(set)
    keys_by_role: dict[QuantityKey, list[QuantityKey]] = defaultdict(list)
    for key, step in shown:
        if key.quantity in _SUMMED:
            steps_by_key[key].add(step)
    for key in steps_by_key:
        keys_by_role[QuantityKey(key.quantity, key.role, ALL)].append(key)
    for role, keys in keys_by_role.items():
        for step in sorted(set[int].union(*(steps_by_key[key] for key in keys))):
            yield _row(role, step, _slope(models, sizes, keys, step), None)


def _row(key: QuantityKey, step: int, slope: _Slope, meant: _Meant | None) -> Row:
    return Row(
        role=key.role,
        module=key.module,
        quantity=key.quantity,
        step=step,
        slope=slope.mean,
        low=slope.low,
        high=slope.high,
        expected=None if meant is None else meant.exponent,
        expected_low=None if meant is None else meant.low,
        right=meant.holds(slope.low, slope.high) if meant is not None and slope.known else None,
        parameter=key.parameter,
        values=slope.values,
    )


def _slope(models: Models, sizes: Sequence[int], keys: Sequence[QuantityKey], step: int) -> _Slope:
    """The slope of the root mean square of some quantities together."""
    seeds = list(dict.fromkeys(seed for _, seed in models))
    table = [
        [fmean(models[size, seed].values[key, step] ** 2 for key in keys) ** 0.5 for size in sizes]
        for seed in seeds
    ]
    values = tuple(fmean(column) for column in zip(*table, strict=True))
    if any(not (math.isfinite(x) and x > 0) for row in table for x in row):
        return _Slope(math.nan, math.nan, math.nan, values)
    x = [math.log(size) for size in sizes]
    by_seed = [[math.log(value) for value in row] for row in table]
    slopes = [linear_regression(x, y).slope for y in by_seed]
    mean = fmean(slopes)
    if keys[0].quantity in _HELD:
        local = [slope for y in by_seed for slope in _local_slopes(x, y)]
        return _Slope(mean, min(local), max(local), values)
    half = half_width(slopes, LEVEL) if len(slopes) > 1 else math.inf
    return _Slope(mean, mean - half, mean + half, values)


def _local_slopes(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """The slope from each point to the next."""
    return [(y1 - y0) / (x1 - x0) for (x0, x1), (y0, y1) in zip(pairwise(x), pairwise(y), strict=True)]


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
    declared = kind(ModelConfig())  # of any configuration: the scale depends on the head's width alone
    # None stands for the usual scale, one over the root of the head's width
    at_narrow, at_wide = (
        math.log(declared.attention_scale(None, round(width)) or width**-0.5) for width in (narrow, wide)
    )
    return _Meant((at_wide - at_narrow) / math.log(wide / narrow) * widths.mean, exact=True)


def _equivalent(rows: Sequence[Row]) -> list[Row]:
    r"""The rows; a start and a rate that are off by the same exponent are not judged.

    Let both be :math:`m^{0.5}` too large for a matrix W. Adam's step does not depend on the size of
    gradients, so :math:`V = m^{-0.5} W` starts and moves as intended, and the model computes with
    :math:`m^{0.5} V`: it is one with the right start and rate, and with a multiplier. The update shows
    whether that is as it should be. Yang et al. 2022, Lemma J.1 (2203.03466).
    """
    excess: dict[str, dict[str, float]] = {"start": {}, "rate": {}}
    for row in rows:
        if row.quantity in excess and row.right is False:
            excess[row.quantity][row.parameter] = row.slope - (row.expected or 0.0)
    off_alike = {
        parameter
        for parameter, of_start in excess["start"].items()
        if parameter in excess["rate"] and abs(of_start - excess["rate"][parameter]) < NEAR
    }
    return [
        replace(row, right=None) if row.quantity in excess and row.parameter in off_alike else row
        for row in rows
    ]

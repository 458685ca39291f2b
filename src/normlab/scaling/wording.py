"""Sentences about exponents of the size: what is wrong, and what to do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from normlab.base.units import count
from normlab.scaling.exponents import FACTS, HALF

if TYPE_CHECKING:
    from collections.abc import Mapping

    from normlab.scaling.coordinates import Coordinates
    from normlab.scaling.exponents import Row

NAMES: Final = {
    "start": "initial deviation",
    "rate": "learning rate",
    "decay": "weight decay",
    "eps": "eps",
    "attention scale": "factor on products of queries and keys",
}
STEPPING: Final = ("rate", "attention scale", "branch", "update", "logits change", "stream change")
"""Quantities that change with how far a step of a given rate moves the outputs."""


def reason(row: Row, of: Coordinates) -> str:
    """What is wrong with a row, and what to do."""
    return f"{_what(row, of)}; {_remedy(row, of)}"


def moves(fault: Mapping[str, Any]) -> int:
    """Which way a row that is wrong moves the best rate as the size grows: -1 down, 1 up, 0 if that is not
    known, as for a start or a decay.

    If a step changes more than intended, a lower rate makes up for it; a larger eps makes steps smaller.
    """
    excess = (fault.get("slope") or 0.0) - (fault.get("expected") or 0.0)
    if fault["quantity"] in STEPPING:
        return -1 if excess > 0 else 1
    return (1 if excess > 0 else -1) if fault["quantity"] == "eps" else 0


def apart(check: Mapping[str, Any]) -> int:
    """How many other facts of a check are wrong that its fault does not explain: what a parameter starts
    with, or a group holds, does not follow from anything measured. A role counts once for each quantity.
    """
    fault = check["fault"]
    if fault["quantity"] not in FACTS:
        return 0
    wrong = {
        (r["quantity"], r["role"]) for r in check["rows"] if r["right"] is False and r["quantity"] in FACTS
    }
    return len(wrong - {(fault["quantity"], fault["role"])})


def _what(row: Row, of: Coordinates) -> str:
    grows = "grows" if row.slope > (row.expected or 0) else "falls"
    size = f"{of.axis} as m^{row.slope:.1f}"
    where = f"`{row.module}`" if row.module else "the model"
    if row.quantity in FACTS:
        own = f"`{row.parameter}`" if row.parameter else where
        goes = f"goes with {size}" if abs(row.slope) > HALF / 10 else f"is the same at every {of.axis}"
        known = f"{of.parametrisation} has m^{row.expected:.2g}"
        wanted = known if of.parametrisation else "queries and keys that align in training let these grow"
        return f"the {NAMES[row.quantity]} of {own} ({row.role}) {goes}, and {wanted}"
    if row.quantity == "update":
        role = f" ({row.role})" if row.role not in row.module else ""
        return f"the update of {where}{role} {grows} with {size}"
    if row.quantity == "branch":
        table = f"{of.parametrisation} has m^{row.expected:.2g}"
        return f"what a block adds to its stream goes with {size}, and {table}"
    own = {"logits": "the logits", "stream": f"the stream behind {where}"}
    what = f"what enters {where}" if row.quantity == "entry" else own.get(row.role, f"the output of {where}")
    when = f"after {count(row.step, 'step')}" if row.step else "at the start"
    return f"the {'change' if row.step else 'size'} of {what} {grows} with {size} {when}"


def _remedy(row: Row, of: Coordinates) -> str:
    power = (row.expected or 0.0) - row.slope
    if row.quantity in FACTS:
        return _scaled("it", power, of.axis)
    power = round(power / HALF) * HALF
    if row.kind == "branch":
        return _scaled("the output of every branch", power if row.quantity == "branch" else -1.0, of.axis)
    if row.quantity == "entry":
        return _scaled("the sum of the embeddings", power, of.axis)
    if row.kind == "start":
        return _scaled("its initial deviation", power, of.axis)
    if row.kind == "multiplier":
        either = "its learning rate, or its output," if row.quantity == "update" else "its output"
        either = "the logits" if row.role == "logits" else either
        return _scaled(either, power if row.role == "embedding" else math.copysign(1.0, power), of.axis)
    of_group = {r.quantity: r.slope for r in of.rows if r.parameter == row.parameter}
    if row.role == "hidden" and "beta1" in of_group:
        power = -1.0 - of_group["rate"]  # what full alignment needs: the slope that is measured may be lower
    return _scaled("its learning rate", power, of.axis)


def _scaled(what: str, power: float, axis: str) -> str:
    """What to multiply by a power of the ratio of sizes."""
    size = abs(power)
    ratio = f"the {axis} ratio"
    if abs(size - HALF) < HALF / 10:
        ratio = f"the root of the {axis} ratio"
    elif abs(size - 1) > HALF / 10:
        ratio = f"the {axis} ratio to the power {size:.2g}"
    return f"{'divide' if power < 0 else 'multiply'} {what} by {ratio}"

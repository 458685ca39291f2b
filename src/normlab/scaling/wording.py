"""Sentences about exponents of the size: what is wrong, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from normlab.base.units import count
from normlab.scaling.exponents import FACTS, HALF, Axis, Row

NAMES: Final = {
    "start": "initial deviation",
    "rate": "learning rate",
    "decay": "weight decay",
    "eps": "eps",
    "attention scale": "factor on products of queries and keys",
}
STEPPING: Final = ("rate", "attention scale", "branch", "update", "logits change", "stream change")
"""Quantities that change with how far a step of a given rate moves the outputs."""


def reason(row: Row, rows: Sequence[Row], axis: Axis, parametrisation: str) -> str:
    """What is wrong with a row, and what to do.

    Args:
        row: A row that is wrong.
        rows: All rows of its check.
        axis: The size that changes.
        parametrisation: The declared one; empty if there is none.
    """
    return f"{_what(row, axis, parametrisation)}; {_remedy(row, rows, axis)}"


def moves(fault: Mapping[str, Any]) -> int:
    """Which way a row that is wrong moves the best rate as the size grows: -1 down, 1 up, 0 if that is not
    known, as for a start or a decay.

    If a step changes more than intended, a lower rate makes up for it; a larger eps makes steps smaller.
    """
    excess = (fault.get("slope") or 0.0) - (fault.get("expected") or 0.0)
    if fault["quantity"] in STEPPING:
        return -1 if excess > 0 else 1
    if fault["quantity"] == "eps":
        return 1 if excess > 0 else -1
    return 0


def apart(check: Mapping[str, Any]) -> int:
    """How many other facts of a check are wrong that its fault does not explain: what a parameter starts
    with, or a group holds, does not follow from anything measured. A role counts once for each quantity.
    """
    fault = check["fault"]
    if fault["quantity"] not in FACTS:
        return 0
    wrong = {
        (row["quantity"], row["role"])
        for row in check["rows"]
        if row["right"] is False and row["quantity"] in FACTS
    }
    return len(wrong - {(fault["quantity"], fault["role"])})


def _what(row: Row, axis: Axis, parametrisation: str) -> str:
    size = f"{axis} as m^{row.slope:.1f}"
    grows = "grows" if row.slope > (row.expected or 0) else "falls"
    module = f"`{row.module}`" if row.module else "the model"
    if row.quantity in FACTS:
        return _wrong_fact(row, axis, parametrisation)
    if row.quantity == "update":
        role = "" if row.role in row.module else f" ({row.role})"
        return f"the update of {module}{role} {grows} with {size}"
    if row.quantity == "branch":
        return f"what a block adds to its stream goes with {size}, and {_in_table(row, parametrisation)}"
    if row.quantity == "entry":
        tensor = f"what enters {module}"
    elif row.role == "logits":
        tensor = "the logits"
    elif row.role == "stream":
        tensor = f"the stream behind {module}"
    else:
        tensor = f"the output of {module}"
    if row.step:
        return f"the change of {tensor} {grows} with {size} after {count(row.step, 'step')}"
    return f"the size of {tensor} {grows} with {size} at the start"


def _wrong_fact(row: Row, axis: Axis, parametrisation: str) -> str:
    """What is wrong with a start, with what a parameter's group holds, or with the scale of attention."""
    name = row.parameter or row.module
    place = f"`{name}`" if name else "the model"
    is_constant = abs(row.slope) <= HALF / 10
    goes = f"is the same at every {axis}" if is_constant else f"goes with {axis} as m^{row.slope:.1f}"
    wanted = "queries and keys that align in training let these grow"
    if parametrisation:
        wanted = _in_table(row, parametrisation)
    return f"the {NAMES[row.quantity]} of {place} ({row.role}) {goes}, and {wanted}"


def _in_table(row: Row, parametrisation: str) -> str:
    """The exponent that a parametrisation has for a row. Without one, no such row has any."""
    return f"{parametrisation} has m^{row.expected:.2g}"


def _remedy(row: Row, rows: Sequence[Row], axis: Axis) -> str:
    """What to multiply or divide, and by which power of the ratio of sizes."""
    missing = (row.expected or 0.0) - row.slope
    if row.quantity in FACTS:
        return _scaled("it", missing, axis)
    # a measured slope is uncertain, and those of the theory are multiples of a half
    power = round(missing / HALF) * HALF
    if row.kind == "branch":
        if row.quantity != "branch":
            # only the stream was measured, whose growth does not tell the power that its branches need;
            # CompleteP's is -1. Dey et al. 2025, Table 1 (2505.01618)
            power = -1.0
        return _scaled("the output of every branch", power, axis)
    if row.quantity == "entry":
        return _scaled("the sum of the embeddings", power, axis)
    if row.kind == "start":
        return _scaled("its initial deviation", power, axis)
    if row.kind == "multiplier":
        if row.role != "embedding":
            # the slope depends on how far the terms of a product align so far; if they do so fully, the power
            # is 1, as on µP's logits. Yang et al. 2022, Table 8 (2203.03466). A table sums over no features
            power = math.copysign(1.0, power)
        return _scaled(_multiplied(row), power, axis)
    group = {other.quantity: other.slope for other in rows if other.parameter == row.parameter}
    is_adam = "beta1" in group
    if row.role == "hidden" and is_adam:
        # for full alignment, Adam needs a rate that goes with one over the width, though the slope measured
        # may be lower; less what the rate does already. Yang et al. 2022, Table 8 (2203.03466)
        power = -1.0 - group["rate"]
    return _scaled("its learning rate", power, axis)


def _multiplied(row: Row) -> str:
    """What a multiplier would change."""
    if row.role == "logits":
        return "the logits"
    return "its learning rate, or its output," if row.quantity == "update" else "its output"


def _scaled(quantity: str, power: float, axis: str) -> str:
    """The advice to multiply something by a power of the ratio of sizes."""
    size = abs(power)
    ratio = f"the {axis} ratio"
    if abs(size - HALF) < HALF / 10:
        ratio = f"the root of the {axis} ratio"
    elif abs(size - 1) > HALF / 10:
        ratio = f"the {axis} ratio to the power {size:.2g}"
    return f"{'divide' if power < 0 else 'multiply'} {quantity} by {ratio}"

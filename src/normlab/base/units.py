"""Quantities as text, the same in the terminal and on the page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from normlab.errors import UserError

DIGITS_OF_FLOAT: Final = 17
"""Digits that tell any two floats apart."""
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """Return text that is harmless in a terminal: control characters, which can move its cursor or rename its
    window, become their codes.
    """
    return text.translate(_CONTROLS)


def count(number: int, thing: str) -> str:
    """Return a number with its noun: ``1 run``, ``3 runs``, ``2 batches``."""
    plural = "es" if thing.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}{plural}"


def told_apart(a: float, b: float, digits: int = 3) -> tuple[str, str]:
    """Return two numbers in so many digits or, if these are the same, in one more than tell them apart."""
    differing = (n for n in range(digits, DIGITS_OF_FLOAT + 1) if f"{a:.{n}g}" != f"{b:.{n}g}")
    needed = next(differing, digits)
    shown = digits if needed == digits else min(needed + 1, DIGITS_OF_FLOAT)
    return f"{a:.{shown}g}", f"{b:.{shown}g}"


def duration(seconds: float) -> str:
    """Return seconds in their two largest units: ``48 s``, ``4 min 05 s``, ``2 h 10 min``."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def perplexity(nll: float) -> float:
    """Return the exponential of nats; infinite if it is too large for a float."""
    return math.inf if nll > 700 else math.exp(nll)


def p_value(p: float) -> str:
    """Return a p-value: ``p = 0.034``, or ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def steps_named(steps: Sequence[int]) -> str:
    """Return a list of steps: ``step 400``, or ``steps 400, 800``."""
    noun = "steps" if len(steps) > 1 else "step"
    return f"{noun} {', '.join(f'{step:,}' for step in steps)}"


def rate(lr: float) -> str:
    """Return a learning rate as people type it: ``5e-4``, ``1.5e-3``, ``0.1``."""
    if lr >= 0.05 or not lr:
        return f"{lr:g}"
    mantissa, exponent = f"{lr:.6e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def short_rate(lr: float, digits: int = 2) -> str:
    """Return a rate in so many digits, as people type it: ``1.4e-2``."""
    return rate(float(f"{lr:.{digits}g}"))


def seconds_of(text: str, name: str) -> float | None:
    """Return a duration such as ``2h``, ``90min`` or ``1h 30min`` in seconds; None for an empty text.

    Raises UserError, which refers to it as ``name``, for anything else.
    """
    if not text.strip():
        return None
    units = {"h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}
    parts = re.findall(r"(\d+\.?\d*|\.\d+)\s*(h|min|m|s)(?=[\s\d.]|$)", text)
    understood = "".join(number + unit for number, unit in parts)
    if understood != "".join(text.split()):
        raise UserError(
            f"{name} must be a time in hours, minutes or seconds, got {text!r}; type 2h, 90min or '1h 30min'"
        )
    return sum(float(number) * units[unit] for number, unit in parts)

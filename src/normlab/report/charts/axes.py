"""Axes that several kinds of charts share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt

from normlab.report.charts.theme import Drawn, finish


def log_or_linear(values: Sequence[float], *, log: bool, fixed: bool = False) -> tuple[alt.Scale, alt.Axis]:
    """Return a scale that covers the values, with round ticks."""
    low, high = min(values), max(values)
    if not log:
        free = alt.Scale(zero=low >= 0)
        return alt.Scale(domain=[low, high], nice=False) if fixed else free, alt.Axis(tickCount=5)
    low, high = (low, high) if fixed else (low / 1.3, high * 1.3)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 3 else (1,)
    every = max(1, len(decades) // 6)
    ticks = [m * float(f"1e{e}") for e in decades if e % every == 0 for m in steps]
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    format_ = "~e" if len(decades) > 5 or low < 1e-3 else "~g"
    return scale, alt.Axis(values=[t for t in ticks if low <= t <= high], format=format_)


def nothing(height: int) -> Drawn:
    """Return the placeholder of a chart without finite values."""
    empty = alt.Chart(alt.InlineData(values=[{}]))
    return finish([empty.mark_text(text="no finite value", style="faint")], height)

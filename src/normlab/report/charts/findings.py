"""The forest plots of findings: every effect with its interval, beside the value of no difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.report.charts.drawing import Drawn, finish, layer, log_or_linear, series_colour
from normlab.report.charts.theme import SERIES

ROW: Final = 32
"""Pixels of an effect: its name, and below it the interval."""
NAME: Final = -7
"""Pixels from the middle of a row to its name."""
INTERVAL: Final = 8
"""Pixels from the middle of a row to its interval."""
READINGS: Final = ("agrees", "contradicts", "open", "waits")
"""What an effect may say of its finding, in the order of their colours."""


def forest(rows: Sequence[Mapping[str, Any]], title: str, equal: float, *, ratios: bool) -> Drawn:
    """Return a row for each effect: its name, and below it a dot at its value and a rule over its interval,
    in the colour of what it says.

    Rows have ``effect`` (its name, with the regime's), ``value``, ``low``, ``high`` and ``reading``, in their
    order. Names stand in the plot and not beside it, where they would take all the width of a phone.
    Differences lie on a scale that is linear up to 1 and logarithmic beyond, so that those of a text that is
    learnt whole fit beside those of a real one; ratios are logarithmic.
    """
    table = pl.DataFrame(
        {
            "effect": [row["effect"] for row in rows],
            SERIES: [row["reading"] for row in rows],
            **{end: [float(row[end]) for row in rows] for end in ("value", "low", "high")},
        }
    )
    order = list(dict.fromkeys(table["effect"]))
    y = alt.Y(field="effect", type="nominal", sort=order, title=None, axis=None)
    ends = [equal, *table["low"], *table["high"]]
    scale, axis = log_or_linear(ends, log=True) if ratios else _of_differences(ends)
    x = alt.X(field="value", type="quantitative", title=title, scale=scale, axis=axis)
    colour = series_colour(READINGS)
    none = layer({"value": equal}, "rule", {"style": "faint", "strokeDash": [2, 3]}, x=x)
    low = alt.X(field="low", type="quantitative", title=title)
    bar = {"strokeWidth": 2, "yOffset": INTERVAL, "clip": True}
    intervals = layer(table, "rule", bar, y=y, x=low, x2="high", color=colour)
    dot = {"size": 55, "opacity": 1, "yOffset": INTERVAL}
    dots = layer(table, "circle", dot, y=y, x=x, color=colour)
    name = {"align": "left", "dx": 2, "yOffset": NAME, "limit": {"expr": "width"}}
    text, left = alt.Text(field="effect", type="nominal"), alt.value(0)
    halos = layer(table, "text", {**name, "style": "halo"}, y=y, x=left, text=text)
    names = layer(table, "text", {**name, "style": "faint"}, y=y, x=left, text=text)
    return finish([*none, *halos, *intervals, *dots, *names], ROW * len(order))


def _of_differences(ends: Sequence[float]) -> tuple[alt.Scale, alt.Axis]:
    """Return a scale that is linear up to 1 and logarithmic beyond, with round ticks on both sides of 0."""
    low, high = min(ends), max(ends)
    room = 0.04 * (_symlog(high) - _symlog(low)) or 0.1
    domain = [_symlog_inverse(_symlog(low) - room), _symlog_inverse(_symlog(high) + room)]
    scale = alt.Scale(type="symlog", constant=1, domain=domain, nice=False)
    if max(-low, high) <= 2:
        return scale, alt.Axis(tickCount=6, labelOverlap=True)
    sizes = [step * 10**power for power in range(4) for step in (1, 2, 5)]
    ticks = [0, *(-size for size in sizes), *sizes]
    inside = sorted(tick for tick in ticks if domain[0] <= tick <= domain[1])
    return scale, alt.Axis(values=inside, labelOverlap=True, format=",.4~r")


def _symlog(value: float) -> float:
    """What Vega's symlog scale with constant 1 makes of a value."""
    return math.copysign(math.log1p(abs(value)), value)


def _symlog_inverse(place: float) -> float:
    return math.copysign(math.expm1(abs(place)), place)

"""The forest plots of findings: every effect with its interval, beside the value of no difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.report.charts.drawing import Drawn, finish, layer, log_or_linear, series_colour
from normlab.report.charts.theme import SERIES

ROW: Final = 20
"""Pixels of an effect."""
READINGS: Final = ("agrees", "contradicts", "open", "waits")
"""What an effect may say of its finding, in the order of their colours."""
_LABEL: Final = 380


def forest(rows: Sequence[Mapping[str, Any]], title: str, equal: float, *, ratios: bool) -> Drawn:
    """Return a line for each effect: a dot at its value, a rule over its interval, in the colour of what it
    says.

    Rows have ``effect`` (its name, with the regime's), ``value``, ``low``, ``high`` and ``reading``, in their
    order. Differences lie on a scale that is linear up to 1 and logarithmic beyond, so that those of a text
    that is learnt whole fit beside those of a real one; ratios are logarithmic.
    """
    table = pl.DataFrame(
        {
            "effect": [row["effect"] for row in rows],
            SERIES: [row["reading"] for row in rows],
            **{end: [float(row[end]) for row in rows] for end in ("value", "low", "high")},
        }
    )
    order = list(dict.fromkeys(table["effect"]))
    y = alt.Y(
        field="effect",
        type="nominal",
        sort=order,
        title=None,
        axis=alt.Axis(labelLimit=_LABEL, domain=False, ticks=False, grid=False),
    )
    scale, axis = alt.Scale(type="symlog", constant=1), alt.Axis(tickCount=6, labelOverlap=True)
    if ratios:
        scale, axis = log_or_linear([equal, *table["low"], *table["high"]], log=True)
    x = alt.X(field="value", type="quantitative", title=title, scale=scale, axis=axis)
    colour = series_colour(READINGS)
    none = layer({"value": equal}, "rule", {"style": "faint", "strokeDash": [2, 3]}, x=x)
    low = alt.X(field="low", type="quantitative", title=title)
    intervals = layer(table, "rule", {"strokeWidth": 2}, y=y, x=low, x2="high", color=colour)
    dots = layer(table, "circle", {"size": 55, "opacity": 1}, y=y, x=x, color=colour)
    return finish([*none, *intervals, *dots], ROW * len(order))

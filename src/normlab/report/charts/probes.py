"""Charts of a model in training: a line per sublayer, from the first to the last."""

from __future__ import annotations

from typing import Final

import altair as alt
import polars as pl

from normlab.report.charts.axes import log_or_linear, nothing
from normlab.report.charts.downsample import POINTS, downsample
from normlab.report.charts.theme import Drawn, finish, rows

POINTS_A_CHART: Final = 12_000
"""Over all lines, so that a page of deep models stays below its size."""
HEIGHT: Final = 240


def by_depth(frame: pl.DataFrame, title: str, *, log: bool = True) -> Drawn:
    """Draw a line per ``module`` of ``value`` over ``step``, shaded by ``depth`` from 0, dark if alone.

    At most 400 points a line; a bin's mean is drawn. What is not finite is left out, and on a log axis what
    is not above 0.
    """
    shown = frame.filter(pl.col("value").is_finite() & ((pl.col("value") > 0) | pl.lit(not log)))
    if shown.is_empty():
        return nothing(HEIGHT)
    lines = shown["module"].n_unique()
    points = max(20, min(POINTS, POINTS_A_CHART // lines))
    few = downsample(shown, "step", "value", ["module", "depth"], points).drop("low", "high")
    zero = "datum.value === 0 ? '0' : datum.label"
    x = alt.X("step:Q", title="step", axis=alt.Axis(format="~s", tickCount=5, grid=False, labelExpr=zero))
    scale, axis = log_or_linear(few["mean"].to_list(), log=log)
    y = alt.Y("mean:Q", title=title, scale=scale, axis=axis)
    shades = [min(0, lines - 2), lines - 1]
    colour = alt.Color("depth:Q", title="sublayer", scale=alt.Scale(range="ramp", domain=shades), legend=None)
    base = alt.Chart(rows(few)).encode(x=x, y=y, color=colour, detail="module:N")
    value = alt.Tooltip("mean:Q", title=title, format=".3g")
    told = [alt.Tooltip("module:N"), alt.Tooltip("step:Q", format=",.4~r"), value]
    near = base.mark_point(size=50, opacity=0).encode(tooltip=told)
    return finish([base.mark_line(strokeWidth=1.5, clip=True), near], HEIGHT)

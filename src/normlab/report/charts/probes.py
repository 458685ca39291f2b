"""The chart of a probe: its value over the steps, a line per module from light to dark."""

from __future__ import annotations

from typing import Final

import altair as alt
import polars as pl

from normlab.report.charts.drawing import Drawn, downsample, finish, has_place, layer, log_or_linear
from normlab.report.charts.theme import POINTS

POINTS_A_CHART: Final = 12_000
"""Points over all lines, so that the page of a deep model does not become too large."""
HEIGHT: Final = 240


def probe_by_step(frame: pl.DataFrame, title: str, *, log: bool = True) -> Drawn:
    """Draw a line of ``value`` over ``step`` for each ``module``, shaded by ``depth`` from light (0) to dark;
    a single line is dark.

    A line has at most 400 points, or fewer where many lines share ``POINTS_A_CHART``; each is the mean of a
    bin. Values that are not finite are left out, and on a log axis those that are not above 0.
    """
    drawable = frame.filter(has_place("value", log=log))
    lines = drawable["module"].n_unique()
    most = max(20, min(POINTS, POINTS_A_CHART // max(1, lines)))
    points = downsample(drawable, "step", "value", ["module", "depth"], most).drop("low", "high")
    zero = "datum.value === 0 ? '0' : datum.label"
    x = alt.X("step:Q", title="step", axis=alt.Axis(format="~s", tickCount=5, grid=False, labelExpr=zero))
    scale, axis = log_or_linear(points["mean"].to_list(), log=log)
    y = alt.Y("mean:Q", title=title, scale=scale, axis=axis)
    shades = alt.Scale(range="ramp", domain=[min(0, lines - 2), lines - 1])
    colour = alt.Color("depth:Q", title="sublayer", scale=shades, legend=None)
    shared = {"x": x, "y": y, "color": colour, "detail": "module:N"}
    value = alt.Tooltip("mean:Q", title=title, format=".3g")
    tooltip = [alt.Tooltip("module:N"), alt.Tooltip("step:Q", format=",.4~r"), value]
    layers = layer(points, "line", {"strokeWidth": 1.5, "clip": True}, **shared)
    # a line has one tooltip for all its points, and points that cannot be seen have one each
    layers += layer(points, "point", {"size": 50, "opacity": 0}, **shared, tooltip=tooltip)
    return finish(layers, HEIGHT)

"""Charts of a diagnosis: the signals of a model from its input to its output.

Frames have one row per point. ``depth`` is the layer, counted from 0 as in the paths of modules; a layer's
sublayers stand between it and the next. ``recipe`` is the role of a sublayer: points are coloured and picked
out by role, as by recipe on other pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.base.chart import ByDepth, HeatMap, Lines, Strips
from normlab.report.charts.drawing import (
    Drawn,
    finish,
    focused,
    has_place,
    layer,
    log_or_linear,
    recipe_colour,
)

HEIGHT: Final = 220
CELLS: Final = 60
"""A heat map has at most so many cells a side: a deeper stack is drawn in groups of sublayers."""
THEORY: Final = ("theory", "theory_low", "theory_high")
LAWS: Final = {"log": "log N", "linear": "N", "power": "a power of N"}
"""The laws of growth that are drawn, in words."""
DASHES: Final = {"log N": (2, 3), "N": (7, 4), "a power of N": (1, 0)}


def by_depth(frame: pl.DataFrame, chart: ByDepth, roles: Sequence[str], ends: Sequence[float]) -> Drawn:
    """Draw a quantity at every sublayer: a point each, coloured by role, and a line through their means.

    ``frame``: ``depth``, ``recipe``, ``module`` and the column ``chart.y``; if there are any, also
    ``theory``, ``theory_low`` and ``theory_high``, drawn as a dashed line or bars. A log axis leaves out what
    is not positive. ``ends`` of the vertical axis are given so that stacks can be compared.
    """
    names = [n for n in (chart.y, *THEORY) if n in frame.columns]
    places = [pl.when(has_place(n, log=chart.log)).then(pl.col(n)).alias(n) for n in names]
    shown = frame.with_columns(places)
    points, theory, bounds = (
        shown.filter(pl.col(n).is_not_null()) if n in names else shown.clear() for n in (chart.y, *THEORY[:2])
    )
    if points.is_empty():
        return finish([], HEIGHT)
    scale, axis = log_or_linear(ends, log=chart.log, fixed=True)
    x = alt.X("depth:Q", title="layer", axis=_whole(int(_most(points["depth"])), first=0), scale=_snug())
    up = partial(alt.Y, type="quantitative", title=chart.axis, scale=scale)
    told = [alt.Tooltip(n) for n in ("module:N", "recipe:N")]
    told += [alt.Tooltip(f"{n}:Q", format=".3g") for n in names]
    apart: dict[str, Any] = {"detail": "recipe:N"} if chart.by_role else {}
    bar = {"opacity": 0.35, "strokeWidth": 4, "style": "faint", "clip": True}
    line = {"strokeWidth": 1, "style": "faint", "opacity": 0.7, "clip": True}
    dashed = {"strokeDash": [5, 4], "strokeWidth": 1.5, "style": "ink", "clip": True}
    dots = {"size": 42 if len(points) < 120 else 20, "clip": True, "opacity": 1}
    picked = {"color": recipe_colour(roles), "opacity": focused(0.95, 0.08)}
    return finish(
        [
            *layer(bounds, "rule", bar, x=x, y=up("theory_low"), y2="theory_high:Q"),
            *layer(points, "line", line, x=x, y=up(chart.y, aggregate="mean", axis=axis), **apart),
            *layer(theory, "line", dashed, x=x, y=up("theory"), **apart),
            *layer(points, "circle", dots, x=x, y=up(chart.y, axis=axis), tooltip=told, **picked),
        ],
        HEIGHT,
    )


def heat_map(frame: pl.DataFrame, chart: HeatMap) -> Drawn:
    """Draw the shares ``value`` of branch ``on`` (-1: the input) in the output of sublayer ``of``, light to
    dark.

    Deep stacks are drawn in groups: shares of the branches of a group are added, those of sublayers averaged.
    """
    if frame.is_empty():
        return finish([], HEIGHT)
    deepest = int(_most(frame["of"])) + 1
    size = -(-deepest // CELLS)
    branch = pl.when(pl.col("on") < 0).then(-1).otherwise(pl.col("on") // size)  # -1 is the input
    grouped = (
        frame.with_columns(of_group=pl.col("of") // size, on_group=branch)
        .group_by("of_group", "of", "on_group")
        .agg(pl.col("value").sum())
        .group_by("of_group", "on_group")
        .agg(pl.col("value").mean())
        .with_columns(x=pl.col("on_group") * size + 0.5, y=pl.col("of_group") * size + 0.5)
        .with_columns(x2=pl.col("x") + size, y2=pl.col("y") + size)
        .sort("y", "x")
        .drop("of_group", "on_group")
    )
    top, axis = deepest + 0.5, _whole(deepest)
    down = alt.Scale(domain=[0.5, top], nice=False, reverse=True)
    share = alt.Tooltip("value:Q", title="share", format=".3f")
    cells = layer(
        grouped,
        "rect",
        {"clip": True, "strokeWidth": 0},
        x=alt.X("x:Q", title=chart.x_axis, axis=axis, scale=alt.Scale(domain=[0.5 - size, top], nice=False)),
        x2="x2:Q",
        y=alt.Y("y:Q", title=chart.y_axis, axis=axis, scale=down),
        y2="y2:Q",
        color=alt.Color("value:Q", scale=alt.Scale(range="heatmap", domain=[0, 1]), legend=None),
        tooltip=[alt.Tooltip("y:Q", title=chart.y_axis), alt.Tooltip("x:Q", title=chart.x_axis), share],
    )
    return finish(cells, 320)


def growth(changes: pl.DataFrame, fits: pl.DataFrame) -> Drawn:
    """Draw the output change at every depth, a point per seed, and the laws that were fitted to it.

    ``changes``: ``depth``, ``change``, ``recipe`` (what was changed), ``seed``; ``fits``: ``recipe``,
    ``law``, ``depth``, ``value``. Both axes are logarithmic: a power of N is a straight line.
    """
    shown = changes.filter(has_place("change", log=True))
    scale, axis = log_or_linear(shown["change"].to_list(), log=True)
    deepest = int(_most(shown["depth"]))
    ticks = [n for n in (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500) if n <= deepest]
    across = alt.Axis(values=ticks, grid=False, format="d")
    x = alt.X("depth:Q", title="sublayers N", scale=alt.Scale(type="log", nice=False), axis=across)
    up = partial(alt.Y, type="quantitative", title="mean square change", scale=scale)
    scales = alt.Scale(domain=list(dict.fromkeys(shown["recipe"].to_list())), range="category")
    legend = alt.Legend(orient="top", direction="vertical", symbolType="circle", labelLimit=400)
    colour = alt.Color("recipe:N", scale=scales, title=None, legend=legend)
    told = [alt.Tooltip("recipe:N", title="changed"), alt.Tooltip("depth:Q")]
    measured = [*told, alt.Tooltip("change:Q", format=".3g"), alt.Tooltip("seed:Q")]
    fitted = [*told, alt.Tooltip("law:N"), alt.Tooltip("value:Q", format=".3g")]
    lines = fits.filter((pl.col("value") > 0) & pl.col("law").is_in(list(LAWS)))
    known = [words for law, words in LAWS.items() if law in set(lines["law"])]
    dashes = alt.Scale(domain=known, range=[list(DASHES[words]) for words in known])
    strokes = alt.Legend(orient="bottom", symbolType="stroke")
    dash = alt.StrokeDash("law:N", scale=dashes, title=None, legend=strokes)
    dots, line = {"size": 30, "opacity": 0.7, "clip": True}, {"strokeWidth": 1.5, "clip": True}
    layers = layer(shown, "circle", dots, x=x, y=up("change", axis=axis), color=colour, tooltip=measured)
    if layers:
        named = lines.with_columns(pl.col("law").replace(LAWS))
        layers += layer(
            named, "line", line, x=x, y=up("value"), color=colour, strokeDash=dash, tooltip=fitted
        )
    return finish(layers, HEIGHT)


def strips(frame: pl.DataFrame, chart: Strips) -> Drawn:
    """Draw a strip for each category and quantity, with a tick per row.

    ``frame``: ``category``, ``what`` (the quantity), ``label`` and ``value``, which is positive.
    """
    shown = frame.filter(has_place("value", log=True))
    scale, axis = log_or_linear(shown["value"].to_list(), log=True)
    named = shown.with_columns(row=pl.col("category") + ", " + pl.col("what"))
    present = set(named["row"].to_list())
    order = [category.replace("_", "-") for category in chart.order]
    categories = dict.fromkeys([*order, *shown["category"].to_list()])
    sort = [
        n for category in categories for what in chart.quantities if (n := f"{category}, {what}") in present
    ]
    colours = alt.Scale(domain=list(chart.quantities), range="category")
    ticks = layer(
        named,
        "tick",
        {"thickness": 1.5, "size": 13, "opacity": 0.55},
        x=alt.X("value:Q", title=chart.axis, scale=scale, axis=axis),
        y=alt.Y("row:N", sort=sort, title=None, axis=alt.Axis(ticks=False, grid=False)),
        color=alt.Color("what:N", scale=colours, title=None),
        tooltip=[alt.Tooltip("label:N"), alt.Tooltip("what:N"), alt.Tooltip("value:Q", format=".3g")],
    )
    return finish(ticks, 20 * len(present) or HEIGHT)


def lines(frame: pl.DataFrame, chart: Lines) -> Drawn:
    """Draw ``y`` against ``x`` with a point per row, and a line per ``group`` if that column exists."""
    shown = frame.filter(has_place("y", log=chart.log))
    scale, axis = log_or_linear(shown["y"].to_list(), log=chart.log)
    told = [alt.Tooltip("x:Q", title=chart.x_axis), alt.Tooltip("y:Q", title=chart.y_axis, format=".3g")]
    whole = shown["x"].dtype.is_integer()
    ticks = alt.Axis(grid=False, format="d", tickMinStep=1) if whole else alt.Axis(grid=False)
    channels: dict[str, Any] = {
        "x": alt.X("x:Q", title=chart.x_axis, scale=_snug(), axis=ticks),
        "y": alt.Y("y:Q", title=chart.y_axis, scale=scale, axis=axis),
    }
    if "group" in shown.columns:
        groups = list(dict.fromkeys(shown["group"].to_list()))
        legend = alt.Legend(orient="top", title=None, symbolType="stroke")
        colours = alt.Scale(domain=groups, range="category")
        channels["color"] = alt.Color("group:N", scale=colours, legend=legend)
        told = [alt.Tooltip("group:N", title="line"), *told]
    drawn = layer(shown, "line", {"strokeWidth": 1.5, "clip": True}, **channels)
    drawn += layer(shown, "circle", {"size": 36, "clip": True}, **channels, tooltip=told)
    return finish(drawn, HEIGHT)


def _whole(most: int, first: int = 1) -> alt.Axis:
    step = max(1, 2 ** round(math.log2(max(1, most) / 8)))
    step = step if step < 4 else 5 * max(1, round(step / 5))
    values = sorted({first, *range(step, most + 1, step)}) if step > 1 else list(range(first, most + 1))
    return alt.Axis(values=values, grid=False, format="d")


def _snug() -> alt.Scale:
    return alt.Scale(nice=False, zero=False, padding=8)


def _most(column: pl.Series) -> float:
    return max((float(v) for v in column.drop_nulls()), default=0.0)

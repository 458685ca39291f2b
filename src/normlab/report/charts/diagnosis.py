"""Charts of a diagnosis: the signals of a model from its input to its output.

Frames have one row per point. ``depth`` is the layer, counted from 0 as in the paths of modules; a layer's
sublayers stand between it and the next. A series (``SERIES``) is a role of sublayers, and in ``growth`` a
kind of change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.base.chart import ByDepth, HeatMap, Strips
from normlab.report.charts.drawing import (
    Drawn,
    finish,
    focused,
    has_place,
    layer,
    log_or_linear,
    series_colour,
)
from normlab.report.charts.theme import SERIES

HEIGHT: Final = 220
CELLS: Final = 60
"""A heat map has at most so many cells a side: a deeper stack is drawn in groups of sublayers."""
THEORY: Final = ("theory", "theory_low", "theory_high")
LAWS: Final = {"log": "log N", "linear": "N", "power": "a power of N"}
"""The laws of growth that are drawn, in words."""
DASHES: Final = {"log N": (2, 3), "N": (7, 4), "a power of N": (1, 0)}


def by_depth(frame: pl.DataFrame, chart: ByDepth, roles: Sequence[str], ends: Sequence[float]) -> Drawn:
    """Draw a quantity at every sublayer: a point each, coloured by role, and a line through their means.

    ``frame``: ``depth``, ``SERIES``, ``module`` and the column ``chart.y``; if there are any, also
    ``theory``, ``theory_low`` and ``theory_high``, drawn as a dashed line or bars. A log axis leaves out what
    is not positive. ``ends`` of the vertical axis are given so that stacks can be compared.
    """
    names = [name for name in (chart.y, *THEORY) if name in frame.columns]
    drawable = frame.with_columns(
        pl.when(has_place(name, log=chart.log)).then(pl.col(name)).alias(name) for name in names
    )
    points, theory, bounds = (_with(drawable, name) for name in (chart.y, "theory", "theory_low"))
    if points.is_empty():
        return finish([], HEIGHT)
    scale, axis = log_or_linear(ends, log=chart.log, fixed=True)
    layers_axis = _whole_numbers(int(_largest(points["depth"])), first=0)
    x = alt.X("depth:Q", title="layer", axis=layers_axis, scale=_tight())

    def y(column: str, **more: Any) -> alt.Y:
        return alt.Y(column, type="quantitative", title=chart.axis, scale=scale, **more)

    tooltip = [alt.Tooltip(name) for name in ("module:N", f"{SERIES}:N")]
    tooltip += [alt.Tooltip(f"{name}:Q", format=".3g") for name in names]
    by_role: dict[str, Any] = {"detail": f"{SERIES}:N"} if chart.by_role else {}
    bar = {"opacity": 0.35, "strokeWidth": 4, "style": "faint", "clip": True}
    line = {"strokeWidth": 1, "style": "faint", "opacity": 0.7, "clip": True}
    dashed = {"strokeDash": [5, 4], "strokeWidth": 1.5, "style": "ink", "clip": True}
    dots = {"size": 42 if len(points) < 120 else 20, "clip": True, "opacity": 1}
    picked = {"color": series_colour(roles), "opacity": focused(0.95, 0.08)}
    layers = layer(bounds, "rule", bar, x=x, y=y("theory_low"), y2="theory_high:Q")
    layers += layer(points, "line", line, x=x, y=y(chart.y, aggregate="mean", axis=axis), **by_role)
    layers += layer(theory, "line", dashed, x=x, y=y("theory"), **by_role)
    layers += layer(points, "circle", dots, x=x, y=y(chart.y, axis=axis), tooltip=tooltip, **picked)
    return finish(layers, HEIGHT)


def _with(frame: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return the rows that have a value in a column; none if there is no such column."""
    if column not in frame.columns:
        return frame.clear()
    return frame.filter(pl.col(column).is_not_null())


def heat_map(frame: pl.DataFrame, chart: HeatMap) -> Drawn:
    """Draw the shares ``value`` of branch ``on`` (-1: the input) in the output of sublayer ``of``, light to
    dark.

    Deep stacks are drawn in groups: shares of the branches of a group are added, those of sublayers averaged.
    """
    if frame.is_empty():
        return finish([], HEIGHT)
    deepest = int(_largest(frame["of"])) + 1
    size = math.ceil(deepest / CELLS)
    top, axis = deepest + 0.5, _whole_numbers(deepest)
    down = alt.Scale(domain=[0.5, top], nice=False, reverse=True)
    share = alt.Tooltip("value:Q", title="share", format=".3f")
    cells = layer(
        _grouped(frame, size),
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


def _grouped(frame: pl.DataFrame, size: int) -> pl.DataFrame:
    """Return the cells of a heat map, with their corners, in groups of so many sublayers and branches."""
    input_or_group = pl.when(pl.col("on") < 0).then(-1).otherwise(pl.col("on") // size)
    return (
        frame.with_columns(of_group=pl.col("of") // size, on_group=input_or_group)
        .group_by("of_group", "of", "on_group")
        .agg(pl.col("value").sum())
        .group_by("of_group", "on_group")
        .agg(pl.col("value").mean())
        .with_columns(x=pl.col("on_group") * size + 0.5, y=pl.col("of_group") * size + 0.5)
        .with_columns(x2=pl.col("x") + size, y2=pl.col("y") + size)
        .sort("y", "x")
        .drop("of_group", "on_group")
    )


def growth(changes: pl.DataFrame, fits: pl.DataFrame) -> Drawn:
    """Draw the output change at every depth, a point per seed, and the laws that were fitted to it.

    ``changes``: ``depth``, ``change``, ``SERIES`` (what was changed), ``seed``; ``fits``: ``SERIES``,
    ``law``, ``depth``, ``value``. Both axes are logarithmic: a power of N is a straight line.
    """
    points = changes.filter(has_place("change", log=True))
    if points.is_empty():
        return finish([], HEIGHT)
    scale, axis = log_or_linear(points["change"].to_list(), log=True)

    def y(column: str, **more: Any) -> alt.Y:
        return alt.Y(column, type="quantitative", title="mean square change", scale=scale, **more)

    colours = alt.Scale(domain=list(dict.fromkeys(points[SERIES].to_list())), range="category")
    legend = alt.Legend(orient="top", direction="vertical", symbolType="circle", labelLimit=400)
    shared: dict[str, Any] = {
        "x": _sublayers(int(_largest(points["depth"]))),
        "color": alt.Color(f"{SERIES}:N", scale=colours, title=None, legend=legend),
    }
    tooltip = [alt.Tooltip(f"{SERIES}:N", title="changed"), alt.Tooltip("depth:Q")]
    measured = [*tooltip, alt.Tooltip("change:Q", format=".3g"), alt.Tooltip("seed:Q")]
    dots = {"size": 30, "opacity": 0.7, "clip": True}
    layers = layer(points, "circle", dots, **shared, y=y("change", axis=axis), tooltip=measured)
    laws = fits.filter((pl.col("value") > 0) & pl.col("law").is_in(list(LAWS)))
    laws = laws.with_columns(pl.col("law").replace(LAWS))
    fitted = [*tooltip, alt.Tooltip("law:N"), alt.Tooltip("value:Q", format=".3g")]
    line = {"strokeWidth": 1.5, "clip": True}
    layers += layer(
        laws, "line", line, **shared, y=y("value"), strokeDash=_dash_of_laws(laws), tooltip=fitted
    )
    return finish(layers, HEIGHT)


def _sublayers(deepest: int) -> alt.X:
    """Return a logarithmic axis for the number of sublayers."""
    ticks = [n for n in (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500) if n <= deepest]
    axis = alt.Axis(values=ticks, grid=False, format="d")
    return alt.X("depth:Q", title="sublayers N", scale=alt.Scale(type="log", nice=False), axis=axis)


def _dash_of_laws(laws: pl.DataFrame) -> alt.StrokeDash:
    """Return the dash of each law, named in words; the legend has only those that are drawn."""
    drawn = [words for words in LAWS.values() if words in set(laws["law"])]
    scale = alt.Scale(domain=drawn, range=[list(DASHES[words]) for words in drawn])
    legend = alt.Legend(orient="bottom", symbolType="stroke")
    return alt.StrokeDash("law:N", scale=scale, title=None, legend=legend)


def strips(frame: pl.DataFrame, chart: Strips) -> Drawn:
    """Draw a strip for each category and quantity, with a tick per row.

    ``frame``: ``category``, ``what`` (the quantity), ``label`` and ``value``, which is positive.
    """
    drawable = frame.filter(has_place("value", log=True))
    drawable = drawable.with_columns(row=pl.col("category") + ", " + pl.col("what"))
    scale, axis = log_or_linear(drawable["value"].to_list(), log=True)
    order = _rows_in_order(drawable, chart)
    colours = alt.Scale(domain=list(chart.quantities), range="category")
    ticks = layer(
        drawable,
        "tick",
        {"thickness": 1.5, "size": 13, "opacity": 0.55},
        x=alt.X("value:Q", title=chart.axis, scale=scale, axis=axis),
        y=alt.Y("row:N", sort=order, title=None, axis=alt.Axis(ticks=False, grid=False)),
        color=alt.Color("what:N", scale=colours, title=None),
        tooltip=[alt.Tooltip("label:N"), alt.Tooltip("what:N"), alt.Tooltip("value:Q", format=".3g")],
    )
    return finish(ticks, 20 * len(order) or HEIGHT)


def _rows_in_order(drawable: pl.DataFrame, chart: Strips) -> list[str]:
    """The names of the strips that have a tick: by category, first those that the chart orders."""
    present = set(drawable["row"].to_list())
    ordered = [category.replace("_", "-") for category in chart.order]
    order: list[str] = []
    for category in dict.fromkeys([*ordered, *drawable["category"].to_list()]):
        order += [f"{category}, {quantity}" for quantity in chart.quantities]
    return [row for row in order if row in present]


def _whole_numbers(largest: int, first: int = 1) -> alt.Axis:
    """Return an axis of whole numbers, with a tick at the first and about eight more: at every number, at
    every second, or at multiples of 5, 10, 15 and so on.
    """
    step = max(1, 2 ** round(math.log2(max(1, largest) / 8)))
    if step >= 4:
        step = 5 * max(1, round(step / 5))
    start = first if step == 1 else step
    ticks = sorted({first, *range(start, largest + 1, step)})
    return alt.Axis(values=ticks, grid=False, format="d")


def _tight() -> alt.Scale:
    """Return a scale that ends a few pixels beyond the values."""
    return alt.Scale(nice=False, zero=False, padding=8)


def _largest(column: pl.Series) -> float:
    return max((float(value) for value in column.drop_nulls()), default=0.0)

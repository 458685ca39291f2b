"""The charts of a reproduction: lines, bars and cells, drawn from the rows of its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.errors import UserError
from normlab.papers.artefact import Drawing
from normlab.report.charts.drawing import (
    Drawn,
    downsample,
    finish,
    focused,
    has_place,
    layer,
    log_or_linear,
    recipe_colour,
    recipe_dash,
)

HEIGHT: Final = 240
DOTTED: Final = 60
"""Lines with at most so many points have a dot at each."""
LOW, HIGH = "low", "high"
"""Columns of an interval, which is drawn if it encloses the measured value in every row."""


def colours(drawing: Drawing, frame: pl.DataFrame) -> list[str]:
    """Return the values that have a colour each, in the table's order."""
    if not drawing.colour or drawing.kind == "cells":
        return []
    return list(dict.fromkeys(frame.select(_named(frame, drawing.colour)).to_series()))


def _named(frame: pl.DataFrame, column: str) -> pl.Expr:
    """Return the values in words: numbers with their name, such as ``d_ff 512``."""
    words = pl.col(column).cast(pl.String)
    return pl.lit(f"{column} ") + words if frame[column].dtype.is_numeric() else words


def panels(drawing: Drawing, frame: pl.DataFrame, legend: Sequence[str]) -> dict[str, Drawn]:
    """Return a chart for each value of ``drawing.panel``, all on one scale; without a panel one chart, "".

    ``legend`` gives each colour its place; a page's charts share one. Rows with the same x and colour are
    drawn as their mean, with a band from the lowest to the highest. Numbers that are not finite are left out,
    and on a logarithmic axis those that are not positive.

    Raises UserError naming a column that the table lacks.
    """
    _require_columns(drawing, frame)
    tidy = _tidy(drawing, frame)
    if tidy.is_empty():
        return {"": finish([], HEIGHT)}
    draw = DRAW[drawing.kind]
    ends = _ends_of_values(drawing, tidy)
    return {
        name: draw(drawing, tidy.filter(pl.col("panel") == name), ends, legend)
        for name in dict.fromkeys(tidy["panel"])
    }


def _require_columns(drawing: Drawing, frame: pl.DataFrame) -> None:
    """Raise UserError naming a column that the table lacks."""
    needed = (drawing.x, drawing.y, drawing.colour, drawing.panel, drawing.shade, drawing.theory)
    missing = [name for name in needed if name and name not in frame.columns]
    if missing:
        raise UserError(
            f"the drawing {drawing.title!r} needs {', '.join(missing)} of the table {drawing.table!r}, which "
            f"has {', '.join(frame.columns)}; name one of these"
        )


def _tidy(drawing: Drawing, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the drawn rows and columns, each named after its channel, with ``lower`` and ``upper`` of
    intervals.
    """
    tidy = _channels(drawing, frame)
    if drawing.kind == "cells":
        return tidy.filter(pl.col("shade").is_finite())
    tidy = tidy.filter(has_place("y", log=drawing.log_y))
    if drawing.kind == "line" and tidy["x"].dtype.is_numeric():
        tidy = tidy.filter(has_place("x", log=drawing.log_x))
    if "lower" in tidy.columns and "upper" in tidy.columns and not _encloses(drawing, tidy):
        return tidy.drop("lower", "upper")
    return tidy


def _channels(drawing: Drawing, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the columns that are drawn, under the names of their channels; the table may have intervals."""
    columns = []
    values = {"x": drawing.x, "y": drawing.y, "shade": drawing.shade, "theory": drawing.theory}
    for channel, column in values.items():
        if column:
            columns.append(pl.col(column).alias(channel))
    for channel, column in {"recipe": drawing.colour, "panel": drawing.panel}.items():
        words = _named(frame, column) if column else pl.lit("")
        columns.append(words.alias(channel))
    for channel, column in {"lower": LOW, "upper": HIGH}.items():
        if column in frame.columns:
            columns.append(pl.col(column).alias(channel))
    return frame.select(columns)


def _encloses(drawing: Drawing, tidy: pl.DataFrame) -> bool:
    """Whether the intervals can be drawn, and enclose the value in every row: else they are of something
    else.
    """
    y, lower, upper = tidy["y"], tidy["lower"], tidy["upper"]
    has_place_for_all = not drawing.log_y or bool((lower > 0).all())
    return has_place_for_all and bool(((lower <= y) & (y <= upper)).all())


def _ends_of_values(drawing: Drawing, tidy: pl.DataFrame) -> tuple[float, float]:
    """Return the range of the value axis that all panels share; for cells, that of the shades."""
    if drawing.kind == "cells":
        return _ends(tidy["shade"])
    drawn = []
    for name in ("y", "theory", "lower", "upper"):
        if name in tidy.columns:
            drawn.append(tidy.filter(has_place(name, log=drawing.log_y))[name].cast(pl.Float64))
    low, high = _ends(pl.concat(drawn))
    if drawing.log_y:
        return low / 1.3, high * 1.3
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    if drawing.kind != "bar" and not 0 <= low < 0.5 * high:
        return low - pad, high + pad
    return (low - pad if low < 0 else 0.0), (high + pad if high > 0 else 0.0)


def _ends(column: pl.Series) -> tuple[float, float]:
    values = column.cast(pl.Float64).to_list()
    return min(values), max(values)


def _lines(drawing: Drawing, part: pl.DataFrame, ends: Sequence[float], legend: Sequence[str]) -> Drawn:
    """Return a line for each colour, with a band or, if points are few, a rule over what is averaged."""
    points = _means(part)
    scale, axis = log_or_linear(ends, log=drawing.log_y, fixed=True)
    x = _across(drawing, part)

    def y(column: str) -> alt.Y:
        return alt.Y(column, type="quantitative", title=drawing.y_title, scale=scale, axis=axis)

    shared: dict[str, Any] = {"x": x, "color": recipe_colour(legend or [""])}
    layers: list[Any] = []
    if bool((points["low"] < points["high"]).any()):
        few = len(points) <= DOTTED
        mark, style = ("rule", {"strokeWidth": 1.5}) if few else ("area", {"strokeWidth": 0})
        opacity = _opacity(drawing, 0.5 if few else 0.2)
        layers += layer(points, mark, style, **shared, y=y("low"), y2="high:Q", opacity=opacity)
    shared |= {"y": y("mean"), "opacity": _opacity(drawing, 0.95)}
    has_dashes = drawing.colour and not drawing.theory  # a dashed line would be taken for the theory's
    dash = {"strokeDash": recipe_dash(legend)} if has_dashes else {}
    layers += layer(points, "line", {"clip": True}, **shared, **dash)
    if len(points) <= DOTTED * max(1, points["recipe"].n_unique()):
        dot = {"size": 34, "clip": True}
        layers += layer(points, "circle", dot, **shared, tooltip=_tooltip(drawing))
    if drawing.theory:
        layers += _theory(drawing, part, x, y("mean"))
    return finish(layers, HEIGHT)


def _theory(drawing: Drawing, part: pl.DataFrame, x: alt.X, y: alt.Y) -> list[Any]:
    """Return a thin dashed line for each colour, or a single one if all are the same."""
    points = _means(part.filter(has_place("theory", log=drawing.log_y)), y="theory")
    is_common = points.group_by("x").agg(pl.col("mean").n_unique() == 1)["mean"].all()
    dashed = {"strokeDash": [3, 3], "strokeWidth": 1.3, "style": "ink", "clip": True}
    tooltip = [alt.Tooltip("mean:Q", title="theory", format=".4g")]
    by_colour = {} if is_common else {"detail": "recipe:N"}
    return layer(points, "line", dashed, x=x, y=y, tooltip=tooltip, **by_colour)


def _means(part: pl.DataFrame, y: str = "y") -> pl.DataFrame:
    """Return columns x, recipe, mean, low and high: at most 400 points per line, intervals as given."""
    interval = ("lower", "upper") if "lower" in part.columns and y == "y" else ()
    if part["x"].dtype.is_numeric():
        means = downsample(part, "x", y, ["recipe"], keep=interval)
    else:
        value = pl.col(y)
        means = part.group_by("x", "recipe", maintain_order=True).agg(
            *[pl.col(name).last() for name in interval], mean=value.mean(), low=value.min(), high=value.max()
        )
    if interval:
        means = means.with_columns(low=pl.col("lower"), high=pl.col("upper"))
    return means.select("x", "recipe", "mean", "low", "high")


def _across(drawing: Drawing, part: pl.DataFrame) -> alt.X:
    """Return the horizontal axis: words in the table's order, or numbers."""
    if not part["x"].dtype.is_numeric():
        order = list(dict.fromkeys(part["x"]))
        return alt.X("x:N", title=drawing.x_title, sort=order, axis=alt.Axis(grid=False, labelAngle=-30))
    low, high = _ends(part["x"])
    if drawing.log_x:
        scale, axis = log_or_linear((low / 1.05, high * 1.05), log=True, fixed=True)
        return alt.X("x:Q", title=drawing.x_title, scale=scale, axis=axis)
    least_step = 1 if part["x"].dtype.is_integer() else alt.Undefined
    axis = alt.Axis(grid=False, tickCount=6, tickMinStep=least_step)
    scale = alt.Scale(nice=False, zero=False, padding=8)
    return alt.X("x:Q", title=drawing.x_title, scale=scale, axis=axis)


def _bars(drawing: Drawing, part: pl.DataFrame, ends: Sequence[float], legend: Sequence[str]) -> Drawn:
    """Return horizontal bars, so that their names can be read."""
    bars = _means(part.with_columns(pl.col("x").cast(pl.String)))
    bars = bars.with_columns(foot=pl.lit(ends[0] if drawing.log_y else 0.0))
    scale, axis = log_or_linear(ends, log=drawing.log_y, fixed=True)

    def x(column: str) -> alt.X:
        return alt.X(column, type="quantitative", title=drawing.y_title, scale=scale, axis=axis)

    names = list(dict.fromkeys(bars["x"]))
    y = alt.Y("x:N", sort=names, title=drawing.x_title, axis=alt.Axis(ticks=False, grid=False))
    shared: dict[str, Any] = {"y": y}
    bars_a_name = 1
    if len(bars) > len(names):
        colours_here = [name for name in legend if name in set(bars["recipe"])]
        shared["yOffset"] = alt.YOffset("recipe:N", sort=colours_here)
        bars_a_name = len(colours_here)
    colour, opacity = recipe_colour(legend or [""]), _opacity(drawing, 0.8)
    layers = layer(
        bars,
        "bar",
        {"clip": True},
        **shared,
        x=x("mean"),
        x2="foot:Q",
        tooltip=_tooltip(drawing),
        color=colour,
        opacity=opacity,
    )
    if bool((bars["low"] < bars["high"]).any()):
        layers += layer(bars, "rule", {"style": "ink", "strokeWidth": 1.3}, **shared, x=x("low"), x2="high:Q")
    return finish(layers, 40 + len(names) * (12 + 14 * bars_a_name))


def _cells(drawing: Drawing, part: pl.DataFrame, ends: Sequence[float], legend: Sequence[str]) -> Drawn:
    """Return a heat map, which has a legend of its own."""
    scale = alt.Scale(range="heatmap", domain=list(ends))
    bar = alt.Legend(orient="top", gradientLength=160, gradientThickness=8)
    axis = alt.Axis(grid=False, ticks=False, labelAngle=0, labelOverlap=True)
    tooltip = [
        alt.Tooltip("x:N", title=drawing.x_title),
        alt.Tooltip("y:N", title=drawing.y_title),
        alt.Tooltip("shade:Q", title=drawing.shade, format=".3g"),
    ]
    cells = layer(
        part.select("x", "y", "shade"),
        "rect",
        {"strokeWidth": 0},
        x=alt.X("x:O", title=drawing.x_title, axis=axis, sort=_order(part["x"])),
        y=alt.Y("y:O", title=drawing.y_title, axis=axis, sort=_order(part["y"])),
        color=alt.Color("shade:Q", scale=scale, title=None, legend=bar),
        tooltip=tooltip,
    )
    return finish(cells, 320)


DRAW: Final[Mapping[str, Callable[[Drawing, pl.DataFrame, Sequence[float], Sequence[str]], Drawn]]] = {
    "line": _lines,
    "bar": _bars,
    "cells": _cells,
}
"""What draws each kind of drawing: from its rows of one panel, the ends of the value axis and the legend."""


def _order(column: pl.Series) -> list[Any] | str:
    return "ascending" if column.dtype.is_numeric() else list(dict.fromkeys(column))


def _opacity(drawing: Drawing, full: float) -> Any:
    return focused(full) if drawing.colour else alt.value(full)


def _tooltip(drawing: Drawing) -> list[alt.Tooltip]:
    tooltip = [alt.Tooltip("recipe:N", title=drawing.colour)] if drawing.colour else []
    tooltip.append(alt.Tooltip("x:N", title=drawing.x_title))
    tooltip.append(alt.Tooltip("mean:Q", title=drawing.y_title, format=".4g"))
    return tooltip

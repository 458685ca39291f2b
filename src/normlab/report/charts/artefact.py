"""The charts of a reproduction: lines, bars and cells, drawn from the rows of its tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
    wanted = (drawing.x, drawing.y, drawing.colour, drawing.panel, drawing.shade, drawing.theory)
    missing = [name for name in wanted if name and name not in frame.columns]
    if missing:
        raise UserError(
            f"the drawing {drawing.title!r} needs {', '.join(missing)} of the table {drawing.table!r}, which "
            f"has {', '.join(frame.columns)}; name one of these"
        )
    tidy = _tidy(drawing, frame)
    if tidy.is_empty():
        return {"": finish([], HEIGHT)}
    draw = {"line": _lines, "bar": _bars, "cells": _cells}[drawing.kind]
    values = _values(drawing, tidy)
    return {
        name: draw(drawing, tidy.filter(pl.col("panel") == name), values, legend)
        for name in dict.fromkeys(tidy["panel"])
    }


def _tidy(drawing: Drawing, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the drawn columns, each named after its channel, with ``lower`` and ``upper`` of intervals."""
    wanted = {"x": drawing.x, "y": drawing.y, "shade": drawing.shade, "theory": drawing.theory}
    told = {"recipe": drawing.colour, "panel": drawing.panel}
    shown = frame.select(
        *(pl.col(column).alias(place) for place, column in wanted.items() if column),
        *((_named(frame, c) if c else pl.lit("")).alias(place) for place, c in told.items()),
        *(pl.col(c).alias(n) for c, n in ((LOW, "lower"), (HIGH, "upper")) if c in frame.columns),
    )
    if drawing.kind == "cells":
        return shown.filter(pl.col("shade").is_finite())
    shown = shown.filter(has_place("y", log=drawing.log_y))
    if drawing.kind == "line" and shown["x"].dtype.is_numeric():
        shown = shown.filter(has_place("x", log=drawing.log_x))
    if not {"lower", "upper"} <= set(shown.columns):
        return shown
    enclosed = shown.select((pl.col("lower") <= pl.col("y")) & (pl.col("y") <= pl.col("upper"))).to_series()
    positive = not drawing.log_y or bool((shown["lower"] > 0).all())
    return shown if enclosed.all() and positive else shown.drop("lower", "upper")


def _values(drawing: Drawing, tidy: pl.DataFrame) -> tuple[float, float]:
    """Return the range of the value axis that all panels share; for cells, that of the shades."""
    if drawing.kind == "cells":
        return _ends(tidy["shade"])
    columns = [c for c in ("y", "theory", "lower", "upper") if c in tidy.columns]
    drawn = pl.concat([tidy.filter(has_place(c, log=drawing.log_y))[c].cast(pl.Float64) for c in columns])
    low, high = _ends(drawn)
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
    drawn = _means(part)
    scale, axis = log_or_linear(ends, log=drawing.log_y, fixed=True)
    x = _across(drawing, part)
    own, few = partial(layer, drawn, x=x, color=recipe_colour(legend or [""])), len(drawn) <= DOTTED
    y = partial(alt.Y, type="quantitative", title=drawing.y_title, scale=scale, axis=axis)
    layers: list[Any] = []
    if bool((drawn["low"] < drawn["high"]).any()):
        mark, style = ("rule", {"strokeWidth": 1.5}) if few else ("area", {"strokeWidth": 0})
        layers += own(mark, style, y=y("low"), y2="high:Q", opacity=_opacity(drawing, 0.5 if few else 0.2))
    strong = {"y": y("mean"), "opacity": _opacity(drawing, 0.95)}
    dashes = drawing.colour and not drawing.theory  # a dashed line would be taken for the theory's
    layers += own("line", {"clip": True}, **strong, **({"strokeDash": recipe_dash(legend)} if dashes else {}))
    if len(drawn) <= DOTTED * max(1, drawn["recipe"].n_unique()):
        layers += own("circle", {"size": 34, "clip": True}, **strong, tooltip=_told(drawing))
    if drawing.theory:
        layers += _theory(drawing, part, x, y("mean"))
    return finish(layers, HEIGHT)


def _theory(drawing: Drawing, part: pl.DataFrame, x: alt.X, y: alt.Y) -> list[Any]:
    """Return a thin dashed line for each colour, or a single one if all are the same."""
    given = _means(part.filter(has_place("theory", log=drawing.log_y)), y="theory")
    one = given.group_by("x").agg(pl.col("mean").n_unique() == 1)["mean"].all()
    dashed = {"strokeDash": [3, 3], "strokeWidth": 1.3, "style": "ink", "clip": True}
    told = [alt.Tooltip("mean:Q", title="theory", format=".4g")]
    return layer(given, "line", dashed, x=x, y=y, tooltip=told, **({} if one else {"detail": "recipe:N"}))


def _means(part: pl.DataFrame, y: str = "y") -> pl.DataFrame:
    """Return columns x, recipe, mean, low and high: at most 400 points per line, intervals as given."""
    interval = ("lower", "upper") if "lower" in part.columns and y == "y" else ()
    if part["x"].dtype.is_numeric():
        found = downsample(part, "x", y, ["recipe"], keep=interval)
    else:
        value = pl.col(y)
        found = part.group_by("x", "recipe", maintain_order=True).agg(
            *[pl.col(name).last() for name in interval], mean=value.mean(), low=value.min(), high=value.max()
        )
    if interval:
        found = found.with_columns(low=pl.col("lower"), high=pl.col("upper"))
    return found.select("x", "recipe", "mean", "low", "high")


def _across(drawing: Drawing, part: pl.DataFrame) -> alt.X:
    if not part["x"].dtype.is_numeric():
        order = list(dict.fromkeys(part["x"]))
        return alt.X("x:N", title=drawing.x_title, sort=order, axis=alt.Axis(grid=False, labelAngle=-30))
    low, high = _ends(part["x"])
    if drawing.log_x:
        scale, axis = log_or_linear((low / 1.05, high * 1.05), log=True, fixed=True)
        return alt.X("x:Q", title=drawing.x_title, scale=scale, axis=axis)
    axis = alt.Axis(grid=False, tickCount=6, tickMinStep=1 if part["x"].dtype.is_integer() else alt.Undefined)
    scale = alt.Scale(nice=False, zero=False, padding=8)
    return alt.X("x:Q", title=drawing.x_title, scale=scale, axis=axis)


def _bars(drawing: Drawing, part: pl.DataFrame, ends: Sequence[float], legend: Sequence[str]) -> Drawn:
    """Return horizontal bars, so that their names can be read."""
    scale, axis = log_or_linear(ends, log=drawing.log_y, fixed=True)
    drawn = _means(part.with_columns(pl.col("x").cast(pl.String)))
    order = list(dict.fromkeys(drawn["x"]))
    colours = [name for name in legend if name in set(drawn["recipe"])]
    y = alt.Y("x:N", sort=order, title=drawing.x_title, axis=alt.Axis(ticks=False, grid=False))
    several = len(drawn) > len(order)
    apart = {"yOffset": alt.YOffset("recipe:N", sort=colours)} if several else {}
    foot = drawn.with_columns(foot=pl.lit(ends[0] if drawing.log_y else 0.0))
    own = partial(layer, foot, y=y, **apart)
    x = partial(alt.X, type="quantitative", title=drawing.y_title, scale=scale, axis=axis)
    shown = {"color": recipe_colour(legend or [""]), "opacity": _opacity(drawing, 0.8)}
    layers = own("bar", {"clip": True}, x=x("mean"), x2="foot:Q", tooltip=_told(drawing), **shown)
    if bool((drawn["low"] < drawn["high"]).any()):
        layers += own("rule", {"style": "ink", "strokeWidth": 1.3}, x=x("low"), x2="high:Q")
    return finish(layers, 40 + len(order) * (12 + 14 * (len(colours) if several else 1)))


def _cells(drawing: Drawing, part: pl.DataFrame, ends: Sequence[float], legend: Sequence[str]) -> Drawn:
    scale = alt.Scale(range="heatmap", domain=list(ends))
    bar = alt.Legend(orient="top", gradientLength=160, gradientThickness=8)
    axis = alt.Axis(grid=False, ticks=False, labelAngle=0, labelOverlap=True)
    told = [alt.Tooltip("x:N", title=drawing.x_title), alt.Tooltip("y:N", title=drawing.y_title)]
    cells = layer(
        part.select("x", "y", "shade"),
        "rect",
        {"strokeWidth": 0},
        x=alt.X("x:O", title=drawing.x_title, axis=axis, sort=_order(part["x"])),
        y=alt.Y("y:O", title=drawing.y_title, axis=axis, sort=_order(part["y"])),
        color=alt.Color("shade:Q", scale=scale, title=None, legend=bar),
        tooltip=[*told, alt.Tooltip("shade:Q", title=drawing.shade, format=".3g")],
    )
    return finish(cells, 320)


def _order(column: pl.Series) -> list[Any] | str:
    return "ascending" if column.dtype.is_numeric() else list(dict.fromkeys(column))


def _opacity(drawing: Drawing, full: float) -> Any:
    return focused(full) if drawing.colour else alt.value(full)


def _told(drawing: Drawing) -> list[alt.Tooltip]:
    told = [alt.Tooltip("recipe:N", title=drawing.colour)] if drawing.colour else []
    value = alt.Tooltip("mean:Q", title=drawing.y_title, format=".4g")
    return [*told, alt.Tooltip("x:N", title=drawing.x_title), value]

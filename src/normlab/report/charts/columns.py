"""Charts of the columns of any table: lines, bars and cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import altair as alt
import polars as pl

from normlab.base.chart import Bars, Cells, Lines
from normlab.report.charts.drawing import (
    Drawn,
    downsample,
    finish,
    focused,
    has_place,
    layer,
    log_or_linear,
    series_colour,
    series_dash,
)
from normlab.report.charts.theme import SERIES

HEIGHT: Final = 240
DOTTED: Final = 60
"""Lines with at most so many points have a dot at each."""
OfColumns = Lines | Bars | Cells
"""What is drawn here."""


def panels(drawing: OfColumns, points: pl.DataFrame, legend: Sequence[str]) -> dict[str, Drawn]:
    """Return a chart for each value in the column ``panel``, all on one scale.

    Points with the same x and group are drawn as their mean, with a band from the lowest to the highest.

    Args:
        drawing: what is shown.
        points: the columns ``x``, ``y``, ``SERIES`` (the group) and ``panel``, and if the drawing has any
            ``shade`` (of cells), ``theory``, ``lower`` and ``upper``.
        legend: the groups that the page's legend explains, in the order of their colours. If a group is
            missing there, the chart has a legend of its own.
    """
    draw = DRAW[type(drawing)]
    if not _encloses(drawing, points):
        points = points.drop("lower", "upper", strict=False)
    ends = _ends_of_values(drawing, points)
    groups = _Groups.of(points, legend)
    return {
        panel: draw(drawing, points.filter(pl.col("panel") == panel), ends, groups)
        for panel in dict.fromkeys(points["panel"])
    }


@dataclass(frozen=True)
class _Groups:
    """What the colours of a chart mean."""

    names: Sequence[str]
    """The groups in the order of their colours: those of the whole page if its legend explains them."""
    on_page: bool
    """Whether the page's legend explains them, and dims all but the one in focus."""

    @classmethod
    def of(cls, points: pl.DataFrame, legend: Sequence[str]) -> Self:
        present = [name for name in dict.fromkeys(points[SERIES]) if name]
        if set(present) <= set(legend):
            return cls(legend or [""], on_page=True)
        return cls(present, on_page=False)

    def colour(self) -> alt.Color:
        colour = series_colour(self.names)
        return colour if self.on_page else colour.legend(self._legend())

    def dash(self) -> alt.StrokeDash:
        dash = series_dash(self.names)
        return dash if self.on_page else dash.legend(self._legend())

    def opacity(self, drawing: OfColumns, full: float) -> Any:
        is_dimmed = self.on_page and not isinstance(drawing, Cells) and drawing.group
        return focused(full) if is_dimmed else alt.value(full)

    @staticmethod
    def _legend() -> alt.Legend:
        return alt.Legend(orient="top", title=None, symbolType="stroke")


def _encloses(drawing: OfColumns, tidy: pl.DataFrame) -> bool:
    """Whether there are intervals to draw: in every row they fit on the axis and enclose the value.

    Columns of these names that do not enclose the value hold something else.
    """
    if isinstance(drawing, Cells) or "lower" not in tidy.columns:
        return False
    y, lower, upper = tidy["y"], tidy["lower"], tidy["upper"]
    has_place_for_all = not drawing.log_y or bool((lower > 0).all())
    return has_place_for_all and bool(((lower <= y) & (y <= upper)).all())


def _ends_of_values(drawing: OfColumns, tidy: pl.DataFrame) -> tuple[float, float]:
    """Return the range of the value axis that all panels share; for cells, that of the shades."""
    if isinstance(drawing, Cells):
        return _ends(tidy["shade"])
    drawn = []
    for name in ("y", "theory", "lower", "upper"):
        if name in tidy.columns:
            drawn.append(tidy.filter(has_place(name, log=drawing.log_y))[name].cast(pl.Float64))
    low, high = _ends(pl.concat(drawn))
    if drawing.log_y:
        return low / 1.3, high * 1.3
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    if not isinstance(drawing, Bars) and not 0 <= low < 0.5 * high:
        return low - pad, high + pad
    return (low - pad if low < 0 else 0.0), (high + pad if high > 0 else 0.0)


def _ends(column: pl.Series) -> tuple[float, float]:
    values = column.cast(pl.Float64).to_list()
    return min(values), max(values)


def _lines(drawing: Lines, part: pl.DataFrame, ends: Sequence[float], groups: _Groups) -> Drawn:
    """Return a line for each colour, with a band or, if points are few, a rule over what is averaged."""
    points = _means(part)
    scale, axis = log_or_linear(ends, log=drawing.log_y, fixed=True)
    x = _across(drawing, part)

    def y(column: str) -> alt.Y:
        return alt.Y(column, type="quantitative", title=drawing.y_axis, scale=scale, axis=axis)

    shared: dict[str, Any] = {"x": x, "color": groups.colour()}
    layers: list[Any] = []
    if bool((points["low"] < points["high"]).any()):
        few = len(points) <= DOTTED
        mark, style = ("rule", {"strokeWidth": 1.5}) if few else ("area", {"strokeWidth": 0})
        opacity = groups.opacity(drawing, 0.5 if few else 0.2)
        layers += layer(points, mark, style, **shared, y=y("low"), y2="high:Q", opacity=opacity)
    shared |= {"y": y("mean"), "opacity": groups.opacity(drawing, 0.95)}
    has_dashes = drawing.group and not drawing.theory  # a dashed line would be taken for the theory's
    dash = {"strokeDash": groups.dash()} if has_dashes else {}
    layers += layer(points, "line", {"clip": True}, **shared, **dash)
    if len(points) <= DOTTED * max(1, points[SERIES].n_unique()):
        dot = {"size": 34, "clip": True}
        layers += layer(points, "circle", dot, **shared, tooltip=_tooltip(drawing))
    if drawing.theory:
        layers += _theory(drawing, part, x, y("mean"))
    return finish(layers, HEIGHT)


def _theory(drawing: Lines, part: pl.DataFrame, x: alt.X, y: alt.Y) -> list[Any]:
    """Return a thin dashed line for each colour, or a single one if all are the same."""
    points = _means(part.filter(has_place("theory", log=drawing.log_y)), y="theory")
    is_common = points.group_by("x").agg(pl.col("mean").n_unique() == 1)["mean"].all()
    dashed = {"strokeDash": [3, 3], "strokeWidth": 1.3, "style": "ink", "clip": True}
    tooltip = [alt.Tooltip("mean:Q", title="theory", format=".4g")]
    by_colour = {} if is_common else {"detail": f"{SERIES}:N"}
    return layer(points, "line", dashed, x=x, y=y, tooltip=tooltip, **by_colour)


def _means(part: pl.DataFrame, y: str = "y") -> pl.DataFrame:
    """Return columns x, SERIES, mean, low and high: at most 400 points per line, intervals as given."""
    interval = ("lower", "upper") if "lower" in part.columns and y == "y" else ()
    if part["x"].dtype.is_numeric():
        means = downsample(part, "x", y, [SERIES], keep=interval)
    else:
        value = pl.col(y)
        means = part.group_by("x", SERIES, maintain_order=True).agg(
            *[pl.col(name).last() for name in interval], mean=value.mean(), low=value.min(), high=value.max()
        )
    if interval:
        means = means.with_columns(low=pl.col("lower"), high=pl.col("upper"))
    return means.select("x", SERIES, "mean", "low", "high")


def _across(drawing: Lines, part: pl.DataFrame) -> alt.X:
    """Return the horizontal axis: words in the table's order, or numbers."""
    if not part["x"].dtype.is_numeric():
        order = list(dict.fromkeys(part["x"]))
        return alt.X("x:N", title=drawing.x_axis, sort=order, axis=alt.Axis(grid=False, labelAngle=-30))
    low, high = _ends(part["x"])
    if drawing.log_x:
        scale, axis = log_or_linear((low / 1.05, high * 1.05), log=True, fixed=True)
        return alt.X("x:Q", title=drawing.x_axis, scale=scale, axis=axis)
    least_step = 1 if part["x"].dtype.is_integer() else alt.Undefined
    axis = alt.Axis(grid=False, tickCount=6, tickMinStep=least_step)
    scale = alt.Scale(nice=False, zero=False, padding=8)
    return alt.X("x:Q", title=drawing.x_axis, scale=scale, axis=axis)


def _bars(drawing: Bars, part: pl.DataFrame, ends: Sequence[float], groups: _Groups) -> Drawn:
    """Return horizontal bars, so that their names can be read."""
    bars = _means(part.with_columns(pl.col("x").cast(pl.String)))
    bars = bars.with_columns(foot=pl.lit(ends[0] if drawing.log_y else 0.0))
    scale, axis = log_or_linear(ends, log=drawing.log_y, fixed=True)

    def x(column: str) -> alt.X:
        return alt.X(column, type="quantitative", title=drawing.y_axis, scale=scale, axis=axis)

    names = list(dict.fromkeys(bars["x"]))
    y = alt.Y("x:N", sort=names, title=drawing.x_axis, axis=alt.Axis(ticks=False, grid=False))
    shared: dict[str, Any] = {"y": y}
    bars_a_name = 1
    if len(bars) > len(names):
        colours_here = [name for name in groups.names if name in set(bars[SERIES])]
        shared["yOffset"] = alt.YOffset(f"{SERIES}:N", sort=colours_here)
        bars_a_name = len(colours_here)
    layers = layer(
        bars,
        "bar",
        {"clip": True},
        **shared,
        x=x("mean"),
        x2="foot:Q",
        tooltip=_tooltip(drawing),
        color=groups.colour(),
        opacity=groups.opacity(drawing, 0.8),
    )
    if bool((bars["low"] < bars["high"]).any()):
        layers += layer(bars, "rule", {"style": "ink", "strokeWidth": 1.3}, **shared, x=x("low"), x2="high:Q")
    return finish(layers, 40 + len(names) * (12 + 14 * bars_a_name))


def _cells(drawing: Cells, part: pl.DataFrame, ends: Sequence[float], _: _Groups) -> Drawn:
    """Return a heat map, which has a legend of its own."""
    scale = alt.Scale(range="heatmap", domain=list(ends))
    bar = alt.Legend(orient="top", gradientLength=160, gradientThickness=8)
    axis = alt.Axis(grid=False, ticks=False, labelAngle=0, labelOverlap=True)
    tooltip = [
        alt.Tooltip("x:N", title=drawing.x_axis),
        alt.Tooltip("y:N", title=drawing.y_axis),
        alt.Tooltip("shade:Q", title=drawing.value, format=".3g"),
    ]
    cells = layer(
        part.select("x", "y", "shade"),
        "rect",
        {"strokeWidth": 0},
        x=alt.X("x:O", title=drawing.x_axis, axis=axis, sort=_order(part["x"])),
        y=alt.Y("y:O", title=drawing.y_axis, axis=axis, sort=_order(part["y"])),
        color=alt.Color("shade:Q", scale=scale, title=None, legend=bar),
        tooltip=tooltip,
    )
    return finish(cells, 320)


DRAW: Final[Mapping[type[OfColumns], Callable[[Any, pl.DataFrame, Sequence[float], _Groups], Drawn]]] = {
    Lines: _lines,
    Bars: _bars,
    Cells: _cells,
}
"""What draws each kind: from its points of one panel, the ends of the value axis and the groups."""


def _order(column: pl.Series) -> list[Any] | str:
    return "ascending" if column.dtype.is_numeric() else list(dict.fromkeys(column))


def _tooltip(drawing: Lines | Bars) -> list[alt.Tooltip]:
    tooltip = [alt.Tooltip(f"{SERIES}:N", title=drawing.group)] if drawing.group else []
    tooltip.append(alt.Tooltip("x:N", title=drawing.x_axis))
    tooltip.append(alt.Tooltip("mean:Q", title=drawing.y_axis, format=".4g"))
    return tooltip

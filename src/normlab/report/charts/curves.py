"""The chart of curves over training steps, or over what the steps took.

Frames of curves have one row per point: ``SERIES``, ``run``, ``seed``, ``outcome``, ``step`` and the value.
The mean and the band are over the runs of a series that trained. A run with another outcome is neither
averaged in nor left out: it has a thin line of its own, with a mark where it ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.base.metric import IGNORES_SOURCE
from normlab.report.charts.drawing import (
    Drawn,
    downsample,
    finish,
    focused,
    has_place,
    layer,
    level,
    log_or_linear,
    outcome_shape,
    series_colour,
    series_dash,
    series_name,
    spread,
)
from normlab.report.charts.theme import ENDED_EARLY, MANY, POINTS, SERIES

ASTRAY: Final = ("stuck", "diverged", IGNORES_SOURCE, "failed", ENDED_EARLY)
"""Outcomes that are drawn run by run instead of being averaged."""

FEW_POINTS: Final = 30
"""Lines with at most so many points show each: between two validations nothing was measured."""


@dataclass(frozen=True)
class CurveAxis:
    """The vertical axis of a curve: its column, title and scale."""

    column: str
    title: str
    log: bool = False
    extremes: bool = False
    """Whether the band shows single spikes, and not only the spread of smoothed curves."""
    zero: bool = False
    """Whether the axis begins at zero instead of a little below the lowest value."""
    number: str = ".2f"
    """d3 format of a value in a tooltip."""
    height: int = 230
    x: str = "step"
    x_title: str = "step"
    x_number: str = "~s"
    """d3 format of the ticks of ``x``."""


@dataclass(frozen=True)
class _Canvas:
    """What all layers of a chart share: the names of its series, its axes, and the top of the picture."""

    series: Sequence[str]
    axis: CurveAxis
    scale: alt.Scale
    ticks: alt.Axis
    top: float
    """The upper end of the vertical axis, above which lines leave the picture; infinite if none may."""

    @property
    def x(self) -> alt.X:
        zero = "datum.value === 0 ? '0' : datum.label"  # d3 would write 0e+0
        steps = alt.Axis(
            format=self.axis.x_number, tickCount=5, grid=False, labelExpr=zero, labelSeparation=6
        )
        return alt.X(f"{self.axis.x}:Q", title=self.axis.x_title, axis=steps)

    def y(self, column: str) -> alt.Y:
        return alt.Y(column, type="quantitative", title=self.axis.title, scale=self.scale, axis=self.ticks)


def mean_curves(
    frame: pl.DataFrame,
    series: Sequence[str],
    axis: CurveAxis,
    *,
    entropy_nats: float | None = None,
    points: int = POINTS,
) -> Drawn:
    """Draw the mean line and band of each series against the step, with the runs that did not train.

    ``entropy_nats`` draws a horizontal line: the loss of a model that knows only token frequencies. A linear
    axis reaches down to it even if all runs stay above it. It ends a little above the highest value of the
    runs that trained and of the starts of all runs, so that a diverging run leaves the picture instead of
    flattening the others; its mark stays at the edge.
    """
    drawable = frame.filter(has_place(axis.column, log=axis.log))
    astray = pl.col("outcome").is_in(ASTRAY)
    trained = spread(drawable.filter(~astray), axis.x, axis.column, points, extremes=axis.extremes)
    by = [SERIES, "run", "seed", "outcome"]
    strays = downsample(drawable.filter(astray), axis.x, axis.column, by, points)
    canvas = _Canvas(series, axis, *_scale(drawable, axis, entropy_nats))
    layers = _means(trained, canvas) + _strays(strays, canvas)
    if entropy_nats is not None and not axis.log and entropy_nats <= canvas.top:
        layers += level(entropy_nats, "unigram entropy", "level:Q")
    if len(trained):
        layers.append(_ruler(trained, canvas))
    return finish(layers, axis.height)


def _scale(
    drawable: pl.DataFrame, axis: CurveAxis, entropy: float | None
) -> tuple[alt.Scale, alt.Axis, float]:
    """The scale of y, which reaches down to ``entropy``, its ticks and its upper end."""
    values, even_ticks = drawable[axis.column].cast(pl.Float64), alt.Axis(tickCount=5)
    if values.is_empty():
        return alt.Scale(type="log" if axis.log else "linear", nice=False), even_ticks, math.inf
    if axis.log:
        _, ticks = log_or_linear(values.to_list(), log=True, fixed=True)
        return alt.Scale(type="log", nice=False), ticks, math.inf
    top = 1.05 * _highest(drawable, axis) or 1.0  # an axis of zeros alone still needs a length
    if axis.zero:
        bottom = 0.0
    else:
        level = top if entropy is None else min(entropy, top)
        bottom = min(float(values.min()), level)  # type: ignore[arg-type]
    domain = [max(0.0, bottom - 0.06 * (top - bottom)), top]
    return alt.Scale(domain=domain, nice=False, zero=False), even_ticks, top


def _highest(drawable: pl.DataFrame, axis: CurveAxis) -> float:
    """The highest value at the start of a run, or of a run that trained."""
    starts = drawable.sort(axis.x).group_by("run").agg(pl.col(axis.column).first())[axis.column]
    trained = drawable.filter(~pl.col("outcome").is_in(ASTRAY))[axis.column]
    highest = (starts.max(), trained.max(), 0.0)
    return max(float(value) for value in highest if isinstance(value, int | float))


def _means(trained: pl.DataFrame, canvas: _Canvas) -> list[Any]:
    """The mean of each series, and the band between its lowest and its highest run."""
    series, many = canvas.series, len(canvas.series) > MANY
    shared: dict[str, Any] = {"x": canvas.x, "color": series_colour(series)}
    layers: list[Any] = []
    if trained.filter(pl.col("high") > pl.col("low")).height:
        if many:
            opacity = focused(0.0, 0.0, alone=0.3)
        else:
            opacity = focused(0.08 if canvas.axis.extremes else 0.16, 0.02, alone=0.3)
        style = {"clip": True, "strokeWidth": 0}
        layers += layer(trained, "area", style, **shared, y=canvas.y("low"), y2="high:Q", opacity=opacity)
    few = trained.height <= FEW_POINTS * len(series)
    dots = alt.OverlayMarkDef(size=8 if many else 22) if few else False
    style = {"clip": True, "point": dots, "strokeWidth": 1 if many else 2}
    dash, opacity = series_dash(series), focused(1.0)
    return layers + layer(
        trained, "line", style, **shared, y=canvas.y("mean"), strokeDash=dash, opacity=opacity
    )


def _strays(strays: pl.DataFrame, canvas: _Canvas) -> list[Any]:
    """A thin line for each run that did not train, and a mark where the line ends.

    A line ends where its run leaves the picture for good, that is, before its second point above the top. A
    single point above it is taken for a spike: the line leaves the picture there and comes back.
    """
    x, top = canvas.axis.x, canvas.top
    points_above = (pl.col("mean") > top).cum_sum().over("run")  # so far, with this point
    # the first point above the top is drawn, so that a line that leaves the picture reaches its edge
    drawn = strays.filter(points_above <= 1)
    ends = drawn.group_by("run", maintain_order=True).last()
    ends = ends.with_columns(mean=pl.min_horizontal("mean", pl.lit(top))).drop("low", "high")
    path = drawn.select(SERIES, "run", x, "mean")
    tooltip = [series_name(), "outcome:N", "seed:N", alt.Tooltip(f"{x}:Q", title=f"last {x} drawn")]
    shared = {"x": canvas.x, "y": canvas.y("mean"), "color": series_colour(canvas.series)}
    lines = layer(
        path,
        "line",
        {"clip": True, "strokeWidth": 1.25},
        **shared,
        strokeDash=series_dash(canvas.series),
        detail="run:N",
        opacity=focused(0.8),
    )
    marks = layer(
        ends,
        "point",
        {"size": 46, "strokeWidth": 1.75},
        **shared,
        opacity=focused(1.0),
        shape=outcome_shape(),
        tooltip=tooltip,
    )
    return lines + marks


def _ruler(trained: pl.DataFrame, canvas: _Canvas) -> Any:
    """Return a vertical line under the pointer; its tooltip lists the value of every series at that step."""
    x = canvas.axis.x
    by_series = trained.pivot(SERIES, index=x, values="mean").sort(x)
    present = [name for name in canvas.series if name in by_series.columns]
    # fields of a tooltip may hold no dots and brackets, and names of series do
    fields = {name: f"v{i}" for i, name in enumerate(present)}
    near = alt.selection_point(nearest=True, on="pointerover", clear="pointerout", fields=[x], empty=False)
    opacity = alt.when(near).then(alt.value(0.6)).otherwise(alt.value(0))
    tooltip = [alt.Tooltip(f"{x}:Q", format=",.4~r")]
    for name, field in fields.items():
        tooltip.append(alt.Tooltip(f"{field}:Q", title=name, format=canvas.axis.number))
    (rule,) = layer(
        by_series.rename(fields), "rule", {"style": "faint"}, x=canvas.x, opacity=opacity, tooltip=tooltip
    )
    return rule.add_params(near)

"""Curves over training steps: one line per recipe, its spread over seeds, and the runs that went wrong.

Frames have one row per point: ``recipe``, ``run``, ``seed``, ``outcome``, ``step`` and the value. The mean
and the band are over runs that trained. A run with another outcome is neither averaged in nor left out: it
has a thin line of its own, with a mark where it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.config.metric import IGNORES_SOURCE
from normlab.report.charts.theme import (
    MANY,
    OUTCOMES,
    POINTS,
    Drawn,
    downsample,
    finish,
    focused,
    log_or_linear,
    nothing,
    recipe_colour,
    recipe_dash,
    recipe_name,
    rows,
    spread,
)

ASTRAY: Final = ("stuck", "diverged", IGNORES_SOURCE, "failed")
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


def curve(
    frame: pl.DataFrame,
    recipes: Sequence[str],
    axis: CurveAxis,
    *,
    entropy_nats: float | None = None,
    points: int = POINTS,
) -> Drawn:
    """Draw the mean line and band of each recipe against the step, with the runs that did not train.

    ``entropy_nats`` draws a horizontal line: the loss of a model that knows only token frequencies. The axis
    reaches down to it, although a stuck run never does. A linear axis ends a little above the highest value
    at the start of a run, so that a diverging run leaves the picture instead of flattening the others; its
    mark stays at the edge.
    """
    shown = frame.filter(pl.col(axis.column).is_finite() & ((pl.col(axis.column) > 0) | pl.lit(not axis.log)))
    astray = pl.col("outcome").is_in(ASTRAY)
    together = spread(shown.filter(~astray), axis.x, axis.column, ["recipe"], points, extremes=axis.extremes)
    by = ["recipe", "run", "seed", "outcome"]
    alone = downsample(shown.filter(astray), axis.x, axis.column, by, points)
    scale, top = _scale(shown, axis, entropy_nats)
    y = partial(alt.Y, type="quantitative", title=axis.title, scale=scale, axis=_ticks(shown, axis))
    zero = "datum.value === 0 ? '0' : datum.label"
    steps = alt.Axis(format=axis.x_number, tickCount=5, grid=False, labelExpr=zero, labelSeparation=6)
    x = alt.X(f"{axis.x}:Q", title=axis.x_title, axis=steps)
    layers: list[Any] = []
    if entropy_nats is not None and not axis.log and entropy_nats <= top:
        layers += _level(entropy_nats, "unigram entropy")
    if len(together):
        layers += _means(together, recipes, axis, x, y)
    if len(alone):
        layers += _strays(alone, recipes, axis, x, y, top)
    if len(together):
        layers.append(_ruler(together, recipes, axis, x))
    return finish(layers, axis.height) if layers else nothing(axis.height)


def _scale(shown: pl.DataFrame, axis: CurveAxis, level: float | None) -> tuple[alt.Scale, float]:
    """The scale of y, which reaches down to ``level``, and its upper end."""
    if axis.log or shown.is_empty():
        return alt.Scale(type="log" if axis.log else "linear", nice=False), float("inf")
    values = shown[axis.column].cast(pl.Float64)
    start = shown.sort(axis.x).group_by("run").agg(pl.col(axis.column).first())[axis.column].max()
    settled = shown.filter(~pl.col("outcome").is_in(ASTRAY))[axis.column].max()
    top = 1.05 * max(float(v) for v in (start, settled, 1e-9) if isinstance(v, int | float))
    bottom = 0.0 if axis.zero else min(float(values.min()), top if level is None else min(level, top))  # type: ignore[arg-type]
    return alt.Scale(domain=[max(0.0, bottom - 0.06 * (top - bottom)), top], nice=False, zero=False), top


def _ticks(shown: pl.DataFrame, axis: CurveAxis) -> alt.Axis:
    if not axis.log or shown.is_empty():
        return alt.Axis(tickCount=5)
    return log_or_linear(shown[axis.column].cast(pl.Float64).to_list(), log=True, fixed=True)[1]


def _means(
    together: pl.DataFrame, recipes: Sequence[str], axis: CurveAxis, x: alt.X, y: partial[alt.Y]
) -> list[Any]:
    base = alt.Chart(rows(together)).encode(x=x, color=recipe_colour(recipes))
    layers: list[Any] = []
    many = len(recipes) > MANY
    band = focused(0.0, 0.0, alone=0.3) if many else focused(0.08 if axis.extremes else 0.16, 0.02, alone=0.3)
    if together.filter(pl.col("high") > pl.col("low")).height:
        layers.append(base.mark_area(clip=True, strokeWidth=0).encode(y=y("low"), y2="high:Q", opacity=band))
    few = together.height <= FEW_POINTS * len(recipes)
    dots = alt.OverlayMarkDef(size=8 if many else 22) if few else False
    mark = base.mark_line(clip=True, point=dots, strokeWidth=1 if many else 2)
    layers.append(mark.encode(y=y("mean"), strokeDash=recipe_dash(recipes), opacity=focused(1.0)))
    return layers


def _strays(
    alone: pl.DataFrame, recipes: Sequence[str], axis: CurveAxis, x: alt.X, y: partial[alt.Y], top: float
) -> list[Any]:
    leaves = (pl.col("mean") > top).cum_sum().over("run")  # above 0 once a line has left the picture
    inside = alone.filter(leaves <= 1)
    ends = inside.group_by("run", maintain_order=True).last()
    ends = ends.with_columns(mean=pl.min_horizontal("mean", pl.lit(top))).drop("low", "high")
    colour, dash = recipe_colour(recipes), recipe_dash(recipes)
    path = rows(inside.select("recipe", "run", axis.x, "mean"))
    line = alt.Chart(path).mark_line(clip=True, strokeWidth=1.25)
    mark = alt.Chart(rows(ends)).mark_point(size=46, strokeWidth=1.75)
    tip = [recipe_name(), "outcome:N", "seed:N", alt.Tooltip(f"{axis.x}:Q", title=f"last {axis.x} drawn")]
    return [
        line.encode(x=x, y=y("mean"), color=colour, strokeDash=dash, detail="run:N", opacity=focused(0.8)),
        mark.encode(x=x, y=y("mean"), color=colour, opacity=focused(1.0), shape=outcome_shape(), tooltip=tip),
    ]


def outcome_shape() -> alt.Shape:
    """Return the marker of each outcome, the same in every chart."""
    scale = alt.Scale(domain=list(OUTCOMES), range=list(OUTCOMES.values()))
    return alt.Shape(field="outcome", type="nominal", legend=None, scale=scale)


def _level(value: float, words: str) -> list[Any]:
    base = alt.Chart(alt.InlineData(values=[{"level": value}])).encode(y="level:Q")
    text = base.mark_text(text=words, align="right", baseline="bottom", dx=-4, dy=-3, style="faint")
    return [base.mark_rule(strokeDash=[2, 3], style="faint", clip=True), text.encode(x=alt.value("width"))]


def _ruler(together: pl.DataFrame, recipes: Sequence[str], axis: CurveAxis, x: alt.X) -> Any:
    """Return a vertical line under the pointer; its tooltip lists every recipe's value at that step."""
    wide = together.pivot("recipe", index=axis.x, values="mean").sort(axis.x)
    names = [name for name in recipes if name in wide.columns]
    plain = {name: f"v{i}" for i, name in enumerate(names)}  # names may hold dots and brackets
    near = alt.selection_point(
        nearest=True, on="pointerover", clear="pointerout", fields=[axis.x], empty=False
    )
    opacity = alt.when(near).then(alt.value(0.6)).otherwise(alt.value(0))
    told = [alt.Tooltip(f"{axis.x}:Q", format=",.4~r")]
    told += [alt.Tooltip(f"{field}:Q", title=name, format=axis.number) for name, field in plain.items()]
    rule = alt.Chart(rows(wide.rename(plain))).mark_rule(style="faint")
    return rule.encode(x=x, opacity=opacity, tooltip=told).add_params(near)

"""Charts of a comparison: curves over training steps, a test score with intervals, the dev score against the
learning rate, and time.

Frames of curves have one row per point: ``recipe``, ``run``, ``seed``, ``outcome``, ``step`` and the value.
The mean and the band are over runs that trained. A run with another outcome is neither averaged in nor left
out: it has a thin line of its own, with a mark where it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.base.metric import IGNORES_SOURCE, Metric
from normlab.report.charts.drawing import (
    Drawn,
    downsample,
    finish,
    focused,
    has_place,
    layer,
    level,
    log_or_linear,
    recipe_colour,
    recipe_dash,
    recipe_name,
    spread,
)
from normlab.report.charts.theme import ENDED_EARLY, MANY, OUTCOMES, POINTS

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
    shown = frame.filter(has_place(axis.column, log=axis.log))
    astray = pl.col("outcome").is_in(ASTRAY)
    together = spread(shown.filter(~astray), axis.x, axis.column, points, extremes=axis.extremes)
    by = ["recipe", "run", "seed", "outcome"]
    alone = downsample(shown.filter(astray), axis.x, axis.column, by, points)
    scale, ticks, top = _scale(shown, axis, entropy_nats)
    y = partial(alt.Y, type="quantitative", title=axis.title, scale=scale, axis=ticks)
    zero = "datum.value === 0 ? '0' : datum.label"
    steps = alt.Axis(format=axis.x_number, tickCount=5, grid=False, labelExpr=zero, labelSeparation=6)
    x = alt.X(f"{axis.x}:Q", title=axis.x_title, axis=steps)
    layers = _means(together, recipes, axis, x, y)
    layers += _strays(alone, recipes, axis, x, y, top)
    if entropy_nats is not None and not axis.log and entropy_nats <= top:
        layers += level(entropy_nats, "unigram entropy", "level:Q")
    if len(together):
        layers.append(_ruler(together, recipes, axis, x))
    return finish(layers, axis.height)


def _scale(shown: pl.DataFrame, axis: CurveAxis, entropy: float | None) -> tuple[alt.Scale, alt.Axis, float]:
    """The scale of y, which reaches down to ``entropy``, its ticks and its upper end."""
    values, even = shown[axis.column].cast(pl.Float64), alt.Axis(tickCount=5)
    if values.is_empty():
        return alt.Scale(type="log" if axis.log else "linear", nice=False), even, float("inf")
    if axis.log:
        ticks = log_or_linear(values.to_list(), log=True, fixed=True)[1]
        return alt.Scale(type="log", nice=False), ticks, float("inf")
    start = shown.sort(axis.x).group_by("run").agg(pl.col(axis.column).first())[axis.column].max()
    settled = shown.filter(~pl.col("outcome").is_in(ASTRAY))[axis.column].max()
    top = 1.05 * max(float(v) for v in (start, settled, 1e-9) if isinstance(v, int | float))
    bottom = 0.0 if axis.zero else min(float(values.min()), top if entropy is None else min(entropy, top))  # type: ignore[arg-type]
    domain = [max(0.0, bottom - 0.06 * (top - bottom)), top]
    return alt.Scale(domain=domain, nice=False, zero=False), even, top


def _means(
    together: pl.DataFrame, recipes: Sequence[str], axis: CurveAxis, x: alt.X, y: partial[alt.Y]
) -> list[Any]:
    own = partial(layer, x=x, color=recipe_colour(recipes))
    many = len(recipes) > MANY
    band = focused(0.0, 0.0, alone=0.3) if many else focused(0.08 if axis.extremes else 0.16, 0.02, alone=0.3)
    layers: list[Any] = []
    if together.filter(pl.col("high") > pl.col("low")).height:
        layers = own(
            together, "area", {"clip": True, "strokeWidth": 0}, y=y("low"), y2="high:Q", opacity=band
        )
    few = together.height <= FEW_POINTS * len(recipes)
    dots = alt.OverlayMarkDef(size=8 if many else 22) if few else False
    line = {"clip": True, "point": dots, "strokeWidth": 1 if many else 2}
    return layers + own(
        together, "line", line, y=y("mean"), strokeDash=recipe_dash(recipes), opacity=focused(1.0)
    )


def _strays(
    alone: pl.DataFrame, recipes: Sequence[str], axis: CurveAxis, x: alt.X, y: partial[alt.Y], top: float
) -> list[Any]:
    leaves = (pl.col("mean") > top).cum_sum().over("run")  # above 0 once a line has left the picture
    inside = alone.filter(leaves <= 1)
    ends = inside.group_by("run", maintain_order=True).last()
    ends = ends.with_columns(mean=pl.min_horizontal("mean", pl.lit(top))).drop("low", "high")
    path = inside.select("recipe", "run", axis.x, "mean")
    tip = [recipe_name(), "outcome:N", "seed:N", alt.Tooltip(f"{axis.x}:Q", title=f"last {axis.x} drawn")]
    own = partial(layer, x=x, y=y("mean"), color=recipe_colour(recipes))
    line, mark = {"clip": True, "strokeWidth": 1.25}, {"size": 46, "strokeWidth": 1.75}
    dash, shape = recipe_dash(recipes), _outcome_shape()
    layers = own(path, "line", line, strokeDash=dash, detail="run:N", opacity=focused(0.8))
    return layers + own(ends, "point", mark, opacity=focused(1.0), shape=shape, tooltip=tip)


def _outcome_shape() -> alt.Shape:
    scale = alt.Scale(domain=list(OUTCOMES), range=list(OUTCOMES.values()))
    return alt.Shape(field="outcome", type="nominal", legend=None, scale=scale)


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
    (rule,) = layer(wide.rename(plain), "rule", {"style": "faint"}, x=x, opacity=opacity, tooltip=told)
    return rule.add_params(near)


ROW = 38
"""Height in px of each recipe's row in a chart of rows."""

FAR = 2.0
"""If the best score is so many times as good, a score is not drawn to scale."""

WIDE = 3.0
"""If the worst dev loss is so many times the best, the axis of the losses is logarithmic."""

REACH = 50.0
"""A dev loss so many times the best stands at the end of the axis instead of stretching it."""


def score_dots(results: pl.DataFrame, seeds: pl.DataFrame, recipes: Sequence[str], metric: Metric) -> Drawn:
    """Draw a test score by recipe, best first: a dot, its 95% interval, and for each seed a tick, or a cross
    if it did not train.

    ``results``: ``recipe``, ``value`` (null: no run trained), ``low``, ``high`` (null: too few did),
    ``note``; ``seeds``: ``recipe``, ``seed``, ``outcome``, ``value``. The axis covers the recipes whose score
    is at least half as good as the best; the others are written at the left edge, so that the differences
    among those that learned can be seen.
    """
    near = results.filter(_near(results["value"], metric))
    edges = [v for c in ("low", "high", "value") for v in near[c].drop_nulls()]
    edges += list(seeds.join(near.select("recipe"), on="recipe", how="inner")["value"])
    low, high = (min(edges), max(edges)) if edges else (0.0, 1.0)
    pad = max(5 * 10.0**-metric.digits, 0.1 * (high - low))
    ends = metric.bounded(low - pad), high + pad
    scale = alt.Scale(domain=list(ends), nice=False, zero=False)
    on, inside = (table.filter(pl.col("value").is_between(*ends)) for table in (results, seeds))
    ticks = inside.join(on.select("recipe"), on="recipe", how="inner")
    order = results.sort("value", descending=metric.higher_is_better, nulls_last=True)["recipe"].to_list()
    y = _by_recipe(order)
    x = alt.X("value:Q", title=f"test {metric.title}, 95% interval", scale=scale, axis=alt.Axis(tickCount=6))
    number = partial(alt.Tooltip, format=f".{metric.digits + 1}f")
    told = [recipe_name(), *(number(f"{c}:Q", title=c) for c in ("value", "low", "high")), "note:N"]
    own = partial(layer, on, y=y, color=recipe_colour(recipes), opacity=focused(1.0, 0.15))
    bar = {"strokeWidth": 3, "strokeCap": "round", "clip": True}
    layers = own("rule", bar, x=alt.X("low:Q", scale=scale), x2="high:Q")
    layers += own("circle", {"size": 120, "opacity": 1}, x=x, tooltip=told)
    value = alt.Text("value:Q", format=f".{metric.digits}f")
    layers += own("text", {"dy": -12, "fontSize": 11, "fontWeight": 600}, x=x, text=value)
    trained = pl.col("outcome").str.starts_with("trained")
    each = [recipe_name(), "seed:N", "outcome:N", number("value:Q", title=metric.label)]
    single = partial(layer, x=x, y=y, color=recipe_colour(recipes), opacity=focused(0.75, 0.1), tooltip=each)
    tick = {"thickness": 1.5, "size": 16, "orient": "vertical", "yOffset": 0}
    layers += single(ticks.filter(trained), "tick", tick)
    layers += single(ticks.filter(~trained), "point", {"shape": "cross", "angle": 45})
    off = results.join(on, on="recipe", how="anti").with_columns(
        words=pl.when(pl.col("value").is_null())
        .then(pl.lit("no seed trained"))
        .otherwise(pl.format("◂ {}", pl.col("value").round(metric.digits)))
        + pl.when(pl.col("note") == "").then(pl.lit("")).otherwise(pl.format(", {}", pl.col("note")))
    )
    left, dim = {"align": "left", "dx": 4, "style": "alarm"}, focused(1.0, 0.15)
    layers += layer(off, "text", left, x=alt.value(0), y=y, text="words:N", opacity=dim)
    return finish(layers, ROW * len(order))


def _near(values: pl.Series, metric: Metric) -> pl.Series:
    """Whether each score is at least half as good as the best one; false if there is no score."""
    best = values.max() if metric.higher_is_better else values.min()
    if not isinstance(best, int | float):
        return values.is_not_null() & False
    near = values >= best / FAR if metric.higher_is_better else values <= best * FAR
    return near.fill_null(False)


def sensitivity(trials: pl.DataFrame, recipes: Sequence[str], lrs: Sequence[float], metric: Metric) -> Drawn:
    """Draw a dev score against the learning rate (log scale), one point per run, one line per recipe.

    ``trials``: ``recipe``, ``lr``, ``dev`` (null: no score), ``outcome``, ``chosen``. Recipes are drawn
    slightly apart, so that points at the same place can be told apart. A run that did not train is a hollow
    mark of its outcome; without a score it stands at the bad end of the axis, and its line has a gap. If
    lower scores are better, a wide axis is logarithmic, and scores above ``REACH`` times the best also stand
    at that end.
    """
    title = f"dev {metric.title}, seed of the sweep"
    trials, worst, scale, ticks = _on_scale(trials, metric)
    width = min((b / a for a, b in pairwise(lrs)), default=2.0) ** 0.22
    gaps = max(1, len(recipes) - 1)
    place = {name: width ** (i / gaps - 0.5) for i, name in enumerate(recipes)}
    shown = trials.with_columns(
        at=pl.col("lr") * pl.col("recipe").replace_strict(place, return_dtype=pl.Float64),
        drawn=pl.col("dev").fill_null(worst),
        score=pl.when(pl.col("dev").is_null())
        .then(pl.lit("none to scale"))
        .otherwise(pl.col("dev").round(metric.digits).cast(pl.String)),
        rate=pl.col("lr").map_elements(lambda v: f"{v:g}", return_dtype=pl.String),
    )
    ends = alt.Scale(type="log", domain=[min(lrs) / width**1.2, max(lrs) * width**1.2], nice=False)
    axis = alt.Axis(values=sorted(lrs), format="~e", grid=True, labelOverlap=False)
    x = alt.X("at:Q", scale=ends, title="learning rate", axis=axis)
    y = alt.Y("drawn:Q", title=title, scale=scale, axis=ticks)
    own = partial(layer, x=x, color=recipe_colour(recipes))
    trained = (pl.col("outcome") == "trained") & pl.col("dev").is_not_null()
    told = [recipe_name(), alt.Tooltip("rate:N", title="learning rate")]
    told += [alt.Tooltip("score:N", title=f"dev {metric.label}"), alt.Tooltip("outcome:N")]
    many = len(recipes) > MANY
    shrunk = 0.3 if many else 1
    line = {"strokeWidth": 1 if many else 1.75, "invalid": "break-paths-show-domains"}
    raw = alt.Y("dev:Q", title=title, scale=scale, axis=ticks)
    layers = own(shown, "line", line, y=raw, strokeDash=recipe_dash(recipes), opacity=focused(0.9))
    for good, some in ((True, shown.filter(trained)), (False, shown.filter(~trained))):
        dot = {"opacity": 1, "filled": good, "size": 60 * shrunk, "strokeWidth": 1.75}
        layers += own(some, "point", dot, y=y, shape=_outcome_shape(), opacity=focused(1.0), tooltip=told)
    ring = {"filled": False, "size": 170 * shrunk, "strokeWidth": 1.5, "shape": "circle"}
    chosen = shown.filter(pl.col("chosen") & trained)
    layers += own(chosen, "point", ring, y=y, opacity=focused(0.9), tooltip=told)
    return finish(layers, 260)


def _on_scale(trials: pl.DataFrame, metric: Metric) -> tuple[pl.DataFrame, float, Any, alt.Axis]:
    """Return the trials, without scores that are out of reach, and the axis's bad end, scale and ticks."""
    if metric.higher_is_better:
        return trials, metric.bounded(0.0), alt.Undefined, alt.Axis(tickCount=5)
    found: list[float] = trials["dev"].drop_nulls().to_list() or [1.0]
    low = min(found)
    shown = [value for value in found if value <= max(REACH * low, low)]
    worst = max(shown)
    if worst > WIDE * low > 0:
        scale, axis = log_or_linear(shown, log=True)
        worst = scale["domain"][1]
    else:
        worst += 0.1 * (worst - low)
        scale = alt.Scale(domain=[low - 0.1 * (worst - low), worst], nice=False, zero=False)
        axis = alt.Axis(tickCount=5)
    return trials.with_columns(dev=pl.when(pl.col("dev") <= worst).then(pl.col("dev"))), worst, scale, axis


def time_bars(results: pl.DataFrame, recipes: Sequence[str]) -> Drawn:
    """Draw the training time of one run at the chosen learning rate (median over seeds), in minutes.

    ``results``: ``recipe``, ``minutes``, ``words`` (the minutes in words), ``note`` (why it was cut short).
    """
    y = _by_recipe(list(recipes))
    most = results["minutes"].max()
    longest = float(most) if isinstance(most, int | float) and most > 0 else 1.0
    scale = alt.Scale(domain=[0, 1.04 * longest], nice=False)
    x = alt.X("minutes:Q", title="minutes", scale=scale, axis=alt.Axis(tickCount=5))
    told = [recipe_name(), alt.Tooltip("words:N", title="one run"), "note:N"]
    bar, label = {"height": 14, "cornerRadiusEnd": 3}, {"align": "left", "dx": 1, "dy": -13, "style": "faint"}
    bold = {"color": recipe_colour(recipes), "opacity": focused(0.9, 0.15)}
    layers = layer(results, "bar", bar, x=x, y=y, tooltip=told, **bold)
    layers += layer(results, "text", label, x=alt.value(0), y=y, text="words:N")
    return finish(layers, ROW * len(recipes))


def _by_recipe(order: list[str]) -> alt.Y:
    """Names down the left side; a long one continues on a second line, after a ``+``, ``/`` or ``:``."""
    lines = r"split(replace(datum.label, /^(?=.{27})(.{1,25}[+\/:])/, '$1\n'), '\n')"
    axis = alt.Axis(ticks=False, domain=False, labelPadding=8, labelFontSize=12, labelExpr=lines)
    return alt.Y("recipe:N", sort=order, title=None, axis=axis)

"""Charts of results: a test score with intervals, the dev score against the learning rate, and time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import altair as alt
import polars as pl

from normlab.config.metric import Metric
from normlab.report.charts.curves import outcome_shape
from normlab.report.charts.theme import (
    MANY,
    Drawn,
    finish,
    focused,
    log_or_linear,
    recipe_colour,
    recipe_dash,
    recipe_name,
    rows,
)

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
    base = alt.Chart(rows(on)).encode(y=y, color=recipe_colour(recipes), opacity=focused(1.0, 0.15))
    x = alt.X("value:Q", title=f"test {metric.title}, 95% interval", scale=scale, axis=alt.Axis(tickCount=6))
    number = partial(alt.Tooltip, format=f".{metric.digits + 1}f")
    values = [number(f"{c}:Q", title=c) for c in ("value", "low", "high")]
    told = [recipe_name(), *values, alt.Tooltip("note:N")]
    left, layers = alt.X("low:Q", scale=scale), list[Any]()
    if len(on):
        layers += [
            base.mark_rule(strokeWidth=3, strokeCap="round", clip=True).encode(x=left, x2="high:Q"),
            base.mark_circle(size=120, opacity=1).encode(x=x, tooltip=told),
            base.mark_text(dy=-12, fontSize=11, fontWeight=600).encode(
                x=x, text=alt.Text("value:Q", format=f".{metric.digits}f")
            ),
        ]
    for trained in (True, False):
        some = ticks.filter(pl.col("outcome").str.starts_with("trained") == trained)
        single = alt.Chart(rows(some)).encode(x=x, y=y, color=recipe_colour(recipes))
        single = single.encode(
            opacity=focused(0.75, 0.1),
            tooltip=[
                recipe_name(),
                *(alt.Tooltip(f"{name}:N") for name in ("seed", "outcome")),
                number("value:Q", title=metric.label),
            ],
        )
        if len(some):
            tick = single.mark_tick(thickness=1.5, size=16, orient="vertical", yOffset=0)
            layers.append(tick if trained else single.mark_point(shape="cross", angle=45))
    off = results.join(on, on="recipe", how="anti").with_columns(
        words=pl.when(pl.col("value").is_null())
        .then(pl.lit("no seed trained"))
        .otherwise(pl.format("◂ {}", pl.col("value").round(metric.digits)))
        + pl.when(pl.col("note") == "").then(pl.lit("")).otherwise(pl.format(", {}", pl.col("note")))
    )
    if len(off):
        text = alt.Chart(rows(off)).mark_text(align="left", dx=4, style="alarm")
        layers.append(text.encode(x=alt.value(0), y=y, text="words:N", opacity=focused(1.0, 0.15)))
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
    colour = recipe_colour(recipes)
    line = alt.Chart(rows(shown)).encode(x=x, color=colour)
    trained = (pl.col("outcome") == "trained") & pl.col("dev").is_not_null()
    told = [recipe_name(), alt.Tooltip("rate:N", title="learning rate")]
    told += [alt.Tooltip("score:N", title=f"dev {metric.label}"), alt.Tooltip("outcome:N")]
    shrunk = 0.3 if len(recipes) > MANY else 1
    layers: list[Any] = [
        line.mark_line(
            strokeWidth=1 if len(recipes) > MANY else 1.75, invalid="break-paths-show-domains"
        ).encode(
            y=alt.Y("dev:Q", title=title, scale=scale, axis=ticks),
            strokeDash=recipe_dash(recipes),
            opacity=focused(0.9),
        )
    ]
    for good in (True, False):
        some = shown.filter(trained if good else ~trained)
        if len(some):
            points = alt.Chart(rows(some)).mark_point(
                opacity=1, filled=good, size=60 * shrunk, strokeWidth=1.75
            )
            points = points.encode(x=x, y=y, color=colour, shape=outcome_shape(), opacity=focused(1.0))
            layers.append(points.encode(tooltip=told))
    chosen = shown.filter(pl.col("chosen") & trained)
    if len(chosen):
        ring = alt.Chart(rows(chosen)).mark_point(
            filled=False, size=170 * shrunk, strokeWidth=1.5, shape="circle"
        )
        layers.append(ring.encode(x=x, y=y, color=colour, opacity=focused(0.9), tooltip=told))
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
    base = alt.Chart(rows(results)).encode(x=x, y=y)
    told = [recipe_name(), alt.Tooltip("words:N", title="one run"), alt.Tooltip("note:N")]
    layers: list[Any] = [
        base.mark_bar(height=14, cornerRadiusEnd=3).encode(
            color=recipe_colour(recipes), opacity=focused(0.9, 0.15), tooltip=told
        ),
        base.mark_text(align="left", dx=1, dy=-13, style="faint").encode(x=alt.value(0), text="words:N"),
    ]
    return finish(layers, ROW * len(recipes))


def _by_recipe(order: list[str]) -> alt.Y:
    """Names down the left side; a long one continues on a second line, after a ``+``, ``/`` or ``:``."""
    lines = r"split(replace(datum.label, /^(?=.{27})(.{1,25}[+\/:])/, '$1\n'), '\n')"
    axis = alt.Axis(ticks=False, domain=False, labelPadding=8, labelFontSize=12, labelExpr=lines)
    return alt.Y("recipe:N", sort=order, title=None, axis=axis)

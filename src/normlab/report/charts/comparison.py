"""Charts of a comparison: a test score with intervals, the dev score against the learning rate, and time.

The series of these charts are recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.base.metric import Metric
from normlab.report.charts.drawing import (
    Drawn,
    finish,
    focused,
    layer,
    log_or_linear,
    outcome_shape,
    series_colour,
    series_dash,
    series_name,
)
from normlab.report.charts.theme import MANY

ROW: Final = 38
"""Height in px of each recipe's row in a chart of rows."""

FAR: Final = 2.0
"""If the best score is so many times as good, a score is not drawn to scale."""

WIDE: Final = 3.0
"""If the worst dev loss is so many times the best, the axis of the losses is logarithmic."""

REACH: Final = 50.0
"""A dev loss more than so many times the best stands at the end of the axis instead of stretching it."""

SPREAD: Final = 0.22
"""Points of different recipes at one learning rate are spread over this share of the distance to the next
rate, measured on a logarithmic axis: enough to tell them apart, and far less than to the next rate."""


# ------------------------------------------------------------------------------------------- test scores


def score_dots(results: pl.DataFrame, seeds: pl.DataFrame, recipes: Sequence[str], metric: Metric) -> Drawn:
    """Draw a test score by recipe, best first: a dot, its 95% interval, and for each seed a tick, or a cross
    if it did not train.

    ``results``: ``recipe``, ``value`` (null: no run trained), ``low``, ``high`` (null: too few did),
    ``note``; ``seeds``: ``recipe``, ``seed``, ``outcome``, ``value``. The axis covers the recipes whose score
    is at least half as good as the best; the others are written at the left edge, so that the differences
    among those that learned can be seen.
    """
    ends = _ends_of_scores(results, seeds, metric)
    scale = alt.Scale(domain=list(ends), nice=False, zero=False)
    x = alt.X("value:Q", title=f"test {metric.title}, 95% interval", scale=scale, axis=alt.Axis(tickCount=6))
    order = results.sort("value", descending=metric.higher_is_better, nulls_last=True)["recipe"].to_list()
    y = _by_recipe(order)
    to_scale = results.filter(pl.col("value").is_between(*ends))
    ticks = seeds.filter(pl.col("value").is_between(*ends))
    ticks = ticks.join(to_scale.select("recipe"), on="recipe", how="inner")
    off_scale = results.join(to_scale, on="recipe", how="anti")
    colour = series_colour(recipes)
    layers = _dots(to_scale, x, y, colour, metric)
    layers += _ticks(ticks, x, y, colour, metric)
    layers += _labels_off_scale(off_scale, y, metric)
    return finish(layers, ROW * len(order))


def _ends_of_scores(results: pl.DataFrame, seeds: pl.DataFrame, metric: Metric) -> tuple[float, float]:
    """The ends of the axis, which holds the scores and intervals of the recipes near the best one."""
    near = results.filter(_near(results["value"], metric))
    values = [value for column in ("low", "high", "value") for value in near[column].drop_nulls()]
    values += seeds.join(near.select("recipe"), on="recipe", how="inner")["value"].to_list()
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    last_digit = 10.0**-metric.digits
    pad = max(5 * last_digit, 0.1 * (high - low))  # scores that are all equal need room, too
    return metric.bounded(low - pad), high + pad


def far_in_words(metric: Metric) -> str:
    """Say which scores are too far from the best one to be drawn to scale, see ``FAR``."""
    return "below half" if metric.higher_is_better else "above twice"


def _near(values: pl.Series, metric: Metric) -> pl.Series:
    """Whether each score is at least half as good as the best one; false if there is no score."""
    best = values.max() if metric.higher_is_better else values.min()
    if not isinstance(best, int | float):
        return pl.Series([False] * len(values), dtype=pl.Boolean)
    near = values >= best / FAR if metric.higher_is_better else values <= best * FAR
    return near.fill_null(False)


def _dots(to_scale: pl.DataFrame, x: alt.X, y: alt.Y, colour: alt.Color, metric: Metric) -> list[Any]:
    """The mean of each recipe: a dot with its number, on a bar that is its interval."""
    shared: dict[str, Any] = {"y": y, "color": colour, "opacity": focused(1.0, 0.15)}
    digits = f".{metric.digits + 1}f"
    tooltip = [series_name()]
    tooltip += [alt.Tooltip(f"{name}:Q", title=name, format=digits) for name in ("value", "low", "high")]
    tooltip.append(alt.Tooltip("note:N"))
    bar = {"strokeWidth": 3, "strokeCap": "round", "clip": True}
    layers = layer(to_scale, "rule", bar, **shared, x=alt.X("low:Q", scale=x["scale"]), x2="high:Q")
    layers += layer(to_scale, "circle", {"size": 120, "opacity": 1}, **shared, x=x, tooltip=tooltip)
    number = alt.Text("value:Q", format=f".{metric.digits}f")
    style = {"dy": -12, "fontSize": 11, "fontWeight": 600}
    return layers + layer(to_scale, "text", style, **shared, x=x, text=number)


def _ticks(seeds: pl.DataFrame, x: alt.X, y: alt.Y, colour: alt.Color, metric: Metric) -> list[Any]:
    """The score of each seed: a tick, or a cross if it did not train."""
    score = alt.Tooltip("value:Q", title=metric.label, format=f".{metric.digits + 1}f")
    shared: dict[str, Any] = {
        "x": x,
        "y": y,
        "color": colour,
        "opacity": focused(0.75, 0.1),
        "tooltip": [series_name(), "seed:N", "outcome:N", score],
    }
    trained = pl.col("outcome").str.starts_with("trained")
    tick = {"thickness": 1.5, "size": 16, "orient": "vertical", "yOffset": 0}
    layers = layer(seeds.filter(trained), "tick", tick, **shared)
    return layers + layer(seeds.filter(~trained), "point", {"shape": "cross", "angle": 45}, **shared)


def _labels_off_scale(off_scale: pl.DataFrame, y: alt.Y, metric: Metric) -> list[Any]:
    """A text at the left edge for each recipe without a score, or with one beyond the axis."""
    score = (
        pl.when(pl.col("value").is_null())
        .then(pl.lit("no seed trained"))
        .otherwise(pl.format("◂ {}", pl.col("value").round(metric.digits)))
    )
    note = pl.when(pl.col("note") == "").then(pl.lit("")).otherwise(pl.format(", {}", pl.col("note")))
    left, dim = {"align": "left", "dx": 4, "style": "alarm"}, focused(1.0, 0.15)
    texts = off_scale.with_columns(words=score + note)
    return layer(texts, "text", left, x=alt.value(0), y=y, text="words:N", opacity=dim)


def _by_recipe(order: list[str]) -> alt.Y:
    """Names down the left side; a long one continues on a second line, after a ``+``, ``/`` or ``:``."""
    lines = r"split(replace(datum.label, /^(?=.{27})(.{1,25}[+\/:])/, '$1\n'), '\n')"
    axis = alt.Axis(ticks=False, domain=False, labelPadding=8, labelFontSize=12, labelExpr=lines)
    return alt.Y("recipe:N", sort=order, title=None, axis=axis)


# ------------------------------------------------------------------------------------- the learning rate


def sensitivity(trials: pl.DataFrame, recipes: Sequence[str], lrs: Sequence[float], metric: Metric) -> Drawn:
    """Draw a dev score against the learning rate (log scale), one point per run, one line per recipe.

    ``trials``: ``recipe``, ``lr``, ``dev`` (null: no score), ``outcome``, ``chosen``; ``lrs`` ascend. Recipes
    are drawn slightly apart, so that points at the same place can be told apart. A run that did not train is
    a hollow mark of its outcome; without a score it stands at the bad end of the axis, and its line has a
    gap. If lower scores are better, a wide axis is logarithmic, and scores above ``REACH`` times the best
    also stand at that end.
    """
    title = f"dev {metric.title}, seed of the sweep"
    vertical = _axis_of_sweep(trials, metric)
    if not metric.higher_is_better:
        # a loss beyond the axis becomes null: its line has a gap, and its mark stands at the end
        on_axis = pl.col("dev") <= vertical.bad_end
        trials = trials.with_columns(dev=pl.when(on_axis).then(pl.col("dev")).otherwise(None))
    nearest_rates = min((b / a for a, b in pairwise(lrs)), default=2.0)
    # on a logarithmic axis, a share of a distance is a power of a ratio
    width = nearest_rates**SPREAD
    points = _beside_each_other(trials, recipes, width)
    points = points.with_columns(drawn=pl.col("dev").fill_null(vertical.bad_end))
    points = _with_labels(points, metric)
    margin = width**1.2  # the outermost points stand at width**0.5 beside their rates
    ends = alt.Scale(type="log", domain=[min(lrs) / margin, max(lrs) * margin], nice=False)
    axis = alt.Axis(values=sorted(lrs), format="~e", grid=True, labelOverlap=False)
    shared = {
        "x": alt.X("at:Q", scale=ends, title="learning rate", axis=axis),
        "color": series_colour(recipes),
    }
    many = len(recipes) > MANY
    line = {"strokeWidth": 1 if many else 1.75, "invalid": "break-paths-show-domains"}
    with_gaps = alt.Y("dev:Q", title=title, scale=vertical.scale, axis=vertical.ticks)
    layers = layer(
        points, "line", line, **shared, y=with_gaps, strokeDash=series_dash(recipes), opacity=focused(0.9)
    )
    y = alt.Y("drawn:Q", title=title, scale=vertical.scale, axis=vertical.ticks)
    return finish(layers + _marks(points, {**shared, "y": y}, metric, size=0.3 if many else 1), 260)


def _beside_each_other(trials: pl.DataFrame, recipes: Sequence[str], width: float) -> pl.DataFrame:
    """Add the place ``at`` of each point on the axis of rates: the recipes' points at one rate are evenly
    spread around it, the last at ``width`` times the first.
    """
    gaps = max(1, len(recipes) - 1)
    factors = {name: width ** (i / gaps - 0.5) for i, name in enumerate(recipes)}
    return trials.with_columns(
        at=pl.col("lr") * pl.col("recipe").replace_strict(factors, return_dtype=pl.Float64)
    )


def _with_labels(trials: pl.DataFrame, metric: Metric) -> pl.DataFrame:
    """Add what tooltips say: the ``score`` and the ``rate``, in words."""
    rounded = pl.col("dev").round(metric.digits).cast(pl.String)
    return trials.with_columns(
        score=rounded.fill_null("none to scale"),
        rate=pl.col("lr").map_elements(lambda v: f"{v:g}", return_dtype=pl.String),
    )


def _marks(points: pl.DataFrame, shared: dict[str, Any], metric: Metric, *, size: float) -> list[Any]:
    """A mark for each run, hollow if it did not train, and a ring round the chosen ones."""
    trained = (pl.col("outcome") == "trained") & pl.col("dev").is_not_null()
    tooltip = [series_name(), alt.Tooltip("rate:N", title="learning rate")]
    tooltip += [alt.Tooltip("score:N", title=f"dev {metric.label}"), alt.Tooltip("outcome:N")]
    layers: list[Any] = []
    for filled, some in ((True, points.filter(trained)), (False, points.filter(~trained))):
        dot = {"opacity": 1, "filled": filled, "size": 60 * size, "strokeWidth": 1.75}
        layers += layer(
            some, "point", dot, **shared, shape=outcome_shape(), opacity=focused(1.0), tooltip=tooltip
        )
    ring = {"filled": False, "size": 170 * size, "strokeWidth": 1.5, "shape": "circle"}
    chosen = points.filter(pl.col("chosen") & trained)
    return layers + layer(chosen, "point", ring, **shared, opacity=focused(0.9), tooltip=tooltip)


@dataclass(frozen=True)
class _SweepAxis:
    """The vertical axis of the dev scores of a sweep."""

    scale: Any
    ticks: alt.Axis
    bad_end: float
    """The end of the axis where scores are worst, at which runs without a score stand."""


def _axis_of_sweep(trials: pl.DataFrame, metric: Metric) -> _SweepAxis:
    """Return the axis of the trials' scores; losses that are out of ``REACH`` lie beyond its bad end."""
    if metric.higher_is_better:
        return _SweepAxis(alt.Undefined, alt.Axis(tickCount=5), bad_end=metric.bounded(0.0))
    losses: list[float] = trials["dev"].drop_nulls().to_list() or [1.0]
    lowest = min(losses)
    # a negative loss is within its own reach, although many times a negative number is less than that
    reach = max(REACH * lowest, lowest)
    within_reach = [loss for loss in losses if loss <= reach]
    highest = max(within_reach)
    if lowest > 0 and highest > WIDE * lowest:
        return _logarithmic(within_reach)
    return _linear(lowest, highest)


def _logarithmic(losses: list[float]) -> _SweepAxis:
    scale, ticks = log_or_linear(losses, log=True)
    return _SweepAxis(scale, ticks, bad_end=scale["domain"][1])


def _linear(lowest: float, highest: float) -> _SweepAxis:
    """An axis from a little below the lowest loss to a little above the highest."""
    bad_end = highest + 0.1 * (highest - lowest)
    foot = lowest - 0.1 * (bad_end - lowest)
    scale = alt.Scale(domain=[foot, bad_end], nice=False, zero=False)
    return _SweepAxis(scale, alt.Axis(tickCount=5), bad_end)


# --------------------------------------------------------------------------------------------------- time


def time_bars(results: pl.DataFrame, recipes: Sequence[str]) -> Drawn:
    """Draw the training time of one run at the chosen learning rate (median over seeds), in minutes.

    ``results``: ``recipe``, ``minutes``, ``words`` (the minutes in words), ``note`` (why it was cut short).
    """
    y = _by_recipe(list(recipes))
    longest = max([float(minutes) for minutes in results["minutes"] if minutes], default=1.0)
    scale = alt.Scale(domain=[0, 1.04 * longest], nice=False)
    x = alt.X("minutes:Q", title="minutes", scale=scale, axis=alt.Axis(tickCount=5))
    tooltip = [series_name(), alt.Tooltip("words:N", title="one run"), "note:N"]
    bars = layer(
        results,
        "bar",
        {"height": 14, "cornerRadiusEnd": 3},
        x=x,
        y=y,
        tooltip=tooltip,
        color=series_colour(recipes),
        opacity=focused(0.9, 0.15),
    )
    label = {"align": "left", "dx": 1, "dy": -13, "style": "faint"}
    labels = layer(results, "text", label, x=alt.value(0), y=y, text="words:N")
    return finish(bars + labels, ROW * len(recipes))

"""Charts of trials: the loss against the learning rate, and the best rate against the size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.report.charts.drawing import (
    Drawn,
    finish,
    focused,
    layer,
    level,
    log_or_linear,
    recipe_colour,
    recipe_dash,
    recipe_name,
)

HEIGHT: Final = 260
HIGHER: Final = 320
CROSS: Final[dict[str, Any]] = {"shape": "cross", "angle": 45, "size": 60}
"""A trial that ended early."""
BEST: Final[dict[str, Any]] = {"shape": "diamond", "filled": True, "size": 140}
INTERVAL: Final[dict[str, Any]] = {"strokeWidth": 4, "strokeCap": "round"}
"""The best rate, and its interval."""
EDGE: Final = 0.08
"""The share of the losses' range that stays free at the ends of their axis, and between the marks there."""


def loss_by_rate(
    trials: pl.DataFrame, *, today: float, usable: tuple[float, float] | None, reference: float, words: str
) -> Drawn:
    """Draw ``loss`` against ``rate``; a trial that ended early has no loss and is a cross at the top.

    ``trials`` has ``rate``, ``loss`` (null: it ended early) and ``ended``. The band is the range that trains,
    the dashed line today's rate, and the dotted line ``reference``, if that is finite, named by ``words``.
    """
    if trials.is_empty():
        return finish([], HEIGHT)
    complete = trials.filter(pl.col("loss").is_finite())
    losses = [loss for loss in (reference, *complete["loss"].to_list()) if isfinite(loss)] or [0.0]
    low, top = min(losses), max(losses)
    edge = max(top - low, 1e-9) * EDGE
    x = _rate_axis([*trials["rate"].to_list(), today], "learning rate")
    y = _loss_axis(low - edge, top + 2 * edge)
    layers: list[Any] = []
    if usable is not None:
        band = {"rate": usable[0], "end": usable[1]}
        layers += layer(band, "rect", {"opacity": 0.12, "style": "ink"}, x=x("rate"), x2="end:Q")
    layers += _today(today, x, "height")
    if isfinite(reference):
        layers += level(reference, words, y("level"), below=True)
    rate, loss = alt.Tooltip("rate:Q", format=".2~e"), alt.Tooltip("loss:Q", format=".3f")
    dots = alt.OverlayMarkDef(size=50, filled=True)
    tooltip = [rate, loss, "ended:N"]
    layers += layer(complete, "line", {"point": dots}, x=x("rate"), y=y("loss"), tooltip=tooltip)
    early = trials.filter(pl.col("ended") != "").with_columns(loss=pl.col("loss").fill_null(top + edge))
    cross = {"style": "alarm", **CROSS}
    layers += layer(early, "point", cross, x=x("rate"), y=y("loss"), tooltip=[rate, "ended:N"])
    return finish(layers, HEIGHT)


def loss_by_rate_and_size(
    trials: pl.DataFrame,
    fits: pl.DataFrame,
    best: pl.DataFrame,
    names: Sequence[str],
    *,
    today: float,
    reference: float,
    title: str,
) -> Drawn:
    """Draw ``loss`` against ``rate`` for every size, a ``recipe`` among ``names``, and mark its best rate.

    ``trials`` has ``recipe``, ``rate``, ``loss`` (null: no seed ended), ``low``, ``high``, ``seeds``,
    ``shared`` (whether all seeds ended) and ``ended`` (why one did not). ``fits``: ``recipe``, ``rate``,
    ``loss`` of the fitted curve. ``best``: ``recipe``, ``rate``, ``low``, ``high`` and the ``loss`` there.
    Dots are means over seeds with their range, hollow if some seeds are missing. A seed that ended early is a
    cross at the top, where each size has a row; a loss above ``reference`` is drawn at the upper edge.
    """
    known = trials.filter(pl.col("loss").is_not_null())
    early = trials.filter(pl.col("ended") != "")
    low, top = _ends_of_losses(known, fits, reference)
    edge = max(top - low, 1e-9) * EDGE
    known = known.with_columns(at=pl.min_horizontal("loss", pl.lit(top + edge)))
    rows = {name: top + (2 + i) * edge for i, name in enumerate(names)}
    early = early.with_columns(at=pl.col("recipe").replace_strict(rows, return_dtype=pl.Float64))
    x = _rate_axis([*trials["rate"].to_list(), today], title)
    y = _loss_axis(low - edge, top + (2 + len(rows)) * edge if len(early) else top + 2 * edge)
    shared: dict[str, Any] = {"color": recipe_colour(names), "opacity": focused(1.0, 0.1)}
    layers = _today(today, x, 12)
    layers += _losses(known, fits, names, x, y, shared)
    tooltip = [recipe_name(), alt.Tooltip("rate:Q", format=".2~e")]
    ends = [alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("low", "high")]
    layers += layer(best, "rule", INTERVAL, **shared, x=x("low"), x2="high:Q", y=y("loss"))
    layers += layer(best, "point", BEST, **shared, x=x("rate"), y=y("loss"), tooltip=[*tooltip, *ends])
    layers += layer(early, "point", CROSS, **shared, x=x("rate"), y=y("at"), tooltip=[*tooltip, "ended:N"])
    return finish(layers, HIGHER)


def _ends_of_losses(known: pl.DataFrame, fits: pl.DataFrame, reference: float) -> tuple[float, float]:
    """The lowest loss, and the highest; but no more than ``reference`` if anything has learnt more."""
    highs = known["high"].to_list() or [reference]
    lows = known["low"].to_list() or highs
    low, high = min([*lows, *fits["loss"].to_list()]), max(highs)
    return low, min(high, reference) if low < reference else high


def _losses(
    known: pl.DataFrame,
    fits: pl.DataFrame,
    names: Sequence[str],
    x: partial[alt.X],
    y: partial[alt.Y],
    shared: Mapping[str, Any],
) -> list[Any]:
    """Means over seeds with their range, joined by a faint line, and the fitted curve of each size."""
    dash = recipe_dash(names)
    thin, wide = {"clip": True, "strokeWidth": 1}, {"clip": True, "strokeWidth": 2}
    at_all_seeds, at_some = known.filter(pl.col("shared")), known.filter(~pl.col("shared"))
    faint = {**shared, "opacity": focused(0.45, 0.05)}
    layers = layer(at_all_seeds, "line", thin, **faint, x=x("rate"), y=y("at"), strokeDash=dash)
    layers += layer(fits, "line", wide, **shared, x=x("rate"), y=y("loss"), strokeDash=dash)
    layers += layer(known, "rule", thin, **shared, x=x("rate"), y=y("low"), y2="high:Q")
    tooltip = [recipe_name(), alt.Tooltip("rate:Q", format=".2~e")]
    tooltip += [alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("loss", "low", "high", "seeds")]
    for filled, some in ((True, at_all_seeds), (False, at_some)):
        dot = {"filled": filled, "size": 36}
        layers += layer(some, "point", dot, **shared, x=x("rate"), y=y("at"), tooltip=tooltip)
    return layers


def best_by_size(
    best: pl.DataFrame, line: pl.DataFrame, names: Sequence[str], target: int | None, *, axis: str, title: str
) -> Drawn:
    """Draw the best ``rate`` of each ``size`` with its interval, and the line through them with its own.

    ``best``: ``recipe`` among ``names``, ``size``, ``rate``, ``low``, ``high``; ``line``: the same without
    ``recipe``, at each size and at ``target``, whose rate is marked. Both axes are logarithmic.
    """
    columns = ("rate", "low", "high")
    rates = [value for table in (best, line) for name in columns for value in table[name].to_list()]
    scale, ticks = log_or_linear(rates, log=True)
    y = partial(alt.Y, type="quantitative", scale=scale, axis=ticks, title=title)
    sizes = sorted({*best["size"].to_list(), *line["size"].to_list()})
    along, _ = log_or_linear(sizes, log=True)
    x = alt.X("size:Q", scale=along, title=axis, axis=alt.Axis(values=sizes, format="d", grid=False))
    tooltip = [alt.Tooltip("size:Q", title=axis)]
    tooltip += [alt.Tooltip(f"{name}:Q", format=".2~e") for name in columns]
    band = {"opacity": 0.12, "strokeWidth": 0, "style": "ink"}
    dashed = {"strokeDash": [6, 4], "strokeWidth": 1.5, "style": "ink"}
    layers = layer(line, "area", band, x=x, y=y("low"), y2="high:Q")
    layers += layer(line, "line", dashed, x=x, y=y("rate"))
    picked: dict[str, Any] = {"color": recipe_colour(names), "opacity": focused(1.0, 0.15)}
    layers += layer(best, "rule", INTERVAL, **picked, x=x, y=y("low"), y2="high:Q")
    layers += layer(best, "point", BEST, **picked, x=x, y=y("rate"), tooltip=tooltip)
    at_target = line.filter(pl.col("size").eq_missing(target))
    layers += layer(at_target, "rule", {"style": "ink"}, x=x, y=y("low"), y2="high:Q")
    layers += layer(at_target, "point", {"style": "ink", "size": 90}, x=x, y=y("rate"), tooltip=tooltip)
    return finish(layers, HIGHER)


def _rate_axis(rates: Sequence[float], title: str) -> partial[alt.X]:
    """Return what makes the horizontal axis for a column of rates."""
    scale, axis = log_or_linear(rates, log=True)
    return partial(alt.X, type="quantitative", scale=scale, axis=axis, title=title)


def _loss_axis(low: float, high: float) -> partial[alt.Y]:
    """Return what makes the vertical axis for a column of losses."""
    scale = alt.Scale(domain=[low, high], nice=False, zero=False)
    axis = alt.Axis(tickCount=5)
    return partial(alt.Y, type="quantitative", scale=scale, axis=axis, title="loss at the end")


def _today(today: float, x: partial[alt.X], y: float | str) -> list[Any]:
    """A dashed line at today's rate, and its name at ``y`` px."""
    row = {"rate": today, "words": "today"}
    line = layer(row, "rule", {"strokeDash": [6, 4], "style": "ink"}, x=x("rate"))
    label = {"align": "left", "baseline": "bottom", "dx": 4, "dy": -4, "style": "ink", "fontSize": 11}
    return line + layer(row, "text", label, x=x("rate"), y=alt.value(y), text="words:N")

"""Charts of trials: the loss against the learning rate, and the best rate against the size."""

from __future__ import annotations

from collections.abc import Sequence
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
    whole = trials.filter(pl.col("loss").is_finite())
    known = [x for x in (reference, *whole["loss"].to_list()) if isfinite(x)] or [0.0]
    low, top = min(known), max(known)
    edge = max(top - low, 1e-9) * EDGE
    rate = _rate_axis([*trials["rate"].to_list(), today], "learning rate")
    loss = _loss_axis(low - edge, top + 2 * edge)
    x, y = rate("rate"), loss("loss")
    tips = [alt.Tooltip("rate:Q", format=".2~e"), alt.Tooltip("loss:Q", format=".3f"), "ended:N"]
    layers: list[Any] = []
    if usable is not None:
        band = {"rate": usable[0], "end": usable[1]}
        layers += layer(band, "rect", {"opacity": 0.12, "style": "ink"}, x=x, x2="end:Q")
    layers += _today(today, rate, "height")
    if isfinite(reference):
        layers += level(reference, words, loss("level"), below=True)
    dots = alt.OverlayMarkDef(size=50, filled=True)
    layers += layer(whole, "line", {"point": dots}, x=x, y=y, tooltip=tips)
    early = trials.filter(pl.col("ended") != "").with_columns(loss=pl.col("loss").fill_null(top + edge))
    layers += layer(early, "point", {"style": "alarm", **CROSS}, x=x, y=y, tooltip=[tips[0], tips[2]])
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
    highs = known["high"].to_list() or [reference]
    low = min([*(known["low"].to_list() or highs), *fits["loss"].to_list()])
    top = min(max(highs), reference) if low < reference else max(highs)
    edge, early = max(top - low, 1e-9) * EDGE, trials.filter(pl.col("ended") != "")
    x = _rate_axis([*trials["rate"].to_list(), today], title)
    y = _loss_axis(low - edge, top + (2 + len(names) * bool(len(early))) * edge)
    tips = [recipe_name(), alt.Tooltip("rate:Q", format=".2~e")]
    losses = [alt.Tooltip(f"{n}:Q", format=".4~g") for n in ("loss", "low", "high", "seeds")]
    strong, layers = focused(1.0, 0.1), _today(today, x, 12)
    own = partial(layer, color=recipe_colour(names), opacity=strong)
    dash, shared = recipe_dash(names), pl.col("shared")
    known = known.with_columns(at=pl.min_horizontal("loss", pl.lit(top + edge)))
    thin, wide = ({"clip": True, "strokeWidth": w} for w in (1, 2))
    tried, faint = known.filter(shared), focused(0.45, 0.05)
    layers += own(tried, "line", thin, x=x("rate"), y=y("at"), strokeDash=dash, opacity=faint)
    layers += own(fits, "line", wide, x=x("rate"), y=y("loss"), strokeDash=dash)
    layers += own(known, "rule", thin, x=x("rate"), y=y("low"), y2="high:Q")
    for filled, some in ((True, tried), (False, known.filter(~shared))):
        dot = {"filled": filled, "size": 36}
        layers += own(some, "point", dot, x=x("rate"), y=y("at"), tooltip=[*tips, *losses])
    layers += own(best, "rule", INTERVAL, x=x("low"), x2="high:Q", y=y("loss"))
    layers += own(best, "point", BEST, x=x("rate"), y=y("loss"), tooltip=[*tips, *losses[1:3]])
    row = {name: top + (2 + i) * edge for i, name in enumerate(names)}
    early = early.with_columns(at=pl.col("recipe").replace_strict(row, return_dtype=pl.Float64))
    layers += own(early, "point", CROSS, x=x("rate"), y=y("at"), tooltip=[*tips, "ended:N"])
    return finish(layers, HIGHER)


def best_by_size(
    best: pl.DataFrame, line: pl.DataFrame, names: Sequence[str], target: int | None, *, axis: str, title: str
) -> Drawn:
    """Draw the best ``rate`` of each ``size`` with its interval, and the line through them with its own.

    ``best``: ``recipe`` among ``names``, ``size``, ``rate``, ``low``, ``high``; ``line``: the same without
    ``recipe``, at each size and at ``target``, whose rate is marked. Both axes are logarithmic.
    """
    columns = ("rate", "low", "high")
    every = [v for table in (best, line) for n in columns for v in table[n].to_list()]
    sizes = sorted({*best["size"].to_list(), *line["size"].to_list()})
    along = log_or_linear(sizes, log=True)[0]
    x = alt.X("size:Q", scale=along, title=axis, axis=alt.Axis(values=sizes, format="d", grid=False))
    y = _quantity(alt.Y, title, log_or_linear(every, log=True))
    tips = [alt.Tooltip("size:Q", title=axis), *(alt.Tooltip(f"{n}:Q", format=".2~e") for n in columns)]
    band = {"opacity": 0.12, "strokeWidth": 0, "style": "ink"}
    dashed = {"strokeDash": [6, 4], "strokeWidth": 1.5, "style": "ink"}
    layers = layer(line, "area", band, x=x, y=y("low"), y2="high:Q")
    layers += layer(line, "line", dashed, x=x, y=y("rate"))
    asked, ink = line.filter(pl.col("size").eq_missing(target)), {"style": "ink"}
    own = partial(layer, color=recipe_colour(names), opacity=focused(1.0, 0.15))
    for draw, table, bar, dot in ((own, best, INTERVAL, BEST), (layer, asked, ink, {**ink, "size": 90})):
        layers += draw(table, "rule", bar, x=x, y=y("low"), y2="high:Q")
        layers += draw(table, "point", dot, x=x, y=y("rate"), tooltip=tips)
    return finish(layers, HIGHER)


def _quantity(channel: type[Any], title: str, scale_and_axis: tuple[alt.Scale, alt.Axis]) -> partial[Any]:
    scale, axis = scale_and_axis
    return partial(channel, type="quantitative", scale=scale, axis=axis, title=title)


def _rate_axis(rates: Sequence[float], title: str) -> partial[alt.X]:
    return _quantity(alt.X, title, log_or_linear(rates, log=True))


def _loss_axis(low: float, high: float) -> partial[alt.Y]:
    scale = alt.Scale(domain=[low, high], nice=False, zero=False)
    return _quantity(alt.Y, "loss at the end", (scale, alt.Axis(tickCount=5)))


def _today(today: float, x: partial[alt.X], y: float | str) -> list[Any]:
    """A dashed line at today's rate, and its name at ``y`` px."""
    now, dashed = {"rate": today, "words": "today"}, {"strokeDash": [6, 4], "style": "ink"}
    named = {"align": "left", "baseline": "bottom", "dx": 4, "dy": -4, "style": "ink", "fontSize": 11}
    rule = layer(now, "rule", dashed, x=x("rate"))
    return rule + layer(now, "text", named, x=x("rate"), y=alt.value(y), text="words:N")

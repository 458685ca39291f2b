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
    series_colour,
    series_dash,
    series_name,
)
from normlab.report.charts.theme import SERIES

HEIGHT: Final = 260
HIGHER: Final = 320
CROSS: Final[dict[str, Any]] = {"shape": "cross", "angle": 45, "size": 60}
"""The mark of a trial that ended early."""
BEST: Final[dict[str, Any]] = {"shape": "diamond", "filled": True, "size": 140}
INTERVAL: Final[dict[str, Any]] = {"strokeWidth": 4, "strokeCap": "round"}
"""The marks of a best rate (``BEST``) and of its interval."""
GAP: Final = 0.08
"""The axis of losses reaches beyond them by gaps of this share of their range. Upwards from the foot:

- one gap below the lowest loss,
- the losses to scale, up to the highest,
- one gap above that: in a chart of one model the crosses of trials that ended early, in a chart of several
  sizes the losses that are too high to be drawn to scale,
- from two gaps above it on, in a chart of several sizes: a row of crosses for each size, a gap apart.
"""


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
    lowest, highest = min(losses), max(losses)
    gap = _gap(lowest, highest)
    x = _rate_axis([*trials["rate"].to_list(), today], "learning rate")
    y = _loss_axis(lowest - gap, highest + 2 * gap)
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
    early = trials.filter(pl.col("ended") != "").with_columns(loss=pl.col("loss").fill_null(highest + gap))
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
    """Draw ``loss`` against ``rate`` for every size, a series among ``names``, and mark its best rate.

    ``trials`` has ``SERIES``, ``rate``, ``loss`` (null: no seed reached the end), ``low``, ``high``,
    ``seeds``, ``shared`` (whether all seeds did) and ``ended`` (why one did not). ``fits``: ``SERIES``,
    ``rate``, ``loss`` of the fitted curve. ``best``: ``SERIES``, ``rate``, ``low``, ``high`` and the ``loss``
    there.
    Dots are means over seeds with their range, hollow if some seeds are missing. Losses above ``reference``
    are not drawn to scale, and seeds that ended early are crosses; ``GAP`` says where both stand.
    """
    known = trials.filter(pl.col("loss").is_not_null())
    early = trials.filter(pl.col("ended") != "")
    lowest, highest = _ends_of_losses(known, fits, reference)
    gap = _gap(lowest, highest)
    known = known.with_columns(at=pl.min_horizontal("loss", pl.lit(highest + gap)))
    row_of_crosses = {name: highest + (2 + i) * gap for i, name in enumerate(names)}
    early = early.with_columns(at=pl.col(SERIES).replace_strict(row_of_crosses, return_dtype=pl.Float64))
    x = _rate_axis([*trials["rate"].to_list(), today], title)
    rows = len(row_of_crosses) if len(early) else 0
    y = _loss_axis(lowest - gap, highest + (2 + rows) * gap)
    shared: dict[str, Any] = {"color": series_colour(names), "opacity": focused(1.0, 0.1)}
    layers = _today(today, x, 12)
    layers += _losses(known, fits, names, x, y, shared)
    tooltip = [series_name(), alt.Tooltip("rate:Q", format=".2~e")]
    ends = [alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("low", "high")]
    layers += layer(best, "rule", INTERVAL, **shared, x=x("low"), x2="high:Q", y=y("loss"))
    layers += layer(best, "point", BEST, **shared, x=x("rate"), y=y("loss"), tooltip=[*tooltip, *ends])
    layers += layer(early, "point", CROSS, **shared, x=x("rate"), y=y("at"), tooltip=[*tooltip, "ended:N"])
    return finish(layers, HIGHER)


def _gap(lowest: float, highest: float) -> float:
    """``GAP`` of the range of losses; above 0 even where all losses are the same."""
    return max(highest - lowest, 1e-9) * GAP


def _ends_of_losses(known: pl.DataFrame, fits: pl.DataFrame, reference: float) -> tuple[float, float]:
    """The lowest and the highest loss that are drawn to scale. Once a model has learnt something, which means
    a loss below ``reference``, none above ``reference`` is.
    """
    highs = known["high"].to_list() or [reference]
    lows = known["low"].to_list() or highs
    lowest, highest = min([*lows, *fits["loss"].to_list()]), max(highs)
    if lowest < reference:
        highest = min(highest, reference)
    return lowest, highest


def _losses(
    known: pl.DataFrame,
    fits: pl.DataFrame,
    names: Sequence[str],
    x: partial[alt.X],
    y: partial[alt.Y],
    shared: Mapping[str, Any],
) -> list[Any]:
    """Means over seeds with their range, joined by a faint line, and the fitted curve of each size."""
    dash = series_dash(names)
    thin, wide = {"clip": True, "strokeWidth": 1}, {"clip": True, "strokeWidth": 2}
    at_all_seeds, at_some = known.filter(pl.col("shared")), known.filter(~pl.col("shared"))
    faint = {**shared, "opacity": focused(0.45, 0.05)}
    layers = layer(at_all_seeds, "line", thin, **faint, x=x("rate"), y=y("at"), strokeDash=dash)
    layers += layer(fits, "line", wide, **shared, x=x("rate"), y=y("loss"), strokeDash=dash)
    layers += layer(known, "rule", thin, **shared, x=x("rate"), y=y("low"), y2="high:Q")
    tooltip = [series_name(), alt.Tooltip("rate:Q", format=".2~e")]
    tooltip += [alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("loss", "low", "high", "seeds")]
    for filled, some in ((True, at_all_seeds), (False, at_some)):
        dot = {"filled": filled, "size": 36}
        layers += layer(some, "point", dot, **shared, x=x("rate"), y=y("at"), tooltip=tooltip)
    return layers


def best_by_size(
    best: pl.DataFrame, line: pl.DataFrame, names: Sequence[str], target: int | None, *, axis: str, title: str
) -> Drawn:
    """Draw the best ``rate`` of each ``size`` with its interval, and the line through them with its own.

    ``best``: ``SERIES`` among ``names``, ``size``, ``rate``, ``low``, ``high``; ``line``: the same without
    ``SERIES``, at each size and at ``target``, whose rate is marked (None: no rate is). Both axes are
    logarithmic.
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
    picked: dict[str, Any] = {"color": series_colour(names), "opacity": focused(1.0, 0.15)}
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

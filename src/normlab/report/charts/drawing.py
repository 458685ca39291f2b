"""What all charts are drawn with: layers, axes, the highlighting of a series, and the thinning of lines.

``SERIES`` in ``theme.py`` says what a series is.

These modules need the extra ``charts``; ``normlab.report.charts.installed`` says whether it is there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import polars as pl
import polars.selectors as cs

from normlab.base.io import NOT_FINITE
from normlab.report.charts.theme import OUTCOMES, POINTS, SERIES, dash

Drawn = alt.LayerChart | alt.FacetChart
"""A chart as these modules return it; ``.save("x.svg")``, ``.png`` or ``.pdf`` needs no browser."""


def frame(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """Turn rows into a frame. Numbers become floats, also where some are words such as "nan"; a column of
    nothing but whole numbers stays whole.
    """
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return pl.DataFrame({name: _numbers(values) for name, values in columns.items()}, strict=False)


def _numbers(values: list[Any]) -> pl.Series:
    known = [value for value in values if value is not None]
    words = [value for value in known if isinstance(value, str)]
    if not known:
        return pl.Series(values, dtype=pl.Float64, strict=False)
    if not all(word in NOT_FINITE for word in words):
        return pl.Series(values, dtype=pl.String, strict=False)
    if all(isinstance(value, int) for value in known):
        return pl.Series(values, strict=False)
    return pl.Series([None if value is None else float(value) for value in values], strict=False)


def series_name() -> alt.Tooltip:
    """Return the line of a tooltip that names the series."""
    return alt.Tooltip(f"{SERIES}:N", title="name")


def series_colour(names: Sequence[str]) -> alt.Color:
    """Return the colour of each series; ``names`` are those of all series, in the order of the legend."""
    scale = alt.Scale(domain=list(names), range="category")
    return alt.Color(field=SERIES, type="nominal", scale=scale, title=None)


def series_dash(names: Sequence[str]) -> alt.StrokeDash:
    """Return the dash of each series; ``names`` are those of all series, in the order of the legend."""
    scale = alt.Scale(domain=list(names), range=[list(dash(i)) for i in range(len(names))])
    return alt.StrokeDash(field=SERIES, type="nominal", scale=scale, title=None)


def outcome_shape() -> alt.Shape:
    """Return the marker of each outcome."""
    scale = alt.Scale(domain=list(OUTCOMES), range=list(OUTCOMES.values()))
    return alt.Shape(field="outcome", type="nominal", legend=None, scale=scale)


def layer(
    table: pl.DataFrame | Mapping[str, Any], mark: str, style: Mapping[str, Any], **channels: Any
) -> list[Any]:
    """Return a layer that draws the rows of a table, or the one row given, with a mark; none without rows."""
    if isinstance(table, pl.DataFrame) and table.is_empty():
        return []
    data = rows(table) if isinstance(table, pl.DataFrame) else alt.InlineData(values=[dict(table)])
    marked = getattr(alt.Chart(data), f"mark_{mark}")(**style)
    return [marked.encode(**channels) if channels else marked]


def level(value: float, words: str, y: Any, *, below: bool = False) -> list[Any]:
    """Return a dotted line at a value, which ``y`` reads from the field ``level``, and a label that stays
    legible over curves.
    """
    row = {"level": value}
    rule = layer(row, "rule", {"strokeDash": [2, 3], "style": "faint", "clip": True}, y=y)
    side = {"baseline": "top", "dy": 4} if below else {"baseline": "bottom", "dy": -3}
    label = {"text": words, "align": "right", "dx": -4, **side}
    right = alt.value("width")
    halo = layer(row, "text", {**label, "style": "halo"}, y=y, x=right)
    return rule + halo + layer(row, "text", {**label, "style": "faint"}, y=y, x=right)


def finish(layers: Sequence[Any], height: int) -> Drawn:
    """Return the layers as one chart, as wide as its container, ``height`` px high; without layers, a chart
    that says so.

    Its signal ``focus`` holds the name of the series to highlight, or "" for none.
    """
    focus = alt.VariableParameter(name="focus", value="")
    layers = layers or layer({}, "text", {"text": "no finite value", "style": "faint"})
    first, *others = layers
    for other in others:
        if other.data == first.data:
            other.data = first.data  # altair writes what all layers share only once
    return alt.LayerChart(layer=layers, params=[focus], width="container", height=height)


def focused(full: float, dimmed: float = 0.07, *, alone: float | None = None) -> Any:
    """Return the opacity of a mark: ``full`` while no series is in focus. While one is, its marks have the
    opacity ``alone`` (``full`` unless it is given), and those of the others ``dimmed``.
    """
    picked = alt.when("focus == ''").then(alt.value(full)).when(f"datum.{SERIES} == focus")
    return picked.then(alt.value(full if alone is None else alone)).otherwise(alt.value(dimmed))


def rows(frame: pl.DataFrame) -> alt.InlineData:
    """Return a table as inline data: CSV text with floats of five digits, small and cheap to copy."""
    short = frame.with_columns(cs.float().round_sig_figs(5))
    kinds = {name: _kind(dtype) for name, dtype in frame.schema.items()}
    return alt.InlineData(values=short.write_csv(), format=alt.CsvDataFormat(type="csv", parse=kinds))


def _kind(dtype: pl.DataType) -> str:
    """What Vega calls the type of a column."""
    if dtype.is_numeric():
        return "number"
    return "boolean" if dtype == pl.Boolean else "string"


def has_place(column: str, *, log: bool) -> pl.Expr:
    """Whether a number can be drawn: it is finite and, on a logarithmic axis, above 0."""
    return pl.col(column).is_finite() & ((pl.col(column) > 0) | pl.lit(not log))


def log_or_linear(values: Sequence[float], *, log: bool, fixed: bool = False) -> tuple[alt.Scale, alt.Axis]:
    """Return a scale that covers the values, with round ticks; a ``fixed`` one ends exactly at the lowest and
    the highest value.
    """
    low, high = min(values, default=1.0), max(values, default=1.0)
    if not log:
        scale = alt.Scale(domain=[low, high], nice=False) if fixed else alt.Scale(zero=low >= 0)
        return scale, alt.Axis(tickCount=5)
    if not fixed:
        low, high = low / 1.3, high * 1.3
    return alt.Scale(type="log", domain=[low, high], nice=False), _log_axis(low, high)


def _log_axis(low: float, high: float) -> alt.Axis:
    """Return an axis with round ticks: the wider it is, the fewer there are in each decade, and on the widest
    only some decades have one.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps: tuple[float, ...] = (1,)
    if high < 4 * low:
        steps = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    elif len(decades) <= 3 or high <= 30 * low:
        steps = (1, 2, 5)
    every = max(1, len(decades) // 6)
    # 10.0**e is not the float nearest to a power of ten, and its text would be long
    powers = [float(f"1e{exponent}") for exponent in decades if exponent % every == 0]
    ticks = [step * power for power in powers for step in steps]
    number = "~e" if len(decades) > 5 or low < 1e-3 else "~g"
    return alt.Axis(values=[tick for tick in ticks if low <= tick <= high], format=number)


def downsample(
    frame: pl.DataFrame, x: str, y: str, by: Sequence[str], points: int = POINTS, *, keep: Sequence[str] = ()
) -> pl.DataFrame:
    """Cut the range of ``x`` into ``points`` equal bins and summarise ``y`` in each, by group.

    Returns columns ``by``, ``x`` (the bin's last value), ``mean``, ``low``, ``high`` (minimum and maximum),
    sorted by group and ``x``, and the bin's last value of each column in ``keep``. The bins are the same
    for all groups, so that lines can be averaged. Values that are null or not finite are left out: a gap
    stays a gap. If every ``x`` has a bin of its own, only the column names change.
    """
    groups = list(by)
    data = frame.filter(pl.col(y).is_finite()).select(*groups, x, y, *keep)
    distinct = data[x].unique().sort()
    if len(distinct) <= points:
        binned = data.with_columns(_bin=pl.col(x).cast(pl.Float64))
    else:
        first, last = float(distinct[0]), float(distinct[-1])
        position = (data[x].cast(pl.Float64).to_numpy() - first) / (last - first) * points
        binned = data.with_columns(_bin=pl.Series(np.minimum(np.floor(position), points - 1)))
    summary = (
        binned.sort(x)
        .group_by([*groups, "_bin"])
        .agg(
            pl.col(x).max(),
            *[pl.col(name).last() for name in keep],
            mean=pl.col(y).mean(),
            low=pl.col(y).min(),
            high=pl.col(y).max(),
        )
    )
    if len(distinct) > points:  # all groups share the bins, and each bin's last x
        summary = summary.with_columns(pl.col(x).max().over("_bin"))
    return summary.sort([*groups, x]).drop("_bin")


def spread(
    frame: pl.DataFrame, x: str, y: str, points: int = POINTS, *, extremes: bool = False
) -> pl.DataFrame:
    """Return the mean of ``y`` over the runs of each series, and the band from the lowest run to the highest.

    Each run is first reduced to ``points`` bins. The band reaches from the lowest to the highest of the runs'
    bin means, or with ``extremes``, for curves whose spikes matter, of their single values. Columns
    ``SERIES``, ``x``, ``mean``, ``low``, ``high``, ``runs`` (how many runs reached this far).
    """
    by_run = downsample(frame, x, y, [SERIES, "run"], points)
    low, high = ("low", "high") if extremes else ("mean", "mean")
    return (
        by_run.group_by(SERIES, x)
        .agg(mean=pl.col("mean").mean(), low=pl.col(low).min(), high=pl.col(high).max(), runs=pl.len())
        .sort(SERIES, x)
    )

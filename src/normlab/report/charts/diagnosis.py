"""Charts of a diagnosis: the signals of a model from its input to its output.

Frames have one row per point. ``depth`` is the layer, counted from 0 as in the paths of modules; a layer's
sublayers stand between it and the next. ``recipe`` is the role of a sublayer: points are coloured and picked
out by role, as by recipe on other pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.report.charts.theme import Drawn, finish, focused, log_or_linear, nothing, recipe_colour, rows

HEIGHT: Final = 220
CELLS: Final = 60
"""A heat map has at most so many cells a side: a deeper stack is drawn in groups of sublayers."""
LAWS: Final = {"log": "log N", "linear": "N", "power": "a power of N"}
"""The laws of growth that are drawn, in words."""
DASHES: Final = {"log N": (2, 3), "N": (7, 4), "a power of N": (1, 0)}


def by_depth(
    frame: pl.DataFrame,
    y: str,
    title: str,
    roles: Sequence[str],
    *,
    log: bool = False,
    by_role: bool = False,
    domain: Sequence[float] | None = None,
) -> Drawn:
    """Draw a quantity at every sublayer: a point each, coloured by role, and a line through their means.

    ``frame``: ``depth``, ``recipe``, ``module`` and the column ``y``; if there are any, also ``theory``,
    ``theory_low`` and ``theory_high``, drawn as a dashed line or bars. A log axis leaves out what is not
    positive. ``by_role`` draws a line per role, for what does not flow from one to the next. ``domain``, the
    range of the vertical axis, is given so that stacks can be compared.
    """
    names = [n for n in (y, "theory", "theory_low", "theory_high") if n in frame.columns]
    shown = frame.with_columns(
        pl.when(pl.col(n).is_finite() & ((pl.col(n) > 0) | pl.lit(not log))).then(pl.col(n)).alias(n)
        for n in names
    )
    points = shown.filter(pl.col(y).is_not_null())
    if points.is_empty():
        return nothing(HEIGHT)
    values = points[y].to_list() if domain is None else domain
    scale, axis = log_or_linear(values, log=log, fixed=domain is not None)
    x = alt.X("depth:Q", title="layer", axis=_whole(int(_most(points["depth"])), first=0), scale=_snug())
    base = alt.Chart(rows(points)).encode(x=x)
    up = alt.Y(f"{y}:Q", title=title, scale=scale, axis=axis)
    told = [alt.Tooltip(n) for n in ("module:N", "recipe:N")]
    told += [alt.Tooltip(f"{n}:Q", format=".3g") for n in names]
    layers: list[Any] = []
    theory = shown.filter(pl.col("theory").is_not_null()) if "theory" in names else shown.clear()
    band = shown.filter(pl.col("theory_low").is_not_null()) if "theory_low" in names else shown.clear()
    if len(band):
        bar = alt.Chart(rows(band)).mark_rule(opacity=0.35, strokeWidth=4, style="faint", clip=True)
        layers.append(bar.encode(x=x, y=alt.Y("theory_low:Q", scale=scale, title=title), y2="theory_high:Q"))
    line = base.mark_line(strokeWidth=1, style="faint", opacity=0.7, clip=True)
    line = line.encode(detail="recipe:N") if by_role else line
    layers.append(line.encode(y=alt.Y(f"mean({y}):Q", title=title, scale=scale, axis=axis)))
    if len(theory):
        dashed = alt.Chart(rows(theory)).mark_line(strokeDash=[5, 4], strokeWidth=1.5, style="ink", clip=True)
        dashed = dashed.encode(x=x, y=alt.Y("theory:Q", scale=scale, title=title))
        layers.append(dashed.encode(detail="recipe:N") if by_role else dashed)
    dots = base.mark_circle(size=42 if len(points) < 120 else 20, clip=True, opacity=1)
    layers.append(dots.encode(y=up, color=recipe_colour(roles), opacity=focused(0.95, 0.08), tooltip=told))
    return finish(layers, HEIGHT)


def heat_map(frame: pl.DataFrame, x_axis: str, y_axis: str) -> Drawn:
    """Draw the shares ``value`` of branch ``on`` (-1: the input) in the output of sublayer ``of``, light to
    dark.

    Deep stacks are drawn in groups: shares of the branches of a group are added, those of sublayers averaged.
    """
    if frame.is_empty():
        return nothing(HEIGHT)
    deepest = int(_most(frame["of"])) + 1
    size = -(-deepest // CELLS)
    branch = pl.when(pl.col("on") < 0).then(-1).otherwise(pl.col("on") // size)  # -1 is the input
    grouped = (
        frame.with_columns(of_group=pl.col("of") // size, on_group=branch)
        .group_by("of_group", "of", "on_group")
        .agg(pl.col("value").sum())
        .group_by("of_group", "on_group")
        .agg(pl.col("value").mean())
        .with_columns(x=pl.col("on_group") * size + 0.5, y=pl.col("of_group") * size + 0.5)
        .with_columns(x2=pl.col("x") + size, y2=pl.col("y") + size)
        .sort("y", "x")
        .drop("of_group", "on_group")
    )
    top, axis = deepest + 0.5, _whole(deepest)
    cells = alt.Chart(rows(grouped)).mark_rect(clip=True, strokeWidth=0)
    share = alt.Tooltip("value:Q", title="share", format=".3f")
    told = [alt.Tooltip("y:Q", title=y_axis), alt.Tooltip("x:Q", title=x_axis), share]
    drawn = cells.encode(
        x=alt.X("x:Q", title=x_axis, axis=axis, scale=alt.Scale(domain=[0.5 - size, top], nice=False)),
        x2="x2:Q",
        y=alt.Y("y:Q", title=y_axis, axis=axis,
                scale=alt.Scale(domain=[0.5, top], nice=False, reverse=True)),
        y2="y2:Q",
        color=alt.Color("value:Q", scale=alt.Scale(range="heatmap", domain=[0, 1]), legend=None),
        tooltip=told,
    )  # fmt: skip
    return finish([drawn], 320)


def growth(changes: pl.DataFrame, fits: pl.DataFrame) -> Drawn:
    """Draw the output change at every depth, a point per seed, and the laws that were fitted to it.

    ``changes``: ``depth``, ``change``, ``recipe`` (what was changed), ``seed``; ``fits``: ``recipe``,
    ``law``, ``depth``, ``value``. Both axes are logarithmic: a power of N is a straight line.
    """
    shown = changes.filter(pl.col("change").is_finite() & (pl.col("change") > 0))
    if shown.is_empty():
        return nothing(HEIGHT)
    scale, axis = log_or_linear(shown["change"].to_list(), log=True)
    deepest = int(_most(shown["depth"]))
    ticks = [n for n in (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500) if n <= deepest]
    across = alt.Axis(values=ticks, grid=False, format="d")
    x = alt.X("depth:Q", title="sublayers N", scale=alt.Scale(type="log", nice=False), axis=across)
    kinds = list(dict.fromkeys(shown["recipe"].to_list()))
    scales = alt.Scale(domain=kinds, range="category")
    legend = alt.Legend(orient="top", direction="vertical", symbolType="circle", labelLimit=400)
    colour = alt.Color("recipe:N", scale=scales, title=None, legend=legend)
    dots = alt.Chart(rows(shown)).mark_circle(size=30, opacity=0.7, clip=True)
    told = [alt.Tooltip("recipe:N", title="changed"), alt.Tooltip("depth:Q")]
    layers: list[Any] = [
        dots.encode(
            x=x,
            y=alt.Y("change:Q", title="mean square change", scale=scale, axis=axis),
            color=colour,
            tooltip=[*told, alt.Tooltip("change:Q", format=".3g"), alt.Tooltip("seed:Q")],
        )
    ]
    lines = fits.filter((pl.col("value") > 0) & pl.col("law").is_in(list(LAWS)))
    if len(lines):
        known = [words for law, words in LAWS.items() if law in set(lines["law"])]
        dash = alt.Scale(domain=known, range=[list(DASHES[words]) for words in known])
        lines = lines.with_columns(pl.col("law").replace(LAWS))
        strokes = alt.Legend(orient="bottom", symbolType="stroke")
        line = alt.Chart(rows(lines)).mark_line(strokeWidth=1.5, clip=True)
        layers.append(
            line.encode(
                x=x,
                y=alt.Y("value:Q", scale=scale, title="mean square change"),
                color=colour,
                strokeDash=alt.StrokeDash("law:N", scale=dash, title=None, legend=strokes),
                tooltip=[*told, alt.Tooltip("law:N"), alt.Tooltip("value:Q", format=".3g")],
            )
        )
    return finish(layers, HEIGHT)


def strips(frame: pl.DataFrame, order: Sequence[str], quantities: Sequence[str], axis_title: str) -> Drawn:
    """Draw a strip for each category and quantity, with a tick per row.

    ``frame``: ``category``, ``what`` (the quantity), ``label`` and ``value``, which is positive.
    """
    shown = frame.filter(pl.col("value").is_finite() & (pl.col("value") > 0))
    if shown.is_empty():
        return nothing(HEIGHT)
    scale, axis = log_or_linear(shown["value"].to_list(), log=True)
    named = shown.with_columns(row=pl.col("category") + ", " + pl.col("what"))
    present = set(named["row"].to_list())
    categories = dict.fromkeys([*order, *shown["category"].to_list()])
    sort = [n for category in categories for what in quantities if (n := f"{category}, {what}") in present]
    ticks = alt.Chart(rows(named)).mark_tick(thickness=1.5, size=13, opacity=0.55)
    drawn = ticks.encode(
        x=alt.X("value:Q", title=axis_title, scale=scale, axis=axis),
        y=alt.Y("row:N", sort=sort, title=None, axis=alt.Axis(ticks=False, grid=False)),
        color=alt.Color("what:N", scale=alt.Scale(domain=list(quantities), range="category"), title=None),
        tooltip=[alt.Tooltip("label:N"), alt.Tooltip("what:N"), alt.Tooltip("value:Q", format=".3g")],
    )
    return finish([drawn], 20 * len(present))


def lines(frame: pl.DataFrame, x_axis: str, y_axis: str, *, log: bool = False) -> Drawn:
    """Draw ``y`` against ``x`` with a point per row, and a line per ``group`` if that column exists."""
    shown = frame.filter(pl.col("y").is_finite() & ((pl.col("y") > 0) | pl.lit(not log)))
    if shown.is_empty():
        return nothing(HEIGHT)
    scale, axis = log_or_linear(shown["y"].to_list(), log=log)
    told = [alt.Tooltip("x:Q", title=x_axis), alt.Tooltip("y:Q", title=y_axis, format=".3g")]
    whole = shown["x"].dtype.is_integer()
    ticks = alt.Axis(grid=False, format="d", tickMinStep=1) if whole else alt.Axis(grid=False)
    base = alt.Chart(rows(shown)).encode(
        x=alt.X("x:Q", title=x_axis, scale=_snug(), axis=ticks),
        y=alt.Y("y:Q", title=y_axis, scale=scale, axis=axis),
    )
    if "group" in shown.columns:
        groups = list(dict.fromkeys(shown["group"].to_list()))
        legend = alt.Legend(orient="top", title=None, symbolType="stroke")
        colour = alt.Color("group:N", scale=alt.Scale(domain=groups, range="category"), legend=legend)
        base, told = base.encode(color=colour), [alt.Tooltip("group:N", title="line"), *told]
    line = base.mark_line(strokeWidth=1.5, clip=True)
    return finish([line, base.mark_circle(size=36, clip=True).encode(tooltip=told)], HEIGHT)


def _whole(most: int, first: int = 1) -> alt.Axis:
    step = max(1, 2 ** round(math.log2(max(1, most) / 8)))
    step = step if step < 4 else 5 * max(1, round(step / 5))
    values = sorted({first, *range(step, most + 1, step)}) if step > 1 else list(range(first, most + 1))
    return alt.Axis(values=values, grid=False, format="d")


def _snug() -> alt.Scale:
    return alt.Scale(nice=False, zero=False, padding=8)


def _most(column: pl.Series) -> float:
    return max((float(v) for v in column.drop_nulls()), default=0.0)

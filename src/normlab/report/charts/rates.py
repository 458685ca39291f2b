"""The loss of short trainings by their learning rate, with the range that trains and the rate of today."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from normlab.report.charts.axes import log_or_linear, nothing
from normlab.report.charts.theme import Drawn, finish, rows

HEIGHT = 260


def loss_by_rate(
    trials: pl.DataFrame, *, today: float, usable: tuple[float, float] | None, reference: float, words: str
) -> Drawn:
    """Draw ``loss`` against ``rate``; a trial that ended early, without a loss, is a cross at the top.

    ``trials`` has ``rate``, ``loss`` (null: it ended early) and ``ended``. The band is the range that trains,
    the dashed line today's rate; the dotted one is ``reference``, by its ``words``.
    """
    if trials.is_empty():
        return nothing(HEIGHT)
    whole = trials.filter(pl.col("loss").is_finite())
    low = min([reference, *whole["loss"].to_list()])
    top = max([reference, *whole["loss"].to_list()])
    edge = max(top - low, 1e-9) * 0.08
    scale, axis = log_or_linear([*trials["rate"].to_list(), today], log=True)
    x = alt.X("rate:Q", scale=scale, axis=axis, title="learning rate")
    domain = alt.Scale(domain=[low - edge, top + 2 * edge], nice=False, zero=False)
    y = alt.Y("loss:Q", scale=domain, title="loss at the end", axis=alt.Axis(tickCount=5))
    shown = trials.with_columns(loss=pl.col("loss").fill_null(top + edge))
    tips = [alt.Tooltip("rate:Q", format=".2~e"), alt.Tooltip("loss:Q", format=".3f"), "ended:N"]
    layers: list[Any] = []
    if usable is not None:
        band = alt.Chart(alt.InlineData(values=[{"rate": usable[0], "end": usable[1]}]))
        layers.append(band.mark_rect(opacity=0.12, style="ink").encode(x=x, x2="end:Q"))
    level = alt.Chart(alt.InlineData(values=[{"loss": reference, "words": words}]))
    layers.append(level.mark_rule(strokeDash=[2, 3], style="faint").encode(y=y))
    text = level.mark_text(align="right", baseline="top", dx=-4, dy=4, style="faint")
    layers.append(text.encode(y=y, x=alt.value("width"), text="words:N"))
    now = alt.Chart(alt.InlineData(values=[{"rate": today, "words": "today"}]))
    layers.append(now.mark_rule(strokeDash=[6, 4], style="ink").encode(x=x))
    name = now.mark_text(align="left", baseline="bottom", dx=4, dy=-4, style="ink", fontSize=11)
    layers.append(name.encode(x=x, y=alt.value("height"), text="words:N"))
    if len(whole):
        line = alt.Chart(rows(whole)).encode(x=x, y=y, tooltip=tips)
        layers.append(line.mark_line(point=alt.OverlayMarkDef(size=50, filled=True)))
    if len(early := shown.filter(pl.col("ended") != "")):
        cross = alt.Chart(rows(early)).mark_point(shape="cross", angle=45, size=60, style="alarm")
        layers.append(cross.encode(x=x, y=y, tooltip=[tips[0], tips[2]]))
    return finish(layers, HEIGHT)

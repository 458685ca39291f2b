"""Charts of forecasts: the probability that a training gets going, over learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import altair as alt
import polars as pl

from normlab.figures.axes import nothing
from normlab.figures.theme import Drawn, finish, focused, recipe_colour, recipe_dash, rows

HEIGHT: Final = 260
PROBABILITY: Final = "probability that the first steps succeed"


def over_rates(
    frame: pl.DataFrame,
    recipes: Sequence[str],
    today: float,
    *,
    thresholds: Sequence[float],
    legend: bool = False,
) -> Drawn:
    """Draw a line of probabilities for each plan, and the planned learning rate as a bar.

    ``frame``: ``recipe``, the plan, ``lr`` and ``probability``, which is null where the forecaster abstains.
    ``thresholds`` are the probabilities from which on, and up to which, there is an answer. ``legend``: on a
    page whose own legend does not name the plans.
    """
    shown = frame.filter(pl.col("probability").is_not_null())
    if shown.is_empty():
        return nothing(HEIGHT)
    rates = sorted(set(frame["lr"].to_list()))
    scale = alt.Scale(type="log", domain=[rates[0] / 1.5, rates[-1] * 1.5], nice=False)
    x = alt.X(
        "lr:Q", title="learning rate", scale=scale, axis=alt.Axis(values=rates, format=".2~e", grid=False)
    )
    y = alt.Y("probability:Q", title=PROBABILITY, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(tickCount=5))
    planned = alt.Chart(rows(pl.DataFrame({"lr": [today], "at": ["planned"]}))).encode(x=x)
    bar = planned.mark_rule(strokeWidth=7, opacity=0.2, style="ink")
    name = planned.mark_text(style="faint", align="left", dx=8, baseline="top").encode(
        y=alt.value(2), text="at:N"
    )
    levels = alt.Chart(rows(pl.DataFrame({"p": [float(p) for p in thresholds]})))
    level = levels.mark_rule(strokeDash=[5, 4], style="faint").encode(y=alt.Y("p:Q", title=PROBABILITY))
    colour, dash = recipe_colour(recipes), recipe_dash(recipes)
    if legend:
        samples = alt.Legend(orient="top", title=None, symbolType="stroke")
        colour, dash = colour.legend(samples), dash.legend(samples)
    base = alt.Chart(rows(shown)).encode(x=x, y=y, color=colour, opacity=focused(0.95, 0.08))
    line = base.mark_line(strokeWidth=2).encode(strokeDash=dash)
    told = [
        alt.Tooltip("recipe:N", title="plan"),
        alt.Tooltip("lr:Q", title="learning rate", format=".2~e"),
        alt.Tooltip("probability:Q", format=".2f"),
    ]
    return finish([bar, name, level, line, base.mark_circle(size=46).encode(tooltip=told)], HEIGHT)

"""Charts of a quantity by depth: a line per stack, with its spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.report.charts.theme import Drawn, dash, rows

WIDTH: Final = 340
HEIGHT: Final = 150


def hidden_scale(frame: pl.DataFrame, domain: Sequence[float]) -> Drawn:
    """Draw the root mean square of the stream against the sublayers that it has passed, on a log scale.

    ``frame`` has a row a point: ``stack``, ``sublayer``, ``low``, ``mid``, ``high``; positive values.
    ``domain`` is the vertical axis, given so that pictures can be compared. Of a fixed size, for small ones.
    """
    stacks = frame["stack"].unique(maintain_order=True).to_list()
    low, high = domain
    ticks = [t for e in range(-6, 10) for t in (float(f"1e{e}"), float(f"3e{e}")) if low <= t <= high]
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    axis = alt.Axis(values=ticks, format="~g")
    y = partial(alt.Y, type="quantitative", scale=scale, title="RMS", axis=axis)
    across = alt.Axis(grid=False, tickCount=6, format="d")
    x = alt.X("sublayer:Q", title="sublayers passed", scale=alt.Scale(nice=False), axis=across)
    colours = alt.Scale(domain=stacks, range="category")
    dashes = alt.Scale(domain=stacks, range=[list(dash(i)) for i in range(len(stacks))])
    legend = alt.Legend(
        orient="top-left", direction="horizontal", symbolType="stroke", symbolSize=400, offset=2
    )
    base = alt.Chart(rows(frame)).encode(x=x)
    band = base.mark_area(clip=True, opacity=0.25, strokeWidth=0)
    line = base.mark_line(clip=True)
    layers: list[Any] = [
        band.encode(y=y("low"), y2="high:Q", fill=alt.Fill("stack:N", legend=None, scale=colours)),
        line.encode(
            y=y("mid"),
            color=alt.Color("stack:N", title=None, legend=legend, scale=colours),
            strokeDash=alt.StrokeDash("stack:N", title=None, legend=legend, scale=dashes),
        ),
    ]
    apart = alt.Resolve(legend=alt.LegendResolveMap(fill="independent"))  # or the band's none counts for all
    return alt.layer(*layers, resolve=apart).properties(width=WIDTH, height=HEIGHT)

"""Colours, dashes and fonts of all charts, and the signal that highlights a recipe.

A chart names no colour. It asks for the range ``category`` or for a style (``ink``, ``faint``,
``alarm``), and ``theme`` fills these in, so that one definition serves screen, dark screen and paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import altair as alt
import polars as pl
import polars.selectors as cs

from normlab.config.outcome import IGNORES_SOURCE

Mode = Literal["light", "dark"]
Drawn = alt.LayerChart | alt.FacetChart
"""What a figure returns; ``.save("x.svg")``, ``.png`` or ``.pdf`` needs no browser."""

PALETTE: Final[dict[Mode, tuple[str, ...]]] = {
    "light": ("#3663db", "#ee5e23", "#459c7a", "#64098e", "#7e5403", "#0aa0d2", "#672131", "#5f6772"),
    "dark": ("#5b8aff", "#e58212", "#5fe6b4", "#a968b8", "#fdc436", "#48d7fe", "#c4604f", "#979fab"),
}
"""Eight colours a mode, found by search: apart from each other by at least 0.08 in OKLab in normal
sight, protanopia and deuteranopia (Machado et al. 2009), 3:1 or more against the background."""

MANY: Final = 8
"""More recipes than this are drawn with thinner lines, and with the band of one that is in focus alone."""

DASHES: Final[tuple[tuple[int, ...], ...]] = ((1, 0), (7, 3), (2, 2), (8, 3, 2, 3), (14, 3, 2, 3, 2, 3))
"""So that lines stay apart in black and white, too; colour and dash go round independently."""

INK: Final[dict[Mode, tuple[str, str, str, str, str]]] = {
    "light": ("#ffffff", "#1d2530", "#69727f", "#e4e7eb", "#b3261e"),
    "dark": ("#171b21", "#e7eaee", "#98a1ad", "#2b323b", "#ff8a80"),
}
"""Paper, ink, faint, rule and alarm of a mode."""
FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"

OUTCOMES: Final[dict[str, str]] = {
    "trained": "circle",
    "stuck": "square",
    "diverged": "cross",
    IGNORES_SOURCE: "diamond",
    "failed": "triangle-up",
}
"""Marker by outcome, the same in every chart; a run that did not train is drawn hollow."""


def colour(index: int, mode: Mode = "light") -> str:
    """Return the hex colour of the recipe at ``index``; after eight, colours repeat with another dash."""
    return PALETTE[mode][index % len(PALETTE[mode])]


def dash(index: int) -> tuple[int, ...]:
    """Return the dash pattern (drawn, left out, ... in px) of the recipe at ``index``."""
    turn = index // len(PALETTE["light"])
    return DASHES[(index + turn) % len(DASHES)]


def recipe_colour(recipes: Sequence[str]) -> alt.Color:
    """Return the colour of each recipe, in the comparison's order."""
    scale = alt.Scale(domain=list(recipes), range="category")
    return alt.Color(field="recipe", type="nominal", scale=scale, title=None)


def recipe_dash(recipes: Sequence[str]) -> alt.StrokeDash:
    """Return the dash of each recipe, in the comparison's order."""
    scale = alt.Scale(domain=list(recipes), range=[list(dash(i)) for i in range(len(recipes))])
    return alt.StrokeDash(field="recipe", type="nominal", scale=scale, title=None)


def finish(layers: Sequence[Any], height: int) -> Drawn:
    """Return the layers as one chart, as wide as its container, ``height`` px high.

    Its signal ``focus`` holds the name of the recipe to highlight; empty: none.
    """
    focus = alt.param(name="focus", value="")
    return alt.layer(*layers).add_params(focus).properties(width="container", height=height)


def focused(full: float, dimmed: float = 0.07, *, alone: float | None = None) -> Any:
    """Return the opacity: ``full`` without a recipe in focus; else ``alone`` for it, ``dimmed`` for others.

    ``alone`` is ``full`` unless it is given.
    """
    picked = alt.when("focus == ''").then(alt.value(full)).when("datum.recipe == focus")
    return picked.then(alt.value(full if alone is None else alone)).otherwise(alt.value(dimmed))


def theme(mode: Mode = "light", *, legend: bool = True) -> dict[str, Any]:
    """Return the Vega-Lite ``config`` of a mode; ``legend=False`` if the page has its own legend."""
    paper, ink, faint, rule, alarm = INK[mode]
    return {
        "background": paper,
        "font": FONT,
        "view": {"stroke": None, "continuousWidth": 420, "continuousHeight": 260},
        "range": {"category": list(PALETTE[mode])},
        "axis": {
            "labelColor": faint,
            "titleColor": faint,
            "gridColor": rule,
            "domainColor": rule,
            "tickColor": rule,
            "labelFontSize": 11,
            "titleFontSize": 11,
            "titleFontWeight": "normal",
            "titlePadding": 8,
            "labelLimit": 190,
            "tickSize": 4,
        },
        "legend": {"disable": not legend, "labelColor": ink, "labelFontSize": 11, "symbolStrokeWidth": 2},
        "title": {"color": ink, "anchor": "start", "fontSize": 13, "fontWeight": 600},
        "line": {"strokeWidth": 2, "strokeJoin": "round"},
        "style": {
            "ink": {"color": ink},
            "faint": {"color": faint, "fontSize": 11},
            "alarm": {"color": alarm, "fontSize": 11},
        },
    }


def rows(frame: pl.DataFrame) -> alt.InlineData:
    """Return a table as inline data: CSV text with floats of five digits, small and cheap to copy."""
    short = frame.with_columns(cs.float().round_sig_figs(5))
    kinds = {
        name: "number" if dtype.is_numeric() else "boolean" if dtype == pl.Boolean else "string"
        for name, dtype in frame.schema.items()
    }
    return alt.InlineData(values=short.write_csv(), format=alt.CsvDataFormat(type="csv", parse=kinds))

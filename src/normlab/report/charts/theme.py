"""Colours, dashes, markers and fonts of all charts, without anything that draws.

A chart names no colour. It asks for the range ``category`` or for a style (``ink``, ``faint``,
``alarm``), and ``theme`` fills these in, so that one definition serves light screens, dark ones and paper.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from normlab.base.metric import IGNORES_SOURCE

Mode = Literal["light", "dark"]

PALETTE: Final[dict[Mode, tuple[str, ...]]] = {
    "light": ("#3663db", "#ee5e23", "#459c7a", "#64098e", "#7e5403", "#0aa0d2", "#672131", "#5f6772"),
    "dark": ("#5b8aff", "#e58212", "#5fe6b4", "#a968b8", "#fdc436", "#48d7fe", "#c4604f", "#979fab"),
}
"""Eight colours for each mode, found by search: at least 0.08 apart from each other in OKLab in normal sight,
protanopia and deuteranopia (Machado et al. 2009), with a contrast of 3:1 or more to the background."""

SERIES: Final = "recipe"
"""The column that says which series a point belongs to. A series is what has a colour of its own, the same
in all charts of a page, and can be picked out in the page's legend: a recipe on the page of a comparison,
elsewhere a learning rate, a size, the role of a sublayer, a side of a run, or what an effect says of its
finding. The column is called after the first of these; the CSV files of charts have it as a heading."""

MANY: Final = 8
"""With more series than this, lines are thinner, and only the series in focus has a band."""

POINTS: Final = 400
"""Points that a line may have in a chart; the full table is a CSV file beside the page."""

DASHES: Final[tuple[tuple[int, ...], ...]] = ((1, 0), (7, 3), (2, 2), (8, 3, 2, 3), (14, 3, 2, 3, 2, 3))
"""Dashes tell lines apart even in black and white; colours and dashes repeat independently."""

INK: Final[dict[Mode, tuple[str, str, str, str, str]]] = {
    "light": ("#ffffff", "#1d2530", "#69727f", "#e4e7eb", "#b3261e"),
    "dark": ("#171b21", "#e7eaee", "#98a1ad", "#2b323b", "#ff8a80"),
}
"""Paper, ink, faint, rule and alarm of a mode."""
FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"

ENDED_EARLY: Final = "ended early"
"""The outcome of a trial that was not worth going on with; its page says why."""
OUTCOMES: Final[dict[str, str]] = {
    "trained": "circle",
    "stuck": "square",
    "diverged": "cross",
    IGNORES_SOURCE: "diamond",
    "failed": "triangle-up",
    ENDED_EARLY: "cross",
}
"""Marker by outcome, the same in every chart; a run that did not train is drawn hollow."""


def colour(index: int, mode: Mode = "light") -> str:
    """Return the hex colour of the series at ``index``; after eight, colours repeat with other dashes."""
    return PALETTE[mode][index % len(PALETTE[mode])]


def dash(index: int) -> tuple[int, ...]:
    """Return the dash pattern (drawn, left out, ... in px) of the series at ``index``."""
    turn = index // len(PALETTE["light"])
    return DASHES[(index + turn) % len(DASHES)]


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
            "halo": {"stroke": paper, "strokeWidth": 4, "fontSize": 11},
        },
    }

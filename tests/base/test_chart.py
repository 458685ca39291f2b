"""Charts as data: what tells them apart, and the columns that their tables must have."""

from __future__ import annotations

import pytest

from normlab.base.chart import Bars, ByDepth, BySteps, Cells, Drawing, Growth, HeatMap, Lines, Strips

CHARTS = {
    "a-loss": (
        Lines("a", "Title", "step", "loss", "steps", "loss in nats", group="recipe", theory="bound"),
        {"step", "loss", "recipe", "bound"},
    ),
    "b-rate": (
        Bars("b", "Title", "recipe", "rate", "recipe", "best rate", panel="size"),
        {"recipe", "rate", "size"},
    ),
    "c-share": (Cells("c", "Title", "of", "to", "share", "from", "to"), {"of", "to", "share"}),
    "d": (
        Strips("d", "Title", "kind", "parameter", {"size": "norm", "share": "part"}, "size"),
        {"kind", "parameter", "norm", "part"},
    ),
    "e-largest": (
        ByDepth("e", "Title", "largest", "largest value", theory="expected", bounds=("low", "high")),
        {"stack", "index", "largest"},
    ),
    "f": (BySteps("f", "Title", "norm"), {"stack", "index", "module", "step", "value"}),
    "g": (HeatMap("g", "Title", "of", "to", "share", "from", "to"), {"stack", "of", "to", "share"}),
    "h": (Growth("h", "Title", "fits", {"noise": "noise"}), {"stack", "kind", "depth", "change", "seed"}),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_has_a_name_and_asks_for_the_columns_that_it_shows(name):
    drawing, columns = CHARTS[name]
    assert drawing.name == name
    assert set(drawing.columns) == columns
    assert Drawing.from_plain(drawing.to_plain()) == drawing

"""Level, coverage and power of comparisons: simulated, and as docs/statistics.md has them."""

from __future__ import annotations

import json

import pytest

from normlab.judging.statistics import LEVEL
from scripts import script

seeds = script("seeds")
KEPT = json.loads(seeds.RESULTS.read_text(encoding="utf-8"))
AGAIN = "python benchmarks/seeds.py --write"

MOST_FALSE = 0.07
"""The largest share of comparisons of equals that may find a difference, at a level of 0.05."""
LEAST_COVERED = 0.93
"""The smallest share of intervals that must hold the truth."""


def within_bounds(results):
    bad = [
        cell
        for cell in results["cells"]
        if cell["false_positives"] > MOST_FALSE
        or cell["coverage"] < LEAST_COVERED
        or cell["coverage_of_means"] < LEAST_COVERED
        or cell["false_positives_of_training"] > LEVEL
    ]
    return bad == []


def test_the_tables_are_those_of_the_kept_simulation():
    document = seeds.DOCUMENT.read_text(encoding="utf-8")
    assert seeds.written(document, KEPT) == document, f"docs/statistics.md is old; type: {AGAIN}"
    assert KEPT["draws"] == 10_000
    assert within_bounds(KEPT)


def test_detectable_differences_are_those_of_the_code():
    for row in KEPT["detectable"]:
        assert seeds.detectable(row["recipes"], row["seeds"]) == pytest.approx(row["sd"], rel=1e-6), AGAIN


@pytest.mark.slow
def test_level_and_coverage_hold_in_every_cell():
    found = seeds.simulate()
    assert within_bounds(found)
    for cell, kept in zip(found["cells"], KEPT["cells"], strict=True):
        assert cell == pytest.approx(kept, abs=1e-3), AGAIN


def test_a_document_without_a_place_for_a_table_is_refused():
    whole = seeds.DOCUMENT.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="power"):
        seeds.written(whole.replace("<!-- end of power -->", ""), KEPT)

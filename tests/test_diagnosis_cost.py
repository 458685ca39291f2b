"""The page of what a diagnosis costs, and the measurement behind it."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest

from normlab.diagnosis import registered
from scripts import script

cost = script("diagnosis")
ROWS, MACHINE = cost.kept()
AGAIN = "python benchmarks/diagnosis.py"
ROW = cost.Row(6, "cheap", 12.0, {"scales": 9.0, "similarity": 2.0, "attention": 1.0}, 14.0, 25.0, 2**31, 1.9)


def test_the_page_is_the_generated_one():
    assert cost.PAGE.read_text(encoding="utf-8") == cost.page(), (
        f"docs/diagnosis-cost.md is old; type: {AGAIN} --page"
    )


def test_every_depth_and_preset_is_measured():
    found = [(row.layers, row.preset) for row in ROWS]
    assert sorted(found) == sorted([(0, "standard"), *((n, p) for n in cost.LAYERS for p in cost.PRESETS)])
    assert all(set(row.studies) >= {"scales", "sublayer_gradients", "attention"} for row in ROWS)
    assert MACHINE


def test_eighteen_layers_of_each_stack_cost_what_they_may():
    (row,) = (row for row in ROWS if not row.layers)
    assert row.process_seconds <= cost.ALLOWED_SECONDS
    assert row.peak_bytes <= cost.ALLOWED_GIB * cost.GIB


def test_the_cost_grows_no_faster_than_depth():
    for preset in cost.PRESETS:
        those = [row for row in ROWS if row.layers and row.preset == preset]
        fits = cost.fits([row.layers for row in those], [row.seconds for row in those])
        power = next(fit for fit in fits if fit.law == "power")
        assert power.exponent < 1.2, preset


@pytest.mark.parametrize("exponent", [1, 2])
def test_growth_is_that_of_the_seconds(exponent: int):
    said = cost.growth([replace(ROW, layers=n, seconds=0.5 * n**exponent) for n in (6, 12, 24)])
    assert re.search(rf"p = {exponent}\.00 .*{exponent}\.00 to {exponent}\.00\)", said)
    assert bool(re.search(r"R² = 1\.000 .*0\.50 s a", said)) == (exponent == 1)


def test_what_is_written():
    assert list(cost.table([ROW]))[-1] == "| 6 | 12.0 | 2.00 | 25 | 2.0 GiB | 1.9 |"
    assert cost.slowest(ROW, 2) == "`scales` 9.0 s, `similarity` 2.0 s"
    assert ": kept." in cost.deep(ROW)
    assert ": not kept." in cost.deep(replace(ROW, seconds=90.5))
    assert ": not kept." in cost.deep(replace(ROW, peak_bytes=11 * cost.GIB))


def test_a_small_encoder_is_diagnosed(monkeypatch):
    monkeypatch.setattr(cost, "SIZE", replace(cost.SIZE, dim=16, ffn_dim=16, heads=2))
    monkeypatch.setattr(cost, "ROWS", 2)
    monkeypatch.setattr(cost, "THREADS", 1)
    found = cost.diagnosed(2, "cheap")
    assert 0 < sum(found["seconds"].values()) <= found["total"]
    assert [study.name for study in registered("cheap")] == list(found["seconds"])


def test_a_process_is_timed_and_one_that_fails_is_told():
    said = 'print(\'{"total": 0.25, "seconds": {"scales": 0.125}}\')'
    row = cost.timed(1, "cheap", [sys.executable, "-c", said])
    assert (row.layers, row.preset, row.seconds, row.studies) == (1, "cheap", 0.25, {"scales": 0.12})
    assert row.process_seconds > 0 < row.peak_bytes
    with pytest.raises(RuntimeError, match=r"\b1 layers, cheap: .* 3\b"):
        cost.timed(1, "cheap", [sys.executable, "-c", "raise SystemExit(3)"])

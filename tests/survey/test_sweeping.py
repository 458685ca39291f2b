"""Rates at which models are measured without training."""

from __future__ import annotations

from itertools import pairwise

import pytest

from normlab.diagnosis.rules.features import VERSION
from normlab.forecast.table import SweptRate, write
from normlab.survey.design import models, start_rate
from normlab.survey.sweeping import grid, sweep


def test_the_grid_encloses_the_rate_that_a_search_begins_with():
    model = next(models())
    rates = grid(model)
    assert all(high / low == pytest.approx(4.0, rel=1e-3) for low, high in pairwise(rates))
    assert rates[0] <= start_rate(model) / 16
    assert rates[-1] >= start_rate(model) * 4096


def test_rates_that_are_in_the_table_are_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr("normlab.survey.sweeping.swept", None)  # nothing is measured
    model, table = next(models()), tmp_path / "sweeps.jsonl.xz"
    known = [SweptRate(model.name, lr, {"critical": 0.0}, VERSION) for lr in grid(model)]
    write(table, known)
    assert sweep((model.name,), table, tmp_path) == known

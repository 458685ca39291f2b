"""A forecast in a diagnosis: its features, what is tried in the place of the plan, and its absence."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from diagnosis.labelled import BATCH, Labelled, loss
from normlab.diagnosis import Diagnosis, diagnose, forecasting
from normlab.diagnosis.rules.features import VERSION
from normlab.diagnosis.rules.finding import Tables
from normlab.forecast.answer import Answer
from normlab.forecast.shipping import shipped
from normlab.trace.step import scaled_lr


def started() -> Labelled:
    """A GPT that starts as those that the forecaster has seen."""
    torch.manual_seed(0)
    model = Labelled()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.xavier_normal_(p)
    return model


def diagnosed(lr: float, **options) -> Diagnosis:
    return diagnose(started(), BATCH, loss=loss, lr=lr, **options)


def forecast(lr: float, **options) -> Answer:
    found = diagnosed(lr, **options).forecast
    assert found is not None
    return found


def test_a_diagnosis_begins_with_the_forecast():
    found = diagnosed(1e-3)
    assert found.forecast is not None
    assert found.forecast.probability is not None
    assert str(found).splitlines()[0] == found.forecast.sentence
    assert found.to_plain()["forecast"]["sentence"] == found.forecast.sentence
    assert found.forecast.sentence in found._repr_html_()
    moves = {f["name"]: f["moves_forecast"] for f in found.to_plain()["findings"]}
    assert {True, False} >= set(moves.values())
    assert diagnosed(1e-3, preset="cheap").forecast is None


def test_a_large_rate_has_a_smaller_probability_and_lower_ones_are_tried():
    small, large = forecast(3e-3), forecast(1.0)
    assert small.probability is not None
    assert large.probability is None or large.probability < small.probability
    known, _ = shipped(VERSION)
    tables = Tables(diagnosed(0.1).tables, 0.1)
    assert known.probability(forecasting.told_features(tables)) < 2 / 3
    tried = forecast(0.1).tried
    assert [(t.lr, t.warmup_steps) for t in tried] == [
        (0.1, 0),
        (0.1, forecasting.WARMUP),
        (pytest.approx(0.025), 0),
        (pytest.approx(0.00625), 0),
    ]


def test_what_is_tried_has_the_features_of_a_plan_that_says_so():
    lr = 0.1
    [lower] = [t for t in forecast(lr).tried if t.lr == pytest.approx(lr / 4)]
    assert lower.probability == pytest.approx(forecast(lr / 4).probability)
    [warm] = [t for t in forecast(lr).tried if t.warmup_steps]
    planned = forecast(lr, warmup_steps=forecasting.WARMUP)
    assert warm.probability == pytest.approx(planned.probability)
    assert len(planned.tried) == 1 + len(forecasting.LOWER), "there is a warm-up already"


def test_a_warm_up_beyond_those_that_were_seen_counts_as_the_longest():
    long, longest = (forecast(1e-3, warmup_steps=n) for n in (4000, forecasting.LONGEST))
    assert long.probability == pytest.approx(longest.probability)
    assert "4,000" not in long.sentence


def test_a_slow_rehearsal_is_made_once(monkeypatch):
    monkeypatch.setattr(forecasting, "SLOW", 0.0)
    assert len(forecast(0.1).tried) == 1


def test_a_training_that_has_begun_has_no_forecast():
    model = started()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    assert diagnose(model, BATCH, loss=loss, optimiser=optimiser).forecast is not None
    loss(model, BATCH).backward()
    optimiser.step()
    assert diagnose(model, BATCH, loss=loss, optimiser=optimiser).forecast is None


def test_a_forecast_that_fails_is_a_finding(monkeypatch):
    monkeypatch.setattr(forecasting, "shipped", lambda version: 1 / 0)
    found = diagnosed(1e-3)
    assert found.forecast is None
    assert any("ZeroDivisionError" in f.sentence for f in found.findings if f.name == "not_done")


def test_rates_are_scaled_and_put_back():
    p = [torch.nn.Parameter(torch.ones(2))]
    known = torch.optim.SGD([{"params": p, "lr": 0.5}], lr=0.1)
    with scaled_lr(known, 0.5) as scaled:
        assert scaled is known
        assert known.param_groups[0]["lr"] == 0.25
    assert known.param_groups[0]["lr"] == 0.5
    with scaled_lr(partial(torch.optim.SGD, lr=torch.tensor(0.5)), 0.5) as make:
        assert make(p).param_groups[0]["lr"].item() == 0.25  # type: ignore[operator]

"""Forecasts of groups that were left out, on tables whose answer is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from normlab.forecast import evaluation, scores
from normlab.forecast.evaluation import CONFIGURATION, MEASURED, SPLITS, WIDE, ceilings, judged, seeds_agree
from normlab.forecast.table import SurveyedRun, SweptRate
from normlab.report.forecast import _ceilings, forecast_report

EDGES = {"post": -3.0, "pre": -1.5, "rezero": -2.5, "keel": -2.0}
"""The decimal logarithm of the largest rate that trains, by placement; ``critical`` measures it."""


def runs(width: float = 32.0, models: int = 4, *, noise: float = 0.0) -> list[SurveyedRun]:
    """Runs that train below the edge of their placement, at rates around it, two seeds each."""
    rng = np.random.default_rng(int(width))
    found = []
    for i, (placement, edge) in enumerate(EDGES.items()):
        for model in range(models):
            for lr in rng.uniform(edge - 1, edge + 1, size=8):
                for seed in (2, 3):
                    critical = lr - edge + rng.normal() * noise
                    found.append(
                        run(f"{placement}{model}", placement, lr, seed, critical, width + i, lr < edge)
                    )
    return found


def run(model, placement, lr, seed, critical, width, trained) -> SurveyedRun:
    choices = {"placement": placement, "norm": "layernorm", "optimiser": "adam", "text": "dates"}
    return SurveyedRun(
        run=f"{model}-{lr}-{seed}",
        model=model,
        kind="drawn",
        choices={**choices, "layers": 2.0, "width": width, "warmup": 0.0},
        lr=10**lr,
        seed=seed,
        steps=200,
        outcome="trained" if trained else "diverged",
        nll=1.0,
        seconds=1.0,
        features={"0": {"critical": critical, "way": critical + 3}},
        version=1,
    )


def test_what_measures_the_edge_carries_to_a_placement_that_was_left_out_and_the_configuration_does_not():
    table = runs()
    measured, configured = (judged(table, "placement", name).scores() for name in (MEASURED, CONFIGURATION))
    assert measured["AUROC"][0] > 0.99
    assert configured["AUROC"][0] < 0.9
    assert measured["log loss"][0] < configured["log loss"][0]
    assert judged(table, "model", CONFIGURATION).scores()["AUROC"][0] > 0.95  # its placement was seen


def test_no_run_is_forecast_by_its_own_group(monkeypatch):
    seen = []

    def recorded(known, asked, encoding):
        seen.append(({r.choices["placement"] for r in known}, {r.choices["placement"] for r in asked}))
        return np.full(len(asked), 0.5)

    monkeypatch.setattr(evaluation, "_forecasts", recorded)
    found = judged(runs(), "placement", MEASURED)
    assert len(seen) == len(EDGES)
    assert all(not known & asked and len(asked) == 1 for known, asked in seen)
    assert not np.isnan(found.p).any()


def test_wide_runs_are_forecast_from_all_others():
    found = judged(runs(), WIDE, MEASURED, wide=runs(width=256.0, models=1))
    assert len(found.p) == 4 * 8 * 2
    assert found.scores()["AUROC"][0] > 0.99


def test_a_run_that_is_not_finite_any_more_is_forecast_to_fail():
    table = runs()
    over = [r for r in table if not r.trained][:3]
    for one in over:
        one.features.pop("0")  # type: ignore[attr-defined]
    p = judged(table, "model", MEASURED).p
    assert [p[table.index(one)] for one in over] == [0.0, 0.0, 0.0]


def test_an_interval_encloses_its_score():
    found = judged(runs(noise=0.5), "model", MEASURED)
    for score, low, high in found.scores().values():
        assert low <= score <= high
        assert not math.isnan(score)


def test_seeds_that_disagree_are_counted():
    table = runs()
    assert seeds_agree(table) == (len(table) // 2, len(table) // 2)
    first = table[0]
    table[1] = run("post0", "post", math.log10(first.lr), 3, 0.0, 32.0, not first.trained)
    assert seeds_agree(table) == (len(table) // 2 - 1, len(table) // 2)


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_has_a_group_for_every_run(split):
    assert all(SPLITS[split](run) for run in runs())


def test_a_ceiling_is_forecast_from_swept_rates_without_the_model_itself():
    table = runs()
    search = [replace(r, kind="search") for r in table if r.seed == 2 and r.model.endswith("0")]
    swept = [
        SweptRate(f"{name}0", 10.0**lr, {"critical": lr - edge, "way": lr - edge + 3}, 2)
        for name, edge in EDGES.items()
        for lr in np.arange(edge - 0.9, edge + 0.9, 0.2)
    ]
    found = ceilings([*search, *(r for r in table if not r.model.endswith("0"))], swept)
    assert [one.model for one in found] == [f"{name}0" for name in EDGES]
    for one, edge in zip(found, EDGES.values(), strict=True):
        assert one.low < 10**edge < one.high
        assert one.forecast == pytest.approx(10**edge, rel=0.5)
        assert one.within(2)
        assert not replace(one, forecast=one.high * 3).within(2)
        assert not replace(one, forecast=None).within(2)
        assert replace(one, low=1e-3, high=1.414e-3).narrowed
        assert not replace(one, low=1e-3, high=2e-3).narrowed
    text = "\n".join(_ceilings([*search, *(r for r in table if not r.model.endswith("0"))], swept))
    assert "Within the factor least often" in text
    assert "post 1 of 1" in text


def test_the_report_names_what_was_judged_and_what_is_missing(monkeypatch):
    monkeypatch.setattr(scores, "RESAMPLES", 20)
    table = [
        replace(r, features={**r.features, "10": r.features["0"], "50": r.features["0"]}) for r in runs()
    ]
    text = forecast_report([*table, *(replace(r, kind="wide") for r in runs(width=256.0, models=1))])
    for wanted in (
        "# Forecasts",
        "One placement left out",
        "Wide models",
        "| configuration |",
        "type normlab",
    ):
        assert wanted in text
    assert "nan" not in text
    assert "One text left out" not in text, "there is one text alone"
    assert text.count("\n| ") > 30

"""Public disputes: two positions each, shared runs, and rates that are each side's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, variance
from types import SimpleNamespace

import pytest

from normlab.lab.config import Config, numbers, run_id
from normlab.papers import ARTEFACTS
from normlab.papers.artefact import Measurement
from normlab.papers.disputes import RATES, SEEDS
from normlab.papers.finding import known_findings
from normlab.papers.lab import Lab
from normlab.papers.studies import rate_search
from normlab.papers.trainings import LAPTOP, at_factor, changed, side_of, sweep

DISPUTES = {id_: one for id_, one in ARTEFACTS.items() if one.kind == "dispute"}
MARGIN = 0.015
"""Bits per byte: less is no gain, as the file of the disputes says."""
BROWN = Path(__file__).parents[2] / "results" / "brown"


def test_every_dispute_is_a_finding_with_both_positions():
    findings = [one for one in known_findings().values() if one.paper == "disputes"]
    assert [one.artefacts for one in findings] == [(id_,) for id_ in DISPUTES]
    assert all(len(one.published) >= 2 for one in DISPUTES.values())
    pieces = [piece for one in findings for piece in one.evidence if piece.effect == "difference"]
    bounds = {piece.expects.bounds for piece in pieces if piece.margin}
    assert {abs(end) for ends in bounds for end in ends if math.isfinite(end)} == {MARGIN}


def test_the_margin_is_what_one_run_a_side_cannot_tell():
    """By the language models with Pre-LN of docs/brown.md, four seeds at the rate that each recipe chose."""
    scores: dict[str, list[float]] = {}
    for folder in BROWN.glob("*/scores.json"):
        config = json.loads(folder.with_name("config.json").read_text(encoding="utf-8"))["config"]
        chosen = {"pre": 0.005, "pre+rmsnorm+rope+swiglu": 0.01}.get(config["recipe"])
        if config["optim"]["lr"] == chosen:
            found = json.loads(folder.read_text(encoding="utf-8"))
            scores.setdefault(config["recipe"], []).append(found["bits_per_byte"])
    assert [len(some) for some in scores.values()] == [4, 4]
    deviation = math.sqrt(fmean(map(variance, scores.values())))
    assert f"{deviation:.4f}" == "0.0054"
    assert pytest.approx(1.96 * math.sqrt(2) * deviation, abs=5e-4) == MARGIN


def test_disputes_share_the_runs_of_their_baseline():
    cells = [
        json.dumps([config.recipe, numbers(config)], sort_keys=True)
        for one in DISPUTES.values()
        for _, _, config in one.trainings[LAPTOP].configs()
    ]
    sides = 1 + len(DISPUTES) + 1  # the baseline, one for each dispute, and Muon with half of the steps
    assert (len(set(cells)), len(cells)) == (sides * len(RATES), (2 * len(DISPUTES) + 1) * len(RATES))


class Planted:
    """A run whose dev NLL is least at the best rate of its width."""

    def __init__(self, config: Config) -> None:
        self.path, self._config = Path(run_id(config)), config
        away = abs(math.log2(config.optim.lr / BEST[config.model.dim]))
        self._nll = math.nan if away > 5 else away

    def config(self) -> Config:
        return self._config

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(best_dev={"nll": self._nll}, ended_as="trained")


BEST = {8: 0.001, 16: 0.008, 32: 0.032}


@pytest.fixture
def runs(monkeypatch):
    """The runs that the study trains, by id, and the cells that it reports; nothing is trained."""
    trained: dict[str, Config] = {}
    reported: dict[str, tuple[Planted, ...]] = {}

    def finished(asked, queue):
        trained.update({run_id(config): config for some in asked.values() for config in some})
        return {name: tuple(map(Planted, some)) for name, some in asked.items()}

    def trainings(lab, *, shown):
        reported.update(lab.runs)
        return Measurement({}, {"runs": []}, {"text": "T"})

    monkeypatch.setattr(rate_search, "finished", finished)
    monkeypatch.setattr(rate_search, "trainings", trainings)
    return trained, reported


def test_each_side_is_reported_at_its_own_best_rate_by_seeds_that_chose_nothing(runs, tmp_path):
    trained, reported = runs
    sides = {f"width {dim}": {"model.dim": dim} for dim in BEST}
    swept = {cell: (Planted(changed(Config(), own)),) for cell, own in sweep(sides, RATES).items()}
    assert {side_of(cell) for cell in swept} == set(sides)
    found = rate_search.tuned(Lab(tmp_path, runs=swept), shown="", seeds=SEEDS, factors=(1, 4))
    assert {*reported} == {at_factor(side, factor) for side in sides for factor in (1, 4)}
    for dim, best in BEST.items():
        for factor in (1, 4):
            configs = [run.config() for run in reported[at_factor(f"width {dim}", factor)]]
            assert {config.optim.lr for config in configs} == {factor * best}
            assert [config.seeds.init for config in configs] == list(SEEDS)
        rates = [row["rate"] for row in found.tables["rates"] if row["cell"] == f"width {dim}"]
        assert rates == sorted(rates)
        assert rates[0] < best < rates[-1], "the best rate has a worse one on either side"
    of_sweep = [config for config in trained.values() if config.seeds.init == 1]
    assert len(of_sweep) == 3 + 2, "a run of the artefact's own is not trained again"
    assert len(found.tables["rates"]) == 3 * len(RATES) + len(of_sweep)
    assert found.facts["rates"] == "at rates of 0.001 (width 8), 0.008 (width 16), 0.032 (width 32)"

"""The forecaster that comes with the package, its card, and fitting another one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from forecast.test_evaluation import runs
from normlab.cli.main import main
from normlab.diagnosis.rules.features import VERSION
from normlab.errors import UserError
from normlab.forecast import shipping
from normlab.forecast.answer import WORDS
from normlab.forecast.card import card
from normlab.forecast.shipping import ship, shipped
from normlab.forecast.table import write


def test_the_shipped_forecaster_knows_its_runs_and_measures_what_a_diagnosis_does():
    forecaster, known = shipped(VERSION)
    assert forecaster.card["runs"] == len(known) >= 1000
    assert set(forecaster.names) <= set(WORDS)
    assert sum(not run.trained for run in known) >= len(known) / 4
    p = forecaster.probabilities([run.features["0"] for run in known])
    trained = [run.trained for run in known]
    assert p[trained].mean() > p[[not t for t in trained]].mean() + 0.2
    scores = forecaster.card["scores with a group left out"]
    for split in ("placement", "depth", "norm", "text", "model"):
        assert scores[split]["features at step 0"]["AUROC"] > scores[split]["configuration"]["AUROC"]


def test_what_was_shipped_is_read_again_and_refused_for_other_features(tmp_path):
    table = runs()
    made = ship(table, feature_version=7, card=card(table), home=tmp_path)
    forecaster, known = shipped(7, tmp_path)
    assert forecaster.to_json() == made.to_json()
    assert [run.run for run in known] == [run.run for run in table]
    assert forecaster.card["runs"] == len(table)
    assert "not how good" in forecaster.card["limits"]
    with pytest.raises(UserError, match="version 7 of the features"):
        shipped(8, tmp_path)


def test_the_command_fits_to_the_narrow_runs_of_a_table(tmp_path, monkeypatch, capsys):
    path, home = tmp_path / "runs.jsonl.xz", tmp_path / "home"
    wide = [replace(run, kind="wide") for run in runs(width=256.0, models=1)]
    write(path, [*runs(), *wide])
    monkeypatch.setattr(shipping, "ship", partial(ship, home=home))
    assert main(["forecast", "--fit", "--table", str(path)]) == 0
    assert "60 trees" in capsys.readouterr().out
    forecaster, known = shipped(VERSION, home)
    assert len(known) == forecaster.card["runs"] == len(runs())
    write(path, runs()[:10])
    assert main(["forecast", "--fit", "--table", str(path)]) == 2
    assert "needs at least 10" in capsys.readouterr().err

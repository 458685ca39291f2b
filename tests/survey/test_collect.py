"""A collection of a few tiny runs, stopped and continued."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from normlab.cli.main import main
from normlab.diagnosis.rules.features import BY_RATE
from normlab.forecast.table import SurveyedRun, read
from normlab.jobs.place import place
from normlab.survey import design
from normlab.survey.collect import Collection


@pytest.fixture
def tiny(monkeypatch):
    """Models of one layer on built-in text, with a budget of 12 steps."""
    one = {"text": ("dates",), "layers": (1,), "width": (16,), "warmup": (0, 4), "optimiser": ("adam",)}
    monkeypatch.setattr(design, "AXES", {**design.AXES, **one})
    monkeypatch.setattr(design, "TEXTS", {"dates": replace(design.TEXTS["dates"], steps=12)})
    monkeypatch.setattr(design, "MOST", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_collection_goes_on_from_its_table(tmp_path):
    root, table = tmp_path / "runs", tmp_path / "runs.jsonl.xz"
    said: list[str] = []
    first = Collection(root, table, said.append)
    first.run(place("local"), 2, most=2)
    begun = len(read(table, SurveyedRun))
    assert begun >= 2
    second = Collection(root, table, said.append)
    second.run(place("local"), 2, most=begun + 2)
    runs = read(table, SurveyedRun)
    assert len(runs) >= begun + 2
    assert len({run.run for run in runs}) == len(runs) == len(said)
    assert runs[:begun] == first.runs == read(table, SurveyedRun)[:begun]
    assert {run.outcome for run in runs} <= {"trained", "stuck", "diverged", "ignores its source"}
    assert not [path for path in root.iterdir() if (path / "config.json").exists()], (
        "measured runs are deleted"
    )
    for run in runs:
        assert set(run.features) <= {"0", "10"}
        assert "0" in run.features
        assert {*BY_RATE, "change", "similarity", "dependency"} <= run.features["0"].keys()
        assert "fell" in run.features.get("10", {"fell": 0.0})


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_nothing_is_begun_after_the_budget(tmp_path):
    collection = Collection(tmp_path / "runs", tmp_path / "runs.jsonl.xz")
    collection.run(place("local"), 1, most=9, until=time.monotonic() - 1)
    assert collection.runs == []


def test_a_run_that_cannot_be_measured_does_not_end_the_collection(tmp_path):
    failed: Future[SurveyedRun] = Future()
    failed.set_exception(IndexError("list index out of range"))
    said: list[str] = []
    collection = Collection(tmp_path / "runs", tmp_path / "runs.jsonl.xz", said.append)
    collection._keep(failed)
    assert said == ["a run could not be measured: IndexError: list index out of range"]
    assert collection.runs == []


def test_a_command_without_anything_to_do_says_what_to_type(capsys):
    assert main(["forecast"]) == 2
    assert "normlab forecast --collect --budget 1h" in capsys.readouterr().err
    assert main(["forecast", "--collect", "--most", "0"]) == 2
    assert "--most is 0" in capsys.readouterr().err

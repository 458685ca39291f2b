"""Kept runs are judged by today's rule for outcomes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import judge_runs
from normlab.base.metric import IGNORES_SOURCE
from normlab.lab.runs import RunFolder

KEPT = Path(__file__).parents[1] / "results"
POST, PRE = "1c982ec80137", "71c7ad163821"
ENTROPY = 6.3


@pytest.fixture
def references(tmp_path, monkeypatch):
    """A text without repetitions in place of the one that the outputs are compared with."""
    text = tmp_path / "data" / "ted.gl-en" / "test.en"
    text.parent.mkdir(parents=True)
    text.write_text("".join(f"line {i}\n" for i in range(1_007)))
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path / "data"))


@pytest.fixture
def results(tmp_path, references):
    """Two kept runs as if they had been judged by another rule."""
    for run in (POST, PRE):
        shutil.copytree(KEPT / "gl-en" / run, tmp_path / "results" / run)
        status = tmp_path / "results" / run / "status.json"
        content = json.loads(status.read_text())
        status.write_text(json.dumps({**content, "outcome": {"state": "stuck", "step": 1, "evidence": ""}}))
    return tmp_path / "results"


def outcome(results, run):
    return RunFolder(results / run).status().outcome


def known(results):
    return {RunFolder(results / PRE).config().data.digest: ENTROPY}


def test_runs_are_judged_by_their_rows_and_outputs(results):
    before = {p: p.read_bytes() for p in results.rglob("*") if p.is_file() and p.name != "status.json"}
    assert len(list(judge_runs.judge(results, known(results)))) == 2
    assert outcome(results, PRE).state == "trained"
    assert outcome(results, PRE).evidence.count("source not exchanged") == 1
    assert outcome(results, POST).state == IGNORES_SOURCE
    assert re.search(r"\d% of the test", outcome(results, POST).evidence)
    assert {p: p.read_bytes() for p in before} == before


def test_a_share_that_was_measured_on_dev_is_not_replaced(results):
    rows = results / POST / "metrics.jsonl"
    content = rows.read_text().replace('"kind": "dev",', '"kind": "dev", "repeated_share": 0.1,')
    rows.write_text(content)
    list(judge_runs.judge(results, known(results)))
    assert outcome(results, POST).state == "trained"


def test_a_run_on_data_that_nobody_compared_stays_as_it_is(results):
    lines = list(judge_runs.judge(results, {}))
    assert all("left as" in line for line in lines)
    assert outcome(results, PRE).state == "stuck"


@pytest.mark.usefixtures("references")
def test_the_kept_runs_are_judged_by_todays_rule():
    """Those of one comparison."""
    entropies = judge_runs.entropies(KEPT / "gl-en-low")
    folders = list(judge_runs.finished(KEPT / "gl-en-low"))
    assert len(folders) == 4
    for folder in folders:
        entropy = entropies[folder.config().data.digest]
        assert folder.status().outcome == judge_runs.judged(folder, entropy)

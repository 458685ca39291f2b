"""The table of the survey: it survives a kill in the middle of a line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from normlab.errors import UserError
from normlab.forecast.table import SurveyedRun, append, groups, read

RUN = SurveyedRun(
    run="abc",
    model="s0",
    kind="search",
    choices={"placement": "post", "width": 16},
    lr=0.001,
    seed=1,
    steps=200,
    outcome="stuck",
    nll=None,
    seconds=1.23456789,
    features={"0": {"loss": 1.0}},
    version=1,
)


def test_runs_come_back_as_they_were_but_for_digits(tmp_path):
    path = tmp_path / "forecast" / "runs.jsonl"
    assert read(path) == []
    for name in ("a", "b"):
        append(path, replace(RUN, run=name))
    assert read(path) == [replace(RUN, run=name, seconds=1.2346) for name in ("a", "b")]
    assert not RUN.trained
    assert replace(RUN, outcome="trained").trained


def test_a_line_that_was_cut_off_is_written_over(tmp_path):
    path = tmp_path / "runs.jsonl"
    append(path, RUN)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    assert [run.run for run in read(path)] == ["abc"]
    append(path, replace(RUN, run="def"))
    assert [run.run for run in read(path)] == ["abc", "def"]


def test_a_line_that_is_no_run_is_named(tmp_path):
    path = tmp_path / "runs.jsonl"
    append(path, RUN)
    path.write_text(path.read_text() + '{"run": 1}\n')
    with pytest.raises(UserError, match=r"line 2 of .*runs\.jsonl"):
        read(path)


def test_runs_are_grouped_by_an_axis():
    pre = replace(RUN, choices={"placement": "pre"})
    assert groups([RUN, pre, RUN], "placement") == {"post": [RUN, RUN], "pre": [pre]}

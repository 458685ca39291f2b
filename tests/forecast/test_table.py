"""The table of the survey: it survives a kill in the middle of a row."""

from __future__ import annotations

import lzma
from dataclasses import replace

import pytest

from normlab.errors import UserError
from normlab.forecast.table import SurveyedRun, SweptRate, append, compact, groups, read

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
    path = tmp_path / "forecast" / "runs.jsonl.xz"
    assert read(path, SurveyedRun) == []
    for name in ("a", "b"):
        append(path, replace(RUN, run=name))
    assert read(path, SurveyedRun) == [replace(RUN, run=name, seconds=1.2346) for name in ("a", "b")]
    assert not RUN.trained
    assert replace(RUN, outcome="trained").trained


@pytest.mark.parametrize("kept", [1, 13, 40, -60, -1])
def test_a_row_that_was_cut_off_goes_when_the_table_is_compacted(tmp_path, kept):
    path = tmp_path / "runs.jsonl.xz"
    append(path, RUN)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:kept])
    assert "abc" in {run.run for run in read(path, SurveyedRun)}
    compact(path)
    append(path, replace(RUN, run="def"))
    assert [run.run for run in read(path, SurveyedRun)][-1] == "def"
    assert {run.run for run in read(path, SurveyedRun)} == {"abc", "def"}


def test_a_compacted_table_is_the_same_and_shorter(tmp_path):
    path = tmp_path / "runs.jsonl.xz"
    for i in range(20):
        append(path, replace(RUN, run=f"run {i}"))
    before, size = read(path, SurveyedRun), path.stat().st_size
    compact(path)
    assert read(path, SurveyedRun) == before
    assert path.stat().st_size < size / 4
    compact(tmp_path / "none.xz")  # there is none: nothing to do


def test_a_line_that_is_no_run_is_named(tmp_path):
    path = tmp_path / "runs.jsonl.xz"
    append(path, RUN)
    path.write_bytes(path.read_bytes() + lzma.compress(b'{"run": 1}\n'))
    with pytest.raises(UserError, match=r"line 2 of .*runs\.jsonl"):
        read(path, SurveyedRun)
    path.write_text('{"run": "abc", "model": "s0"}\n')
    with pytest.raises(UserError, match="not in the format of xz"):
        read(path, SurveyedRun)


def test_runs_are_grouped_by_an_axis():
    pre = replace(RUN, choices={"placement": "pre"})
    assert groups([RUN, pre, RUN], "placement") == {"post": [RUN, RUN], "pre": [pre]}


def test_swept_rates_are_kept_likewise(tmp_path):
    path, rate = tmp_path / "sweeps.jsonl.xz", SweptRate("s0", 0.01, {"loss": 1.0}, version=2)
    append(path, rate)
    assert read(path, SweptRate) == [rate]
    with pytest.raises(UserError, match="line 1"):
        read(path, SurveyedRun)

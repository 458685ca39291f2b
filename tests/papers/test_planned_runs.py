"""Lines of planned runs: each is whole and on the disk, however processes end or meet."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from normlab.cli.presets import CONFIGS
from normlab.errors import UserError
from normlab.papers.experiments import append_line, kept, planned_for, read_experiment, train_missing
from normlab.papers.finding import Expectation, Finding, Piece
from normlab.papers.regimes import Book, Declaration, Setting
from planned import TOY, TrainedNothing


@pytest.mark.parametrize(
    ("before", "keys"),
    [
        ("", ["new"]),
        ('{"key": "k1"}\n', ["k1", "new"]),
        ('{"key": "k1"}\n{"key": "k2", "cel', ["k1", "new"]),
        ('{"key": "k1", "cel', ["new"]),
        ('{"key": "k1"}\n{"key": "k2"}', ["k1", "k2", "new"]),
    ],
    ids=["empty", "whole", "torn", "torn at first", "without newline"],
)
def test_a_line_behind_one_that_a_killed_process_left_is_read(tmp_path, before, keys):
    file = tmp_path / "toy/runs.jsonl"
    file.parent.mkdir()
    file.write_text(before)
    append_line(file, {"key": "new"})
    assert list(kept(file)) == keys
    append_line(file, {"key": "last"})
    assert list(kept(file)) == [*keys, "last"]


def test_lines_that_are_appended_at_once_are_whole(tmp_path):
    file = tmp_path / "runs.jsonl"
    keys = [str(number) for number in range(12)]
    with ThreadPoolExecutor(4) as pool:
        # longer than what a file object writes at once
        list(pool.map(lambda key: append_line(file, {"key": key, "dev": [key] * 5_000}), keys))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(row["key"] for row in rows) == sorted(keys)
    assert all(set(row["dev"]) == {row["key"]} for row in rows)


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/regime.toml").write_text(TOY, encoding="utf-8")
    return read_experiment(tmp_path, "toy", CONFIGS)


def weights_in(runs):
    """The folders of weights that runs still have."""
    return sorted(path.name for path in runs.glob("*/best*"))


def test_weights_are_there_until_the_line_is_on_the_disk(tmp_path, monkeypatch, toy):
    runs, file = tmp_path / "runs", tmp_path / "toy/runs.jsonl"
    TrainedNothing(monkeypatch)
    seen = []

    def fsync(descriptor, really=os.fsync):
        seen.append((len(kept(file)), len(weights_in(runs))))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert len(list(train_missing(toy.missing(file), runs, file))) == 2
    # the lines; before each, what began the run
    assert set(seen) == {(0, 0), (1, 1), (1, 0), (2, 1)}
    assert weights_in(runs) == []


def test_weights_stay_if_the_line_cannot_be_written(tmp_path, monkeypatch, toy):
    runs, file = tmp_path / "runs", tmp_path / "toy/runs.jsonl"
    TrainedNothing(monkeypatch, lambda: file.symlink_to(tmp_path / "elsewhere"))
    with pytest.raises(UserError):
        list(train_missing(toy.missing(file), runs, file))
    assert len(weights_in(runs)) == 1


def test_a_plan_whose_runs_are_made_elsewhere_is_not_trained(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "regime.toml").write_text('seeds = [1]\nfindings = []\n[cells.a]\nrecipe = "pre"\n')
    with pytest.raises(UserError, match="base, status"):
        read_experiment(tmp_path, "elsewhere", CONFIGS)


def test_a_run_that_other_code_began_names_both(tmp_path, monkeypatch, toy):
    runs, file = tmp_path / "runs", tmp_path / "toy/runs.jsonl"

    def interrupted(config, runs):
        raise KeyboardInterrupt

    monkeypatch.setattr("normlab.papers.experiments.train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(train_missing(toy.missing(file), runs, file, made_by={"commit": "first"}))
    TrainedNothing(monkeypatch)
    rows = list(train_missing(toy.missing(file), runs, file, made_by={"commit": "second"}))
    assert [row["commit"] for row in rows] == ["first; finished by second", "second"]
    assert all(row["started"] for row in rows)


def test_a_line_that_no_training_wrote_is_named(tmp_path):
    file = tmp_path / "runs.jsonl"
    file.write_text('{"key": "k1"}\n{"cell": "a"}\n')
    with pytest.raises(UserError, match="line 2, has no key"):
        kept(file)


@pytest.fixture
def book(tmp_path, toy):
    """A book with the toy regime, and a finding of it."""
    setting = Setting("small", "", "")
    declared = {"toys": Declaration("small", ("toy",), "")}
    piece = Piece("a", "toys", "difference", {"of": "post", "over": "pre"}, Expectation(above=0))
    finding = Finding("Z1", "", "", "", "", "not tested here", "", (piece,))
    return Book({"small": setting}, declared, (tmp_path,)), finding


def test_a_regime_that_lacks_no_run_is_not_planned_even_if_it_could_not_be_trained(tmp_path, book):
    regimes, finding = book
    assert [experiment.name for experiment in planned_for([finding], regimes, CONFIGS)] == ["toy"]
    file = tmp_path / "toy/regime.toml"
    file.write_text(file.read_text().replace('base = "demo"', 'base = ""'))
    with pytest.raises(UserError, match="lacks base"):
        planned_for([finding], regimes, CONFIGS)
    line = {"seed": 5, "run": "r", "outcome": "trained", "test": {}, "dev": [], "train": []}
    for cell in ("post", "pre"):
        append_line(tmp_path / "toy/runs.jsonl", {**line, "cell": cell, "key": cell})
    complete = Book(regimes.settings, regimes.regimes, regimes.roots)
    assert planned_for([finding], complete, CONFIGS) == []


def test_a_regime_in_a_folder_of_folders_keeps_its_place(tmp_path, toy):
    (tmp_path / "mine").mkdir()
    (tmp_path / "toy").rename(tmp_path / "mine/sweep")
    assert read_experiment(tmp_path, "mine/sweep", CONFIGS).name == "mine/sweep"

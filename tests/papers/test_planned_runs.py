"""Lines of planned runs: each is whole and on the disk, however processes end or meet."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from normlab.cli.presets import CONFIGS
from normlab.errors import UserError
from normlab.papers.experiments import append_line, kept, read_experiment, train_missing
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
    return read_experiment(tmp_path / "toy/regime.toml", CONFIGS)


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
    assert set(seen) == {(1, 1), (2, 1)}
    assert weights_in(runs) == []


def test_weights_stay_if_the_line_cannot_be_written(tmp_path, monkeypatch, toy):
    runs, file = tmp_path / "runs", tmp_path / "toy/runs.jsonl"
    TrainedNothing(monkeypatch, lambda: file.symlink_to(tmp_path / "elsewhere"))
    with pytest.raises(UserError):
        list(train_missing(toy.missing(file), runs, file))
    assert len(weights_in(runs)) == 1


def test_a_plan_whose_runs_are_made_elsewhere_is_not_trained(tmp_path):
    (tmp_path / "regime.toml").write_text('seeds = [1]\nfindings = []\n[cells.a]\nrecipe = "pre"\n')
    with pytest.raises(UserError, match="base, status"):
        read_experiment(tmp_path / "regime.toml", CONFIGS)

"""A large text needs no more memory than a small one, and the page that says so is the generated one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from scripts import script

data = script("data")


def in_a_fork(what: str, folder: Path) -> dict[str, Any]:
    """Return what a process says of itself, as ``data.in_a_process`` does, without waiting for torch.

    Peaks of two such processes differ by a hundredth of a MiB; those of fresh ones, which import
    by themselves, by a hundred.
    """
    files = [folder / f"{name}.txt" for name in ("in", "out", "err")]
    for file in files:
        file.write_text("")
    code = forked.exit_code(_say, what, folder, cwd=folder, env=os.environ, files=files)
    assert code == 0, files[2].read_text()
    return json.loads(files[1].read_text())


def _say(what: str, folder: Path) -> None:
    sys.stdout.write(json.dumps(getattr(data, what)(folder)))


def test_the_page_is_the_generated_one():
    assert data.PAGE.read_text(encoding="utf-8") == data.page(data.kept()), (
        "docs/data-scale.md is old; type: python benchmarks/data.py --page"
    )


def test_memory_does_not_grow_with_the_text():
    rows = data.kept()
    assert rows[0].pairs <= 10_000
    assert rows[-1].pairs >= 10_000_000
    for peak in ("prepare_mib", "training_mib"):
        assert max(getattr(row, peak) for row in rows) - getattr(rows[0], peak) <= data.MOST_MIB


@pytest.mark.slow
def test_invented_text_is_the_same_each_time_and_parallel():
    first, again = (list(data.sides(300, seed=5)) for _ in range(2))
    assert first == again
    [(source, target)] = first
    assert source.count("\n") == target.count("\n") == 300
    assert len(set(data.words(1))) == data.WORDS


@pytest.mark.wide
def test_thirty_times_the_text_in_the_same_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "in_a_process", in_a_fork)
    small, large = (data.measured(pairs, tmp_path) for pairs in (10_000, 300_000))
    assert large.text_mib > 25 * small.text_mib
    assert large.prepare_mib - small.prepare_mib < 150, "the text alone, as lists of strings, is 150 MiB"
    assert large.training_mib - small.training_mib < 60

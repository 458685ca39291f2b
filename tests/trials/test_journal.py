"""Trials in a folder: a stopped call goes on, to the same answer; another setup is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

import normlab
from normlab.errors import UserError
from normlab.trials.verdict import Trials
from trials.tiny import Text, setup, stepped

ROOT = Path(__file__).parents[2]


def answer(folder: Path | None = None, **words: Any) -> Trials:
    given = words.pop("given", None) or setup(0.02, dropout=0.1)
    return normlab.trial(given, folder=folder, **{"steps": 16, **words})


def tried(trials: Trials) -> list[Any]:
    return [(t.rate, t.losses, t.stopped) for t in trials.tried]


def test_what_is_kept_is_not_done_again(tmp_path: Path):
    whole = answer()
    first, again = answer(tmp_path), answer(tmp_path)
    assert tried(first) == tried(again) == tried(whole)
    assert first.sentence == again.sentence == whole.sentence
    assert [t.seconds for t in first.tried] == [t.seconds for t in again.tried]


@pytest.mark.slow
def test_a_file_that_ends_anywhere_is_continued_to_the_same_answer(tmp_path: Path):
    want = tried(answer(tmp_path))
    file = tmp_path / "trials.jsonl"
    content, draw = file.read_bytes(), random.Random(0)
    for _ in range(6):
        file.write_bytes(content[: draw.randrange(len(content))])
        assert tried(answer(tmp_path)) == want


def test_every_line_is_json_and_nothing_else_is_in_the_folder(tmp_path: Path):
    answer(tmp_path, rates=[0.02, 1e30])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "trials.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert "setup" in rows[0]


def other(**parts: Any) -> normlab.Setup:
    return setup(**{"rate": 0.02, "dropout": 0.1, **parts})


def drawn_anew() -> normlab.Setup:
    given = other()
    with torch.no_grad():
        next(given.model.parameters()).add_(1e-6)
    return given


@pytest.mark.parametrize(
    ("words", "differs"),
    [
        ({"steps": 17}, "steps"),
        ({"seed": 1}, "seed"),
        ({"change": "betas=0.5,0.6"}, "change"),
        ({"rates": [0.1]}, "rates"),
        ({"given": drawn_anew()}, "model"),
        ({"given": other(rate=0.03)}, "optimizer"),
        ({"given": other(optimizer=lambda m: SGD(m.parameters(), lr=0.02))}, "optimizer"),
        ({"given": other(batches=Text(10))}, "batches"),
        ({"given": other(step=stepped)}, "step"),
    ],
)
def test_trials_of_another_setup_are_refused(tmp_path: Path, words: dict[str, Any], differs: str):
    answer(tmp_path, rates=[0.02])
    with pytest.raises(UserError, match=rf": .*\b{differs}\b.* differ"):
        answer(tmp_path, **{"rates": [0.02], **words})


@pytest.mark.slow
def test_a_larger_budget_goes_on_where_a_smaller_one_ended(tmp_path: Path):
    def slow(*args: Any) -> Any:
        time.sleep(0.02)  # five trials of 16 steps, the fewest that a scan takes, need 1.6 s
        return stepped(*args)

    def given() -> normlab.Setup:
        return setup(0.02, step=slow, optimizer=lambda m: AdamW(m.parameters(), lr=0.02))

    short = answer(tmp_path, given=given(), budget_s=1.4)
    assert short.ended_by
    assert tried(answer(tmp_path, given=given(), budget_s=1.4)) == tried(short)
    longer = answer(tmp_path, given=given(), budget_s=60.0)
    assert not longer.ended_by
    assert tried(longer)[: len(short.tried)] == tried(short)


@pytest.mark.parametrize("content", ["[1]\n", "{\n", "\xff\n", '{"a": 1}\n'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str):
    (tmp_path / "trials.jsonl").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="trials"):
        answer(tmp_path)


SCRIPT = """
import sys, time
import normlab
from trials.tiny import setup, stepped

def slow(*args):
    time.sleep(0.002)
    return stepped(*args)

print(normlab.trial(setup(0.02, step=slow), steps=32, folder=sys.argv[1]).sentence)
"""


@pytest.mark.wide
def test_a_process_that_is_killed_ten_times_gives_the_same_answer(tmp_path: Path):
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}

    def start(folder: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / folder)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    began = time.monotonic()
    whole, draw = start("whole").communicate()[0], random.Random(0)
    took = time.monotonic() - began
    for _ in range(10):
        process = start("killed")
        time.sleep(took * draw.uniform(0.5, 0.9))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert start("killed").communicate()[0] == whole != ""

"""Thirty small runs of ``normlab compare`` while something kills one of its processes every 20 seconds.

    python -m pytest -m long -s tests/cli/test_soak.py

trains the same thirty runs twice, undisturbed and disturbed: half an hour on two cores that do other things
too.
"""

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

import pytest

from cli.typed import NORMLAB
from normlab.base.io import from_json, to_json
from normlab.lab.comparison.result import Comparison
from normlab.lab.runs import Runs
from normlab.report.compare import write_compare_page

KILL_EVERY_SECONDS = 20
SEED = 20
COMPARE = (
    *("compare", "--recipes", "post", "post+warmup", "pre", "admin", "pre+fixnorm+scalenorm"),
    *("--lrs", "5e-4", "1e-3", "2e-3", "--seeds", "4", "--jobs", "2", "--exchanges", "200"),
    *("--steps", "150", "--max-tokens", "2048", "--warmup-steps", "50"),
    *("--validate-every-steps", "50", "--checkpoint-every-steps", "25"),
)
OF_THE_CLOCK = {"seconds", "train_seconds", "total_seconds"}
"""Fields that say how long something took: all that may differ."""


def descendants(pid: int) -> list[int]:
    """Processes that ``pid`` started, in any of its threads, and those of theirs."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [child for thread in threads for child in thread.read_text().split()]
    return [p for child in map(int, children) for p in (child, *descendants(child))]


def compare_until_done(folder: Path, draw: random.Random | None) -> list[str]:
    """Type the command until it ends well, killing a process of it every so often; return who was killed."""
    folder.mkdir()
    killed: list[str] = []
    with (folder / "out.txt").open("w") as out:
        while True:
            process = subprocess.Popen([*NORMLAB, *COMPARE], cwd=folder, stdout=out, stderr=out)
            while process.poll() is None:
                try:
                    process.wait(KILL_EVERY_SECONDS if draw else None)
                except subprocess.TimeoutExpired:
                    assert draw is not None
                    victim = draw.choice([process.pid, *descendants(process.pid)])
                    killed.append("command" if victim == process.pid else "worker")
                    subprocess.run(["kill", f"-{signal.SIGKILL:d}", str(victim)], check=False)
                    time.sleep(0.1)
            if process.returncode == 0:
                return killed
            assert process.returncode == -signal.SIGKILL, (folder / "out.txt").read_text()


def without_clock(value: object) -> object:
    if isinstance(value, dict):
        return {k: 0 if k in OF_THE_CLOCK else without_clock(v) for k, v in value.items()}
    return [without_clock(v) for v in value] if isinstance(value, list) else value


def timeless_page(folder: Path) -> str:
    """The page of the comparison that was typed in a folder, written again there after every duration was set
    to nought.
    """
    runs = Path("runs")
    with chdir(folder):
        forget_durations(runs)
        stored = runs / "comparison.json"
        plain = without_clock(json.loads(to_json(from_json(Comparison, stored.read_text()))))
        page = write_compare_page(from_json(Comparison, json.dumps(plain)), runs, runs / "timeless.html")
        return page.read_text()


def forget_durations(runs: Path) -> None:
    for path in [*runs.glob("*/status.json"), *runs.glob("*/metrics.jsonl"), *runs.glob("*/probes.jsonl")]:
        if path.suffix == ".json":
            path.write_text(json.dumps(without_clock(json.loads(path.read_text()))))
        else:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text("".join(json.dumps(without_clock(row)) + "\n" for row in rows))


@pytest.mark.long
def test_thirty_runs_end_whole_and_the_page_is_the_same(tmp_path):
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    assert compare_until_done(calm, None) == []
    killed = compare_until_done(disturbed, random.Random(SEED))
    assert len(killed) >= 10
    for folder in (calm, disturbed):
        states = [run.status().state for run in Runs(folder / "runs")]
        assert states == ["done"] * 30
    expected, found = timeless_page(calm), timeless_page(disturbed)
    sys.stdout.write(f"\n{len(killed)} killed: {killed.count('command')} times the command, else workers\n")
    assert "fixnorm" in expected
    assert found == expected


def test_durations_are_all_that_is_forgiven():
    """The comparison above can fail: a loss of another value is not a duration."""
    row = {"kind": "train", "step": 3, "loss": 1.5, "seconds": 2.0, "inner": [{"train_seconds": 4}]}
    assert without_clock(row) == row | {"seconds": 0, "inner": [{"train_seconds": 0}]}
    assert without_clock(row) != without_clock(row | {"loss": 1.25})

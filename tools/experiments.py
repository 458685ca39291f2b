"""Trainings that count for findings: ``NORMLAB_DATA=... python tools/experiments.py REGIME ...``.

A regime is a folder ``results/REGIME`` with a hand-written ``regime.toml``, which is committed before its
runs (``normlab.papers.experiments``). This trains the runs that are missing, and adds their lines to its
``runs.jsonl``; ``normlab papers reproduce`` adds them to a folder of one's own instead. Without names the
regimes are listed, with how many of their runs are there. With ``--seeds 3`` only the first three seeds of a
regime are trained: where the hours do not suffice for all, what is there is whole for each seed. With
``--pilot`` the pilots of a regime are trained instead, with a seed that never counts, into ``pilots.jsonl``.
Two processes may train the same regimes at once, if they have the same ``--runs``: each leaves out what the
other is training.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from checkout import HOME, commit
from normlab.cli.presets import CONFIGS
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.papers.experiments import READY, Experiment, kept, key, read_experiment, train_missing
from normlab.papers.regimes import REGIME_FILE, RUNS_FILE

RESULTS: Final = HOME / "results"
PILOTS_FILE: Final = "pilots.jsonl"


def read_regime(name: str, results: Path = RESULTS) -> Experiment:
    """Read ``results/NAME/regime.toml``. Raises UserError for an entry that a regime does not have."""
    return read_experiment(results, name, CONFIGS)


def regimes(results: Path = RESULTS) -> list[str]:
    """The names of all regimes."""
    return sorted(path.parent.name for path in results.glob(f"*/{REGIME_FILE}"))


def run(
    name: str,
    runs: Path,
    results: Path = RESULTS,
    seeds: int | None = None,
    made_by: Mapping[str, str] | None = None,
) -> None:
    """Train what is missing of a regime, of its first seeds if a number is given.

    ``made_by`` says what code trains. Raises UserError for a regime that waits for its pilot.
    """
    regime, file = read_regime(name, results), results / name / RUNS_FILE
    wanted = regime.seeds[:seeds]
    _train(regime, [run for run in regime.missing(file) if run[1] in wanted], runs, file, made_by)


def run_pilots(
    name: str, runs: Path, results: Path = RESULTS, made_by: Mapping[str, str] | None = None
) -> None:
    """Train what is missing of the pilots of a regime."""
    regime, file = read_regime(name, results), results / name / PILOTS_FILE
    there = kept(file)
    missing = [run for run in regime.pilot_configs() if key(run[-1]) not in there]
    _train(regime, missing, runs, file, made_by)


def _train(
    regime: Experiment,
    missing: Iterable[tuple[str, int, Config]],
    runs: Path,
    file: Path,
    made_by: Mapping[str, str] | None,
) -> None:
    for row in train_missing(missing, runs, file, regime.measure, made_by, log=partial(print, flush=True)):
        scores = row["dev"][-1:], row["test"], row["seconds"]
        print(regime.name, row["cell"], row["seed"], row["outcome"], *scores, flush=True)


def require_committed(name: str) -> None:
    """Raise UserError if the regime or the code that trains it has changes that are not committed."""
    places = ["src", "tools", str((RESULTS / name / REGIME_FILE).relative_to(HOME))]
    command = ["git", "-C", str(HOME), "status", "--porcelain", "--", *places]
    if changes := subprocess.run(command, capture_output=True, text=True, check=True).stdout:
        raise UserError(f"commit these before the runs of {name}:\n{changes}")


def main() -> None:
    """Run the named regimes, or list all."""
    parser = argparse.ArgumentParser(description="Trainings that count for findings.")
    # argparse holds the default to the choices, too: that no name is given has to be one of them
    parser.add_argument("regime", nargs="*", choices=[[], *regimes()], default=[])
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="folder of run folders")
    parser.add_argument("--seeds", type=int, metavar="N", help="train the first N seeds alone")
    parser.add_argument("--pilot", action="store_true", help="train the pilots of the named regimes")
    asked = parser.parse_args()
    # the code is loaded by now, and the checkout may leave this commit before the last run ends
    made_by = {"commit": commit()}
    if asked.seeds is not None and (asked.pilot or asked.seeds < 1):
        parser.error("--seeds takes 1 or more, and pilots have one seed: leave it out with --pilot")
    # all before the first training, which takes hours
    for name in asked.regime:
        require_committed(name)
        read_regime(name)
    for name in asked.regime:
        if asked.pilot:
            run_pilots(name, asked.runs, made_by=made_by)
        else:
            run(name, asked.runs, seeds=asked.seeds, made_by=made_by)
    if not asked.regime:
        for name in regimes():
            regime = read_regime(name)
            configs = list(regime.configs())
            kept_runs = kept(RESULTS / name / RUNS_FILE)
            there = sum(key(config) in kept_runs for *_, config in configs)
            waiting = "" if regime.status == READY else f" ({regime.status})"
            print(f"{name}: {there} of {len(configs)}{waiting}; {regime.question}")


if __name__ == "__main__":
    main()

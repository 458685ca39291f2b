"""The flight recorder of a watch on finished trainings: how many sound ones it reports, and failed ones.

    python benchmarks/recorder.py FOLDER ...             # folders of runs
    python benchmarks/recorder.py FOLDER ... --write     # write benchmarks/results/recorder.json, too

Each run's losses and gradient norms, of the steps that its metrics hold (one in ten), are given to the
recorder as those of a training of one parameter, whose updates are not known. The outcome is the run's own.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from normlab.lab.runs.folder import RunFolder, Runs
from normlab.watching.checks import WatchReports
from normlab.watching.meter import StepRecord
from normlab.watching.recorder import Recorder
from normlab.watching.watcher import FETCH

RESULTS = Path(__file__).resolve().parent / "results/recorder.json"
LEAST = 15
"""Steps below which a training is too short to be judged."""


def recorded(folder: RunFolder) -> list[str]:
    """The kinds of the recorder's reports on a run, none for one that is too short."""
    reports = WatchReports(lambda _: None)
    recorder = Recorder(reports)
    for row in folder.metrics():
        if row["kind"] == "train":
            norm = torch.tensor([float(row["grad_norm_l2"])])
            step, lr, loss = int(row["step"]), float(row["lr"]), torch.tensor(float(row["loss"]))
            recorder.add(StepRecord(step, lr, loss, ("all",), norm, norm))
            if recorder.pending == FETCH:
                recorder.check_steps(step)
    recorder.close()
    return [report["trigger"]["kind"] for report in reports.flights()]


def main() -> None:
    """Count the reports by the outcome of the run."""
    parser = argparse.ArgumentParser(description="The flight recorder on finished trainings.")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--write", action="store_true", help="write the results file")
    args = parser.parse_args()
    counted: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    spoken: list[dict[str, Any]] = []
    for folder in (run for root in args.folders for run in Runs(root)):
        outcome = folder.status().outcome
        if folder.status().state != "done" or outcome is None or len(folder.metrics()) < LEAST:
            continue
        kinds = recorded(folder)
        reported = [kind for kind in kinds if kind != "recovered"]
        counted[outcome.state]["runs"] += 1
        counted[outcome.state]["reported"] += bool(reported)
        counted[outcome.state]["recovered"] += "recovered" in kinds
        if bool(reported) == (outcome.state == "trained"):
            spoken.append({"run": folder.path.name, "outcome": outcome.state, "reports": kinds})
    for state, numbers in sorted(counted.items()):
        reports, notes = numbers["reported"], numbers["recovered"]
        print(f"{state}: {reports} of {numbers['runs']} reported, {notes} with a note")
    for one in spoken:
        if one["outcome"] == "trained":
            print(f"a report of a run that trained: {one['run']}, {', '.join(one['reports'])}")
    if args.write:
        RESULTS.write_text(
            json.dumps({"outcomes": counted, "unlike": spoken}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()

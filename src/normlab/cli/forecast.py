"""``normlab forecast``: collect the table of small trainings that forecasts rest on."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from normlab.cli.common import RUNS, Imports, Switch
from normlab.errors import UserError
from normlab.spec.units import count, seconds_of


@dataclass(frozen=True)
class Forecast:
    """Collect the table of small trainings that forecasts rest on.

    Models are drawn over placement, norm, initialisation, optimiser, depth, width, warm-up and text. For each
    the largest learning rate that trains is searched, and runs around it are added; every run is measured
    before its first step and early in it. The same command goes on from where it was stopped.
    """

    collect: Switch = False
    """Train and measure runs, and add them to the table."""
    wide: Switch = False
    """Collect wide models, to test a forecast on, around the edges of those that are in the table."""
    most: int = 1200
    """Rows of the table after which nothing else is started."""
    budget: str = ""
    """Time for all, such as 1h or 90min, after which nothing else is started."""
    table: Path = Path("results/forecast/runs.jsonl")
    """The table, to which rows are added."""
    runs: Path = RUNS / "forecast"
    """Folder of the runs in progress; each is deleted once it is in the table."""
    jobs: int = 0
    """Runs that are trained at the same time; 0: one for each usable core, or CPU of a Ray cluster."""
    on: str = "local"
    """Where runs are trained: local (this machine), or ray, as for normlab reproduce."""
    imports: Imports = ()

    def run(self) -> None:
        """Raises UserError where nothing is to be done."""
        from normlab.jobs.place import place
        from normlab.survey.collect import Collection

        if not self.collect:
            raise UserError(
                "normlab forecast was told nothing to do; type normlab forecast --collect --budget 1h"
            )
        if self.most < 1:
            raise UserError(f"--most is {self.most}; give the number of rows that the table is to have")
        budget = seconds_of(self.budget, "--budget")
        where = place(self.on)
        collection = Collection(self.runs, self.table, wide=self.wide)
        known = len(collection.runs)
        until = math.inf if budget is None else time.monotonic() + budget
        collection.run(where, self.jobs, most=self.most, until=until)
        runs = collection.runs
        trained, new = sum(run.trained for run in runs), len(runs) - known
        print(f"{self.table}: {count(len(runs), 'run')}, {new:,} of them new; {trained:,} trained")

"""``normlab forecast``: collect the small trainings that forecasts rest on, and judge the forecasts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from normlab.cli.common import RUNS, Imports, Switch
from normlab.errors import UserError
from normlab.spec.units import count, seconds_of

if TYPE_CHECKING:
    from normlab.forecast.table import SurveyedRun

LEAST_MODELS: Final = 10
"""Models without which there is nothing to leave out."""


@dataclass(frozen=True)
class Forecast:
    """Collect the table of small trainings that forecasts rest on, and judge the forecasts.

    Models are drawn over placement, norm, initialisation, optimiser, depth, width, warm-up and text. For each
    the largest learning rate that trains is searched, and runs around it are added; every run is measured
    before its first step and early in it. The same command goes on from where it was stopped.
    """

    collect: Switch = False
    """Train and measure runs, and add them to the table."""
    sweep: Switch = False
    """Measure the models of the table at a grid of learning rates, without training them."""
    evaluate: Switch = False
    """Judge forecasts on groups of the table that were left out, and write the report."""
    fit: Switch = False
    """Fit the forecaster that normlab diagnose uses to the table, and write it with a model card."""
    part: Literal["narrow", "wide", "deep"] = "narrow"
    """Models to collect: narrow ones, deep ones, or the wide ones that a forecast is tested on."""
    most: int = 1200
    """Rows of the table after which nothing else is started."""
    budget: str = ""
    """Time for all, such as 1h or 90min, after which nothing else is started."""
    table: Path = Path("results/forecast/runs.jsonl.xz")
    """The table, to which rows are added."""
    swept: Path = Path("results/forecast/sweeps.jsonl.xz")
    """The table of models at a grid of learning rates, on which the forecast of the largest one is judged."""
    foretold: Path = Path("results/forecast/foretold.jsonl.xz")
    """The table of runs that were forecast before they were trained, see benchmarks/forecasts.py."""
    report: Path = Path("docs/forecast.md")
    """The report, in Markdown."""
    runs: Path = RUNS / "forecast"
    """Folder of the runs in progress; each is deleted once it is in the table."""
    jobs: int = 0
    """Runs that are trained at the same time; 0: one for each usable core, or CPU of a Ray cluster."""
    on: str = "local"
    """Where runs are trained: local (this machine), or ray, as for normlab reproduce."""
    imports: Imports = ()

    def run(self) -> None:
        """Raises UserError where nothing is to be done."""
        if not (self.collect or self.sweep or self.evaluate or self.fit):
            raise UserError(
                "normlab forecast was told nothing to do; type normlab forecast --collect --budget 1h, or "
                "normlab forecast --evaluate"
            )
        if self.collect:
            self._collect()
        if self.sweep:
            self._sweep()
        if self.evaluate:
            self._evaluate()
        if self.fit:
            self._fit()

    def _collect(self) -> None:
        """Raises UserError for a number of rows that is not above 0."""
        from normlab.jobs.place import place
        from normlab.survey.collect import Collection

        if self.most < 1:
            raise UserError(f"--most is {self.most}; give the number of rows that the table is to have")
        budget = seconds_of(self.budget, "--budget")
        where = place(self.on)
        collection = Collection(self.runs, self.table, part=self.part)
        known = len(collection.runs)
        until = math.inf if budget is None else time.monotonic() + budget
        collection.run(where, self.jobs, most=self.most, until=until)
        runs = collection.runs
        trained, new = sum(run.trained for run in runs), len(runs) - known
        print(f"{self.table}: {count(len(runs), 'run')}, {new:,} of them new; {trained:,} trained")

    def _sweep(self) -> None:
        from normlab.forecast.table import SurveyedRun, read
        from normlab.spec.request import usable_cores
        from normlab.survey.sweeping import sweep

        budget = seconds_of(self.budget, "--budget")
        until = math.inf if budget is None else time.monotonic() + budget
        names = dict.fromkeys(run.model for run in read(self.table, SurveyedRun) if run.kind == "search")
        found = sweep(tuple(names), self.swept, self.runs, jobs=self.jobs or usable_cores(), until=until)
        models = count(len({rate.model for rate in found}), "model")
        print(f"{self.swept}: {models}, {count(len(found), 'rate')}")

    def _evaluate(self) -> None:
        from normlab.forecast.table import Foretold, SweptRate, read
        from normlab.report.forecast import forecast_report
        from normlab.store.folder import write_text_atomic

        tables = read(self.swept, SweptRate), read(self.foretold, Foretold)
        text = forecast_report(self._known(), *tables)
        write_text_atomic(self.report, text)
        print(f"report: {self.report}")

    def _fit(self) -> None:
        from normlab.diagnosis.rules.features import VERSION
        from normlab.forecast.card import card
        from normlab.forecast.shipping import FORECASTER, HOME, ship

        runs = self._known()
        fitted = [run for run in runs if run.kind != "wide"]
        forecaster = ship(fitted, feature_version=VERSION, card=card(runs))
        nodes = sum(len(tree.feature) for tree in forecaster.trees)
        trees = count(len(forecaster.trees), "tree")
        print(f"{HOME / FORECASTER}: {trees} of {nodes:,} nodes, {count(len(forecaster.names), 'feature')}")

    def _known(self) -> list[SurveyedRun]:
        """The table. Raises UserError where it has too few runs."""
        from normlab.forecast.table import SurveyedRun, read

        runs = read(self.table, SurveyedRun)
        models = len({run.model for run in runs})
        if models < LEAST_MODELS:
            raise UserError(
                f"{self.table} has runs of {count(models, 'model')}, and a judgement "
                f"needs at least {LEAST_MODELS}; type normlab forecast --collect --budget 1h first"
            )
        return runs

"""Train the runs of the survey, measure them, and add them to its table."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch

from normlab.diagnosis.rules.features import VERSION
from normlab.forecast.table import Kind, SurveyedRun, append, compact, read
from normlab.jobs.place import Place
from normlab.jobs.queue import Queue
from normlab.spec.config import Config, DataConfig, MachineConfig, run_id
from normlab.store.folder import RunFolder
from normlab.survey.design import Model, Part, models, runs_of
from normlab.survey.measuring import measured
from normlab.tasks.registry import TASKS

ACTIVE: Final = 3
"""Models that are open for each run that is trained at the same time: a search waits for its own run."""


@dataclass
class _Open:
    """A model whose runs are not all in the table yet."""

    model: Model
    tried: dict[float, bool] = field(default_factory=dict)
    """The rates of its search, and whether these runs trained."""
    asked: set[str] = field(default_factory=set)
    """The ids of its runs that are in the table, or on their way."""


class Collection:
    """Goes through the models of the sequence in their order: a search for the edge, then runs around it.

    The table is the state: a collection that was stopped goes on from it, and from the run folders below
    ``root``, which are deleted once their runs are in the table. Of wide models it goes through those of
    the narrow ones that are in the table.
    """

    def __init__(
        self, root: Path, table: Path, say: Callable[[str], None] = print, *, part: Part = "narrow"
    ) -> None:
        self.root, self.table, self._say = root, table, say
        compact(table)  # a row that was cut off goes
        self.runs = read(table, SurveyedRun)
        self._models = models(part)
        self._data: dict[str, DataConfig] = {}
        self._open: dict[str, _Open] = {}
        self._measuring: set[Future[SurveyedRun]] = set()

    def run(self, where: Place, jobs: int, *, most: int, until: float = math.inf) -> None:
        """Train and measure until ``runs`` has about ``most``, or ``until``, a time of ``time.monotonic``."""
        jobs, threads = where.share(jobs, MachineConfig())
        self._threads, self._most = threads, most
        self._queue = Queue(self.root, jobs, start=where.start, until=until)
        context = get_context("spawn")
        with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            self._pool = pool
            for _ in range(ACTIVE * jobs):
                self._next_model()
            self._queue.run(self._ended)
            for future in list(self._measuring):
                self._keep(future)
        compact(self.table)

    def _next_model(self) -> None:
        """Open the next model that has runs left."""
        while len(self.runs) + len(self._measuring) < self._most:
            model = next(self._models)
            of = f"s{model.name[1:]}" if model.part == "wide" else model.name
            searched = [run for run in self.runs if run.kind == "search" and run.model == of]
            done = {run.run for run in self.runs if run.model == model.name}
            if model.part == "wide" and not searched:
                return
            if self._add(_Open(model, {run.lr: run.trained for run in searched}, done)):
                return

    def _add(self, open_: _Open) -> bool:
        """Ask for the runs that a model needs next; return whether there are any."""
        configs = [self._prepared(config) for config in runs_of(open_.model, open_.tried)]
        new = [config for config in configs if run_id(config) not in open_.asked]
        for config in new:
            open_.asked.add(run_id(config))
            self._open[run_id(config)] = open_
            self._queue.add(config)
        return bool(new)

    def _prepared(self, config: Config) -> Config:
        name = repr(config.data)
        if name not in self._data:
            self._data[name] = TASKS[config.task].prepare(config.data, self.root / "data")[0]
        machine = replace(config.machine, threads=self._threads)
        return replace(config, data=self._data[name], machine=machine)

    def _ended(self, config: Config) -> None:
        """Let a run that has ended be measured, and ask for what its model needs next."""
        folder, open_ = RunFolder(self.root / run_id(config)), self._open.pop(run_id(config))
        if reason := self._queue.failed.get(folder.path.name):
            self._say(f"{open_.model.name} at {config.optim.lr:g} could not be trained: {reason}")
            return
        kind = _kind(open_.model, config)
        outcome = folder.status().outcome
        if kind == "search":
            open_.tried[config.optim.lr] = outcome is not None and outcome.state == "trained"
        self._measuring.add(self._pool.submit(row, folder.path, open_.model, kind))
        for future in [future for future in self._measuring if future.done()]:
            self._keep(future)
        if not self._add(open_) and open_ not in self._open.values():
            self._next_model()

    def _keep(self, future: Future[SurveyedRun]) -> None:
        """Add a run to the table, and delete its folder."""
        self._measuring.discard(future)
        if (error := future.exception()) is not None:
            self._say(f"a run could not be measured: {type(error).__name__}: {error}")
            return
        run = append(self.table, future.result())
        self.runs.append(run)
        shutil.rmtree(self.root / run.run)
        self._say(f"{len(self.runs)}: {run.model} {run.kind} at {run.lr:g}: {run.outcome}")


def _kind(model: Model, config: Config) -> Kind:
    return "wide" if model.part == "wide" else "search" if config.seeds.init == 1 else "drawn"


def row(path: Path, model: Model, kind: Kind) -> SurveyedRun:
    """Measure a finished run of a model."""
    folder = RunFolder(path)
    config, status = folder.config(), folder.status()
    dev = [float(row["nll"]) for row in folder.metrics() if row["kind"] == "dev"]
    return SurveyedRun(
        run=folder.path.name,
        model=model.name,
        kind=kind,
        choices=model.choices,
        lr=config.optim.lr,
        seed=config.seeds.init,
        steps=config.train.steps,
        outcome=status.outcome.state if status.outcome else "",
        nll=min((value for value in dev if math.isfinite(value)), default=None),
        seconds=status.train_seconds,
        features=measured(folder),
        version=VERSION,
    )

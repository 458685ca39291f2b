"""Runs many configurations in workers, on this machine or others.

The run folders hold the whole state: a queue that was stopped is built again from them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from normlab.config.config import Config, run_id
from normlab.errors import UserError
from normlab.runs.folder import RunFolder
from normlab.training.jobs.process import DiedError, Process, Worker

Watch = Callable[[Sequence[RunFolder]], None]
"""Called at least twice a second with the folders of all runs that were added so far, finished or not."""

_POLL_SECONDS = 0.5

_DEATHS = 3
"""A run has failed once so many workers have died in it at the same step."""


class Queue:
    """Trains configurations in ``jobs`` workers, each of which ``start`` makes for a folder of runs.

    A worker that dies (killed, out of memory, its machine lost) is replaced, and its run continues from the
    last checkpoint for as long as each worker takes it further. Workers have process groups of their own, so
    that Ctrl-C reaches them once, through this process: each then saves its run and ends. No run is started
    after ``until``, a time of ``time.monotonic``; those that wait are dropped.
    """

    def __init__(
        self,
        root: Path,
        jobs: int,
        watch: Watch = lambda folders: None,
        start: Callable[[Path], Worker] = Process,
        until: float = math.inf,
    ) -> None:
        if jobs < 1:
            raise ValueError(f"jobs is at least 1, got {jobs}")
        self.until = until
        self.root, self.jobs, self.watch, self.start = root, jobs, watch, start
        self.waiting: deque[Config] = deque()
        self.asked: list[RunFolder] = []
        self.failed: dict[str, str] = {}
        self._deaths: dict[str, tuple[int, int]] = {}
        """For each run the step at which its last worker died, and how many have died there."""

    def add(self, config: Config) -> None:
        """Add a run whose data is prepared (``data.digest`` is set)."""
        self.waiting.append(config)
        self.asked.append(RunFolder(self.root / run_id(config)))

    def run(self, done: Callable[[Config], None] = lambda config: None) -> None:
        """Train until nothing waits. ``done`` is called with each finished run and may ``add`` more."""
        workers: list[Worker] = []
        running: dict[Future[str], tuple[Worker, Config]] = {}
        threads = ThreadPoolExecutor(self.jobs, "run")  # one waits for each worker's answer
        try:
            self.watch(self.asked)
            while self.waiting or running:
                for config in self._startable([config for _, config in running.values()]):
                    worker = self._idle(workers, [worker for worker, _ in running.values()])
                    running[threads.submit(worker.train, config)] = worker, config
                for answer in wait(running, _POLL_SECONDS, FIRST_COMPLETED).done:
                    _, config = running.pop(answer)
                    self._end(config, answer, done)
                self.watch(self.asked)
        except BaseException:
            for worker in workers:
                worker.interrupt()
            raise
        finally:
            for worker in workers:
                worker.close()
            threads.shutdown()

    def _startable(self, running: Sequence[Config]) -> list[Config]:
        """Take what may start now from ``waiting``, never a run that is running: it may be added twice."""
        if time.monotonic() > self.until:
            self.waiting.clear()
        busy, chosen = {run_id(config) for config in running}, list[Config]()
        for config in list(self.waiting):
            if len(busy) < self.jobs and run_id(config) not in busy:
                busy.add(run_id(config))
                chosen.append(config)
                self.waiting.remove(config)
        return chosen

    def _idle(self, workers: list[Worker], busy: Sequence[Worker]) -> Worker:
        """Return a living worker without a run; a new one if there is none."""
        for worker in [worker for worker in workers if worker not in busy]:
            if worker.alive():
                return worker
            worker.close()
            workers.remove(worker)
        workers.append(self.start(self.root))
        return workers[-1]

    def _end(self, config: Config, answer: Future[str], done: Callable[[Config], None]) -> None:
        try:
            said = answer.result()
        except DiedError as died:
            if self._continues(config):
                self.waiting.appendleft(config)
                return
            said = str(died)
        if said != "done":
            self._fail(config, said)
        done(config)

    def _fail(self, config: Config, reason: str) -> None:
        """Record a failure here and in the run's folder, which a killed worker could not do itself.

        A run that is done has not failed, whatever its worker says, and one that another process is training
        is left alone.
        """
        folder = RunFolder(self.root / run_id(config))
        self.failed[folder.path.name] = reason
        with contextlib.suppress(OSError, UserError):
            status = folder.status()
            if status.state == "done":
                del self.failed[folder.path.name]
            elif folder.path.exists() and status.state != "running":
                folder.set_status(replace(status, state="failed", error=reason))

    def _continues(self, config: Config) -> bool:
        """Whether a run whose worker died has advanced since the last death, or has tries left."""
        run, step = run_id(config), 0
        with contextlib.suppress(OSError, UserError):
            step = RunFolder(self.root / run).status().step
        before, count = self._deaths.get(run, (0, 0))
        self._deaths[run] = step, 1 if step > before else count + 1
        return self._deaths[run][1] < _DEATHS


def one_at_a_time(root: Path) -> Queue:
    """A queue that trains one run after the other on this machine."""
    return Queue(root, 1)

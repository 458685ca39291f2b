"""Many runs: a queue of configurations, and the workers that train them, here or on a Ray cluster.

The run folders hold the whole state: a queue that was stopped is built again from them.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import final

from normlab.base.io import to_json
from normlab.errors import UserError
from normlab.lab.config import Config, MachineConfig, run_id
from normlab.lab.runs.folder import RunFolder


class DiedError(Exception):
    """A worker ended before it had answered."""


class Worker(ABC):
    """Trains one configuration after the other, somewhere."""

    @abstractmethod
    def train(self, config: Config) -> str:
        """Return "done" or the reason why not. Raises DiedError if the worker ends first."""

    @abstractmethod
    def interrupt(self) -> None:
        """Ask the worker to save its run and end, without waiting."""

    def alive(self) -> bool:
        """Whether it can train another one."""
        return True

    def close(self) -> None:
        """End the worker once nothing more comes, and wait for that."""
        self.interrupt()


@final
class Process(Worker):
    """A ``normlab.lab.training.worker`` process.

    It imports nothing from its directory (``-P``) except the modules that ``--import`` names, and runs the
    files of ``setups``, if there are any.
    """

    def __init__(
        self,
        root: Path,
        setups: Sequence[str] = (),
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "normlab.lab.training.worker", str(root), *setups],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=cwd,
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout

    def train(self, config: Config) -> str:
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(to_json(config) + "\n")
            self._requests.flush()
        answer = self._answers.readline()
        if not answer.endswith("\n"):
            raise DiedError(f"the worker process ended with code {self.process.wait()}")
        return answer.strip()

    def alive(self) -> bool:
        return self.process.poll() is None

    def interrupt(self) -> None:
        if self.alive():
            self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self.process.wait()
        self._answers.close()


Watch = Callable[[Sequence[RunFolder]], None]
"""Called at least twice a second with the folders of all runs that were added so far, finished or not."""
_POLL_SECONDS = 0.5
_DEATHS = 3
"""A run has failed once this many workers have died in it at the same step."""


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
        jobs: int = 1,
        watch: Watch = lambda folders: None,
        start: Callable[[Path], Worker] = Process,
        until: float = math.inf,
    ) -> None:
        if jobs < 1:
            raise ValueError(f"jobs is at least 1, got {jobs}")
        self.until = until
        self.root, self.jobs, self.watch, self.start = root, jobs, watch, start
        self.waiting: deque[Config] = deque()
        self.folders: list[RunFolder] = []
        """Of all runs that were added."""
        self.failed: dict[str, str] = {}
        self._deaths: dict[str, tuple[int, int]] = {}
        """For each run the step at which its last worker died, and how many have died there."""

    def add(self, config: Config) -> None:
        """Add a run whose data is prepared (``data.digest`` is set)."""
        self.waiting.append(config)
        self.folders.append(RunFolder(self.root / run_id(config)))

    def run(self, done: Callable[[Config], None] = lambda config: None) -> None:
        """Train until nothing waits. ``done`` is called with each run that is done or has failed, and may
        ``add`` more.
        """
        workers: list[Worker] = []
        running: dict[Future[str], tuple[Worker, Config]] = {}
        threads = ThreadPoolExecutor(self.jobs, "run")  # one waits for each worker's answer
        try:
            self.watch(self.folders)
            while self.waiting or running:
                for config in self._startable([config for _, config in running.values()]):
                    worker = self._idle(workers, [worker for worker, _ in running.values()])
                    running[threads.submit(worker.train, config)] = worker, config
                for answer in wait(running, _POLL_SECONDS, FIRST_COMPLETED).done:
                    _, config = running.pop(answer)
                    self._end(config, answer, done)
                self.watch(self.folders)
        except BaseException:
            for worker in workers:
                worker.interrupt()
            raise
        finally:
            for worker in workers:
                worker.close()
            threads.shutdown()

    def _startable(self, running: Sequence[Config]) -> list[Config]:
        """Take what may start now from ``waiting``, but no run that is running: it may be added twice."""
        if time.monotonic() > self.until:
            self.waiting.clear()
        busy = {run_id(config) for config in running}
        chosen: list[Config] = []
        for config in list(self.waiting):
            if len(busy) < self.jobs and run_id(config) not in busy:
                busy.add(run_id(config))
                chosen.append(config)
                self.waiting.remove(config)
        return chosen

    def _idle(self, workers: list[Worker], busy: Sequence[Worker]) -> Worker:
        """Return a worker that waits for a run, or a new one; dead ones are closed."""
        for worker in [worker for worker in workers if worker not in busy]:
            if worker.alive():
                return worker
            worker.close()
            workers.remove(worker)
        workers.append(self.start(self.root))
        return workers[-1]

    def _end(self, config: Config, answer: Future[str], done: Callable[[Config], None]) -> None:
        """Take the answer about a run: it is done, has failed, or goes on with another worker."""
        try:
            reply = answer.result()
        except DiedError as died:
            if self._continues(config):
                self.waiting.appendleft(config)
                return
            reply = str(died)
        if reply != "done":
            self._fail(config, reply)
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
        run = run_id(config)
        step = 0
        with contextlib.suppress(OSError, UserError):  # a folder that is missing or damaged
            step = RunFolder(self.root / run).status().step
        step_before, deaths = self._deaths.get(run, (0, 0))
        deaths = 1 if step > step_before else deaths + 1
        self._deaths[run] = step, deaths
        return deaths < _DEATHS


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(jobs: int) -> int:
    """Return the threads for each of ``jobs`` parallel processes: an equal share of the usable cores."""
    return max(1, usable_cores() // jobs)


class Backend:
    """Where runs are trained in parallel: on this machine, unless a subclass says otherwise."""

    def share(self, jobs: int, machine: MachineConfig) -> tuple[int, int]:
        """Return how many runs train at the same time, and the threads of each; given numbers stay.

        Here: one run for each usable core, or a single one on a GPU, with an equal share of the cores each.
        """
        jobs = jobs or (usable_cores() if machine.device == "cpu" else 1)
        return jobs, machine.threads or threads_each(jobs)

    def start(self, root: Path) -> Worker:
        """Return a new worker, which trains below ``root``."""
        return Process(root)

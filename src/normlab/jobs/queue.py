"""Runs many configurations in worker processes of this machine.

The run folders hold the whole state: a queue that was stopped is built again from them.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from normlab.errors import UserError
from normlab.spec.config import Config, run_id
from normlab.spec.serialise import to_json
from normlab.store.folder import RunFolder

Watch = Callable[[Sequence[RunFolder]], None]
"""Called at least twice a second with the folders of all runs that were added so far, finished or not."""

_POLL_SECONDS = 0.5

_DEATHS = 3
"""A run has failed once so many workers have died in it at the same step."""


class Queue:
    """Trains configurations in ``jobs`` worker processes.

    A worker that dies (killed, out of memory) is replaced, and its run continues from the last checkpoint for
    as long as each worker takes it further. Workers have process groups of their own, so that Ctrl-C reaches
    them once, through this process: each then saves its run and ends.
    """

    def __init__(self, root: Path, jobs: int, watch: Watch = lambda folders: None) -> None:
        if jobs < 1:
            raise ValueError(f"jobs is at least 1, got {jobs}")
        self.root, self.jobs, self.watch = root, jobs, watch
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
        workers: list[_Worker] = []
        running: dict[Future[str], tuple[_Worker, Config]] = {}
        threads = ThreadPoolExecutor(self.jobs, "run")  # one waits for each worker's answer
        try:
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
        busy, chosen = {run_id(config) for config in running}, list[Config]()
        for config in list(self.waiting):
            if len(busy) < self.jobs and run_id(config) not in busy:
                busy.add(run_id(config))
                chosen.append(config)
                self.waiting.remove(config)
        return chosen

    def _idle(self, workers: list[_Worker], busy: Sequence[_Worker]) -> _Worker:
        """Return a living worker without a run; a new one if there is none."""
        for worker in [worker for worker in workers if worker not in busy]:
            if worker.process.poll() is None:
                return worker
            worker.close()
            workers.remove(worker)
        workers.append(_Worker(self.root))
        return workers[-1]

    def _end(self, config: Config, answer: Future[str], done: Callable[[Config], None]) -> None:
        try:
            said = answer.result()
        except _DiedError as died:
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


class _DiedError(Exception):
    """A worker process ended before it had answered."""


class _Worker:
    """A ``normlab.jobs.worker`` process, which trains one configuration after the other.

    It imports nothing from the current directory (``-P``) but the modules that ``--import`` names.
    """

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "normlab.jobs.worker", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout

    def train(self, config: Config) -> str:
        """Return the answer, "done" or the reason why not. Raises _DiedError if the process ends first."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(to_json(config) + "\n")
            self._requests.flush()
        answer = self._answers.readline()
        if not answer.endswith("\n"):
            raise _DiedError(f"the worker process ended with code {self.process.wait()}")
        return answer.strip()

    def interrupt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Let the process end, once its run is saved."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self.process.wait()
        self._answers.close()

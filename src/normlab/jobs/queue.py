"""One machine's queue: worker processes over run folders. The folders are the truth; the queue remembers
nothing.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from normlab.errors import UserError
from normlab.spec.config import Config, run_id
from normlab.spec.serialise import to_json
from normlab.store.folder import RunFolder

Watch = Callable[[Sequence[RunFolder]], None]
"""Called about twice a second with the folders of every run asked for so far, done or not."""

_POLL_SECONDS = 0.5

_DEATHS = 3
"""So many workers may die in a run without taking it further before it has failed."""


class _Answer(NamedTuple):
    """How a run ended for its worker."""

    words: str
    """``done``, or why not."""
    died: bool = False
    """Whether the worker itself is gone."""


class Queue:
    """Runs configurations in ``jobs`` worker processes.

    A worker that dies (killed, out of memory) is replaced, and its run goes on from its last checkpoint as
    long as that takes it further. Workers sit in process groups of their own, so that one Ctrl-C reaches them
    once, from here: each saves its run and ends.
    """

    def __init__(self, root: Path, jobs: int, watch: Watch = lambda folders: None) -> None:
        if jobs < 1:
            raise ValueError(f"jobs is at least 1, got {jobs}")
        self.root, self.jobs, self.watch = root, jobs, watch
        self.waiting: deque[Config] = deque()
        self.asked: list[RunFolder] = []
        self.failed: dict[str, str] = {}
        self._deaths: dict[str, tuple[int, int]] = {}
        """Of a run, its step when its last worker died, and how many have died there."""

    def add(self, config: Config) -> None:
        """Ask for a run; its data must be prepared (``data.digest`` set)."""
        self.waiting.append(config)
        self.asked.append(RunFolder(self.root / run_id(config)))

    def run(self, done: Callable[[Config], None] = lambda config: None) -> None:
        """Work until nothing waits. ``done`` sees each ended run and may ``add`` more."""
        workers: list[_Worker] = []
        try:
            while self.waiting or any(w.config for w in workers):
                self._assign(workers)
                self._wait(workers, done)
                self.watch(self.asked)
        except BaseException:
            for worker in workers:
                worker.interrupt()
            raise
        finally:
            for worker in workers:
                worker.close()

    def _assign(self, workers: list[_Worker]) -> None:
        """Start what waits, but never the same run in two workers, however often it was asked for."""
        busy = {run_id(w.config) for w in workers if w.config}
        for config in list(self.waiting):
            if run_id(config) in busy:
                continue
            idle = next((w for w in workers if w.config is None), None)
            if idle is None:
                if len(workers) == self.jobs:
                    return
                idle = _Worker(self.root)
                workers.append(idle)
            self.waiting.remove(config)
            idle.start(config)
            busy.add(run_id(config))

    def _fail(self, config: Config, reason: str) -> None:
        """Remember a failed run, also in its folder: a worker that was killed could not write that itself.

        A run that somebody else's process is in stays theirs.
        """
        folder = RunFolder(self.root / run_id(config))
        self.failed[folder.path.name] = reason
        with contextlib.suppress(OSError, UserError):
            status = folder.status()
            if folder.path.exists() and status.state != "running":
                folder.set_status(replace(status, state="failed", error=reason))

    def _wait(self, workers: list[_Worker], done: Callable[[Config], None]) -> None:
        """Until a worker answers or the poll interval has passed."""
        for worker in workers:
            answer = worker.answer(_POLL_SECONDS / len(workers))
            if answer is None or worker.config is None:
                continue
            config, worker.config = worker.config, None
            if answer.died and self._goes_on(config):
                self.waiting.appendleft(config)
                continue
            if answer.words != "done":
                self._fail(config, answer.words)
            done(config)

    def _goes_on(self, config: Config) -> bool:
        """Whether a run whose worker died has come further since the last time, or may still try."""
        run, step = run_id(config), 0
        with contextlib.suppress(OSError, UserError):
            step = RunFolder(self.root / run).status().step
        before, count = self._deaths.get(run, (0, 0))
        self._deaths[run] = step, 1 if step > before else count + 1
        return self._deaths[run][1] < _DEATHS


class _Worker:
    """A child process that trains one configuration a line of its standard input."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config: Config | None = None
        self._spawn()

    def _spawn(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "normlab.jobs.worker", str(self.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.answers: queue.Queue[_Answer] = queue.Queue()
        self.reader = threading.Thread(target=self._read, args=(self.process, self.answers), daemon=True)
        self.reader.start()

    @staticmethod
    def _read(process: subprocess.Popen[str], answers: queue.Queue[_Answer]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                answers.put(_Answer(line.strip()))
        answers.put(_Answer(f"the worker process ended with code {process.wait()}", died=True))

    def start(self, config: Config) -> None:
        if self.process.poll() is not None:
            self.close()
            self._spawn()
        assert self.process.stdin is not None
        self.config = config
        self.process.stdin.write(to_json(config) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_seconds: float) -> _Answer | None:
        """None while the run goes on."""
        try:
            return self.answers.get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def interrupt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End the process once its run is saved."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.reader.join()

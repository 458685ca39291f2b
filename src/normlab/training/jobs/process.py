"""A worker that is a process of this machine, and what a queue asks of any worker."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from normlab.config.config import Config
from normlab.config.io import to_json


class DiedError(Exception):
    """A worker ended before it had answered."""


class Worker(Protocol):
    """Trains one configuration after the other, somewhere."""

    def train(self, config: Config) -> str:
        """Return the answer, "done" or the reason why not. Raises DiedError if the worker ends first."""
        ...

    def alive(self) -> bool:
        """Whether it can train another configuration."""
        ...

    def interrupt(self) -> None:
        """Ask it to save its run and end, without waiting."""
        ...

    def close(self) -> None:
        """Let it end, once its run is saved."""
        ...


class Process:
    """A ``normlab.training.jobs.worker`` process.

    It imports nothing from its directory (``-P``) but the modules that ``--import`` names.
    """

    def __init__(
        self, root: Path, *, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "normlab.training.jobs.worker", str(root)],
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

"""Runs of a command, one folder for each seed: started once, ended once, whoever is killed in between.

A run is a shell that runs the command and then writes its exit code. It holds the lock of the run's folder
for as long as it lives, which may be longer than the process that started it: whoever comes next waits for
it, and finds its result. A folder without an exit code belongs to a run that was stopped; it starts anew.
So does a run that a signal has killed, as where memory ran out: that says nothing about its command.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from normlab.base.files import read_json, sync, write_json_atomic
from normlab.base.io import from_plain
from normlab.base.registry import Registry
from normlab.judging.command import Command

SCRIPT: Final = '"$@"; code=$?; echo $code > "$0/exit.new" && mv "$0/exit.new" "$0/exit"'
"""What the shell of a run does; $0 is the run's folder. The exit code is moved into place, so that nobody
reads half of it.
"""
PATIENCE_SECONDS: Final = 5.0
"""A run that is to stop has so long to end by itself."""
CANNOT_START: Final = (126, 127)
"""Exit codes of a shell whose command is not there, or is no program."""
OF_SIGNALS: Final = 128
"""A shell adds this to the number of the signal that has killed its command."""


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended, as its folder holds it."""

    seed: int
    exit_code: int
    seconds: float

    @property
    def signal(self) -> int:
        """The number of the signal that killed it; 0 if it ended by itself."""
        number = self.exit_code - OF_SIGNALS
        return number if number in signal.valid_signals() else 0


class RunFolder:
    """The folder of one run: ``started``, ``log``, ``exit`` from the shell, and ``run.json`` in the end."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed

    @property
    def log(self) -> Path:
        return self.path / "log"

    def ended(self) -> EndedRun | None:
        """The run if it has ended by itself, else None."""
        run = self._last()
        return None if run is None or run.signal else run

    def killed_by(self) -> int:
        """The number of the signal that killed its last run; 0 if none did."""
        run = self._last()
        return 0 if run is None else run.signal

    def _last(self) -> EndedRun | None:
        """The last run, however it has ended. What its shell has left is written down in ``run.json``."""
        record, code = self.path / "run.json", self.path / "exit"
        if record.is_file():
            return from_plain(EndedRun, read_json(record), str(record))
        text = code.read_text(encoding="utf-8", errors="replace").strip() if code.is_file() else ""
        if not text.isdecimal():  # a power cut can leave an empty file
            return None
        # the shell writes its exit code last, so that this file is as old as the end of the run
        seconds = code.stat().st_mtime - (self.path / "started").stat().st_mtime
        run = EndedRun(self.seed, int(text), round(max(0.0, seconds), 3))
        sync(self.log)
        write_json_atomic(record, run)
        return run

    def forget(self) -> None:
        """Let the run start anew, though it has ended."""
        for name in ("run.json", "exit"):
            (self.path / name).unlink(missing_ok=True)


class Process(ABC):
    """A run in progress, somewhere."""

    @abstractmethod
    def wait(self) -> None:
        """Return once it has ended."""

    @abstractmethod
    def stop(self) -> None:
        """End it, and all that it started."""


Place = Callable[[Sequence[str], RunFolder], Process]
"""Starts the words of a command for a run's folder, which is there and empty but for its lock."""
PLACES: Final[Registry[Place]] = Registry("place for --on")
"""Where runs can be trained, by what is typed after --on; ``normlab.lab`` adds Ray."""


@PLACES.register("local")
class LocalProcess(Process):
    """A run on this machine, in a process group of its own, so that Ctrl-C reaches it through us alone."""

    def __init__(self, words: Sequence[str], folder: RunFolder) -> None:
        lock = os.open(folder.path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)  # the shell inherits it, and holds it until it ends
        try:
            with folder.log.open("wb") as log:
                self.shell = subprocess.Popen(
                    ["/bin/sh", "-c", SCRIPT, str(folder.path.resolve()), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        finally:
            os.close(lock)

    def wait(self) -> None:
        self.shell.wait()

    def stop(self) -> None:
        self._signal(signal.SIGTERM)
        until = time.monotonic() + PATIENCE_SECONDS
        while self._signal(0) and time.monotonic() < until:
            self.shell.poll()  # a process that has ended stays in its group until somebody asks for it
            time.sleep(0.02)
        self._signal(signal.SIGKILL)
        self.shell.wait()

    def _signal(self, number: int) -> bool:
        """Send a signal to the whole group, and return whether anybody was left."""
        try:
            os.killpg(self.shell.pid, number)
        except ProcessLookupError:
            return False
        return True


def _environment() -> dict[str, str]:
    """The user's own environment, without what normlab's command line adds to it: PYTHONSAFEPATH, under which
    a child process would not import from its folder.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


class Runs:
    """The runs of one command: ``FOLDER/<id of the command>/seed-<seed>``."""

    def __init__(self, root: Path, command: Command) -> None:
        self.path, self.command = root / command.id, command
        self.path.mkdir(parents=True, exist_ok=True)
        record = self.path / "command.json"
        if not record.is_file():
            write_json_atomic(record, command)

    def folder(self, seed: int) -> RunFolder:
        return RunFolder(self.path / f"seed-{seed}", seed)

    def ended(self, seed: int) -> EndedRun | None:
        return self.folder(seed).ended()

    def seconds(self) -> list[float]:
        """How long each run took that has ended."""
        seconds = list[float]()
        for path in self.path.glob("seed-*"):
            run = self.ended(int(path.name.removeprefix("seed-")))
            if run is not None:
                seconds.append(run.seconds)
        return seconds

    def start(self, seed: int, where: Place) -> Process | None:
        """Start the run of a seed; None if it has ended meanwhile.

        Waits for a run of this seed that is still in progress because whoever started it was killed.
        """
        folder = self.folder(seed)
        folder.path.mkdir(exist_ok=True)
        _wait_for_lock(folder.path / "lock")
        if folder.ended() is not None:
            return None
        for path in folder.path.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (folder.path / "started").touch()
        return where(self.command.words(seed), folder)


def _wait_for_lock(path: Path) -> None:
    """Wait until no shell holds a lock."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(lock)

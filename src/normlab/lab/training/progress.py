"""How far a run is: its progress, the clock of its training, and the phase in its ``status.json``."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from normlab.base.io import Count, from_plain
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.runs.folder import RunFolder, State
from normlab.lab.tasks.task import Task, ignore_progress
from normlab.optim import ScheduleState, ValDecay, schedule_factor


@dataclass
class RunProgress:
    """How far a run is. A checkpoint of weights alone stores only the step."""

    step: Count = 0
    tokens: Count = 0
    """Target tokens trained on so far."""
    padded_tokens: Count = 0
    """Positions of all batches, padding included."""
    seconds: float = 0.0
    best_step: int | None = None
    best_dev: dict[str, float] = field(default_factory=dict)
    """The dev scores at ``best_step``, by metric name."""
    val_decay: ValDecay = ValDecay()
    waited: Count = 0
    """Validations since the best one."""
    stopped: str = ""
    """Why the run ends here, before its last step."""

    def learning_rate(self, config: Config, ahead: int = 0) -> float:
        """The rate of the last step, or of a later one if no validation comes before it."""
        schedule = ScheduleState(config.optim, config.train.steps, self.val_decay.decays)
        return config.optim.lr * schedule_factor(self.step + ahead, schedule)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``. Raises UserError for anything else."""
        if "step" not in state:
            raise UserError("progress.step is missing")
        vars(self).update(vars(from_plain(RunProgress, dict(state), "progress")))


PAUSE_SECONDS: Final = 10.0
"""A process counts as stopped, for example by Ctrl-Z, once none of its threads has run for this long."""
_BEAT_SECONDS: Final = 1.0


class TrainingClock:
    """Measures the seconds of training, without the pauses before resumptions and, while ``watched``, without
    those in which the process is stopped.
    """

    def __init__(self, before: float = 0.0) -> None:
        self._seen = time.perf_counter()
        self._start = self._seen - before
        self._beating, self._lock = threading.Event(), threading.Lock()

    def seconds(self) -> float:
        return round(self._beat() - self._start, 3)

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Leave the seconds of this block out."""
        began = self.seconds()
        yield
        self._start += self.seconds() - began

    @contextmanager
    def watched(self) -> Generator[None]:
        """Within this block, notice when the process is stopped: a thread checks the time every second."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_BEAT_SECONDS):
                self._beat()

        self._beat()
        self._beating.set()
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._beating.clear()
            ended.set()
            thread.join()

    def _beat(self) -> float:
        """Return the time. A gap since the last beat is a pause, which moves the start."""
        with self._lock:
            now = time.perf_counter()
            gap, self._seen = now - self._seen, now
            if self._beating.is_set() and gap > PAUSE_SECONDS:
                self._start += gap
            return now


EVERY_SECONDS: Final = 1.0
"""The least time between two writes."""


class Phases:
    """Writes the phase of a run, at most every ``EVERY_SECONDS``."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._due, self._written = folder, 0.0, False

    @contextmanager
    def during(self, task: Task[Any, Any, Any], phase: str) -> Generator[None]:
        """Within this block, write the phases that the task names, beginning with ``phase``."""
        task.advance = self._advance
        try:
            self._advance(phase, None)
            yield
        finally:
            task.advance = ignore_progress
            if self._written:
                self._write("", None)
                self._written = False

    def _advance(self, phase: str, done: float | None) -> None:
        if time.monotonic() >= self._due:
            self._write(phase, done)
            self._due, self._written = time.monotonic() + EVERY_SECONDS, True

    def _write(self, phase: str, done: float | None) -> None:
        self._folder.set_status(replace(self._folder.status(), phase=phase, phase_done=done))


def mark(folder: RunFolder, state: State, error: str = "") -> None:
    """Write the state in which a run ends, if it can be written."""
    with suppress(OSError, UserError):  # an error of a full disk would hide the first one
        folder.set_status(replace(folder.status(), state=state, phase="", phase_done=None, error=error))


@contextmanager
def marked(folder: RunFolder) -> Generator[None]:
    """Mark the run as interrupted or failed if this block is."""
    try:
        yield
    except KeyboardInterrupt:
        mark(folder, "interrupted")
        raise
    except Exception as error:
        mark(folder, "failed", f"{type(error).__name__}: {error}")
        raise

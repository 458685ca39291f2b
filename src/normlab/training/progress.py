"""The progress of a run, and the clock of its training."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from normlab.config.fields import Count
from normlab.config.io import from_plain
from normlab.errors import UserError
from normlab.optim import ValDecay


@dataclass
class Progress:
    """How far a run is. Weights that are kept alone have the step and nothing else."""

    step: Count = 0
    tokens: Count = 0
    """Target tokens that were trained on."""
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

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``. Raises UserError for anything else."""
        if "step" not in state:
            raise UserError("progress.step is missing")
        vars(self).update(vars(from_plain(Progress, dict(state), "progress")))


PAUSE_SECONDS: Final = 10.0
"""The time without any running thread from which a process counts as stopped, by Ctrl-Z for example."""
_BEAT_SECONDS: Final = 1.0


class Clock:
    """Measures the seconds of training, without the pauses between resumptions, and without those in which
    the process was stopped while it is ``watched``.
    """

    def __init__(self, before: float) -> None:
        self._seen = time.perf_counter()
        self._start = self._seen - before
        self._beating, self._lock = threading.Event(), threading.Lock()

    def seconds(self) -> float:
        """The seconds so far, to the millisecond."""
        return round(self._beat() - self._start, 3)

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Stop the clock within this block."""
        began = self.seconds()
        yield
        self._start += self.seconds() - began

    @contextmanager
    def watched(self) -> Generator[None]:
        """Notice within this block when the process is stopped: a thread looks at the time every second."""
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

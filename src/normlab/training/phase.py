"""The phase of a run, such as a validation, in its ``status.json``."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from normlab.runs.folder import RunFolder
from normlab.tasks.task import Task, unheeded

EVERY_SECONDS: Final = 1.0
"""The least time between two writes."""


class Phases:
    """Writes the phase of a run, at most every ``EVERY_SECONDS``."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._due, self._written = folder, 0.0, False

    @contextmanager
    def during(self, task: Task[Any, Any, Any], phase: str = "") -> Generator[None]:
        """Write the phases that the task names within this block, beginning with ``phase``."""
        task.advance = self._advance
        try:
            if phase:
                self._advance(phase, None)
            yield
        finally:
            task.advance = unheeded
            if self._written:
                self._write("", None)
                self._written = False

    def _advance(self, phase: str, done: float | None) -> None:
        if time.monotonic() >= self._due:
            self._write(phase, done)
            self._due, self._written = time.monotonic() + EVERY_SECONDS, True

    def _write(self, phase: str, done: float | None) -> None:
        self._folder.set_status(replace(self._folder.status(), phase=phase, phase_done=done))

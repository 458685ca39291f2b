"""What tests cost, in passes and in steps, and a time after which no further pass or copy begins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class Cost(NamedTuple):
    """How many passes and steps something takes."""

    passes: float = 0.0
    """Forward passes in float64, on a part of the batch if it is large; a backward pass counts as two."""
    steps: float = 0.0
    """Whole steps, on all that the user's own step needs."""


class OutOfTimeError(BaseException):
    """A pass, or a copy of a model, was about to begin after the deadline.

    It is no ``Exception``: a test that catches whatever a model may raise would take it for an answer.
    """


@dataclass
class Deadline:
    """The time, by ``time.monotonic()``, after which no further pass or copy begins."""

    at: float
    free: int = 0
    """How many passes may begin even so."""
    begins: list[float] = field(default_factory=list)
    """When each pass has begun."""

    @property
    def begun(self) -> int:
        """How many passes have begun."""
        return len(self.begins)

    def pass_s(self, now: float) -> float:
        """About how many seconds one pass takes: the shortest time from the beginning of one to that of the
        next, or until now. In the others there may be copies of the model.
        """
        return min((b - a for a, b in pairwise([*self.begins, now])), default=0.0)


_current: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


@contextmanager
def passes_until(deadline: Deadline) -> Iterator[None]:
    """Inside this block, raise OutOfTimeError instead of beginning a pass or a copy after the deadline."""
    token = _current.set(deadline)
    try:
        yield
    finally:
        _current.reset(token)


def begin_pass() -> None:
    """Count a pass, or raise OutOfTimeError if it would begin after the deadline."""
    require_time()
    if (deadline := _current.get()) is not None:
        deadline.begins.append(time.monotonic())


def require_time() -> None:
    """Raise OutOfTimeError after the deadline, once as many passes as are free have begun."""
    deadline = _current.get()
    if deadline is not None and deadline.begun >= deadline.free and time.monotonic() >= deadline.at:
        raise OutOfTimeError

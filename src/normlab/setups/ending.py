"""End a script from inside one of its calls, also where it catches every exception and goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from traceback import walk_stack
from types import FrameType
from typing import Any, NoReturn


class EnoughSeen(BaseException):
    """Ends the script when enough steps were seen. Not an Exception: ``except Exception`` lets it pass."""


class Ending:
    """Raises ``EnoughSeen`` in a script until it ends.

    A bare ``except`` catches it, and a loop around that may go on until it gets here again. Then it is raised
    once more, and again at the next line that runs in the frame that went on: that is a line of its
    ``except``, which the same ``try`` does not cover. If the frame goes on yet again, the line was another
    one, such as one of a ``finally``, and next time one more line is let pass.
    """

    def __init__(self) -> None:
        self._running: list[FrameType] = []
        """The frames in which it was first raised, from the inside out."""
        self._went_on: FrameType | None = None
        """The innermost of them that has gone on."""
        self._lines = 0
        """How many of its lines are let pass before it is raised there."""
        self._tracing: Any = None
        """What traced the process before."""

    @property
    def has_begun(self) -> bool:
        """Whether it was raised."""
        return bool(self._running)

    def raise_in_script(self) -> NoReturn:
        """Raise it, for the first time or because the script has gone on."""
        stack = [frame for frame, _ in walk_stack(None)]
        if not self._running:
            self._running, self._tracing = stack, sys.gettrace()
            raise EnoughSeen
        frame = next(frame for frame in stack if any(frame is earlier for earlier in self._running))
        self._lines = self._lines + 1 if frame is self._went_on else 0
        self._went_on = frame
        frame.f_trace = _raising_after(self._lines)
        sys.settrace(_trace_nothing)
        raise EnoughSeen

    def stop(self) -> None:
        """Trace what was traced before."""
        if self._went_on is not None:
            del self._went_on.f_trace
            sys.settrace(self._tracing)


def _raising_after(lines: int) -> Callable[[FrameType, str, Any], Any]:
    """Return what traces a frame, and raises ``EnoughSeen`` after so many of its lines."""

    def traced(_: FrameType, event: str, __: Any) -> Any:
        nonlocal lines
        if event == "line" and lines == 0:
            raise EnoughSeen
        lines -= event == "line"
        return traced

    return traced


def _trace_nothing(_: FrameType, __: str, ___: Any) -> None:
    """Trace none of the functions that are called from now on."""

"""What a command says while a user's script takes long to come to its first step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from normlab.base.libraries import is_library
from normlab.base.units import duration
from normlab.cli import errors

FIRST_AFTER_S: Final = 60.0
"""When the first line comes; each further one comes after twice as long as the one before."""


@contextmanager
def says_where(
    script: str, *, after_s: float = FIRST_AFTER_S, write: Callable[[str], None] = errors.write
) -> Iterator[None]:
    """Say now and then, while this block runs, that the script still does, and at which line of the user's.

    Many scripts evaluate before their first step, which takes minutes on a processor: without a word that
    looks like a check that hangs.
    """
    ended = threading.Event()
    runner = threading.get_ident()

    def speak() -> None:
        wait_s, waited_s = after_s, 0.0
        while not ended.wait(wait_s):
            waited_s += wait_s
            place = _line_of_user(sys._current_frames().get(runner))
            write(
                f"{script} is still running after {duration(waited_s)}{place}; what it does before its first "
                "step takes as long as it does alone, and its own arguments, after --, may shorten it"
            )
            wait_s = waited_s

    speaker = threading.Thread(target=speak, name="normlab-waiting", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()


def _line_of_user(frame: FrameType | None) -> str:
    """Return ``, at FILE:LINE in FUNCTION()`` of the innermost frame of the user's, or nothing."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    function = frame.f_code.co_name
    within = "" if function == "<module>" else f" in {function}()"
    return f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}{within}"

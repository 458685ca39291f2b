"""The one exception that means: the input is wrong, and here is what to change."""

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class UserError(ValueError):
    """An input that cannot be used: what was given, what is allowed, what to type next.

    It is raised where a value comes from a person (a flag, a file, an argument). The command line prints its
    sentence alone; any other exception is an error of normlab and is shown with its traceback.
    """


def is_own(error: BaseException) -> bool:
    """Whether a line of this package raised an exception, and nothing of the user's that it runs.

    Functions of torch that a model calls pass through ``trace.functions``, whose lines count as torch's.
    """
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    home = Path(__file__).parent
    while frames and frames[-1] == home / "trace" / "functions.py":
        frames.pop()
    return bool(frames) and home in frames[-1].parents


class SpentError(UserError):
    """A budget that was spent before the end: the same command goes on from there."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the nearest allowed one, and all of them."""
    names = list(allowed)
    close = difflib.get_close_matches(word, names, 1)
    return (f", did you mean {close[0]!r}?" if close else "") + f" (allowed: {', '.join(names)})"

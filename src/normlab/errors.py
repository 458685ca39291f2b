"""The exception that says: the input is wrong, and this is what to change."""

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class UserError(ValueError):
    """An input that cannot be used: what was given, what is allowed, what to type next.

    It is raised for a value that comes from a person (a flag, a file, an argument). The command line prints
    just its sentence; any other exception is an error of normlab and is shown with its traceback.

    >>> normlab.resolve("pree", normlab.Config())
    Traceback (most recent call last):
    ...
    normlab.errors.UserError: ...did you mean 'pre'...
    """


def is_own(error: BaseException) -> bool:
    """Whether a line of this package raised it, but not one that passes torch a function of the model's."""
    home, frames = Path(__file__).parent, reversed(traceback.extract_tb(error.__traceback__))
    last = next((f for x in frames if (f := Path(x.filename)) != home / "trace" / "functions.py"), None)
    return last is not None and home in last.parents


def in_one_line(error: BaseException) -> str:
    """Return the class of an exception and the first 200 characters of its message, for use in a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class NoStepError(UserError):
    """A script made no step of an optimizer that follows a backward pass."""


class SpentError(UserError):
    """The budget was spent before the end; the same command continues from there."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the nearest allowed word, by what they share and
    then by length, and all allowed words.
    """
    names = list(allowed)

    def likeness(name: str) -> tuple[float, int]:
        return difflib.SequenceMatcher(None, name, word).ratio(), -abs(len(name) - len(word))

    close = max(difflib.get_close_matches(word, names, 3), key=likeness, default=None)
    return (f", did you mean {close!r}?" if close else "") + f" (allowed: {', '.join(names)})"

"""A cache of encoded words, which makes encoding lines several times faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock

Encode = Callable[[Sequence[str]], list[list[int]]]

MOST_WORDS = 2**17
"""The cache is emptied when it would hold more words, some 30 MB; frequent words are soon there again."""


class WordCache:
    """Encode lines as ``whole`` does, an encoder that splits at white space and sees each word alone.

    Only lines whose white space is U+0020 are split here: printable ones, in the sense of
    ``str.isprintable``. Other lines go to ``whole`` as they are, and so do those with ``mark``, the character
    that stands for a space inside it. Safe to call from several threads.
    """

    def __init__(self, whole: Encode, mark: str) -> None:
        self._whole, self._mark = whole, mark
        self._known: dict[str, list[int]] = {}
        self._lock = Lock()

    def __call__(self, lines: Sequence[str]) -> list[list[int]]:
        apart = [line.isprintable() and self._mark not in line for line in lines]
        others = [line for line, simple in zip(lines, apart, strict=True) if not simple]
        rest = iter(self._whole(others) if others else ())
        simple_lines = (line.split() for line, simple in zip(lines, apart, strict=True) if simple)
        joined = iter(self._join(list(simple_lines)))
        return [next(joined if simple else rest) for simple in apart]

    def _join(self, lines: list[list[str]]) -> list[list[int]]:
        with self._lock:
            known = self._known
            words = set(chain.from_iterable(lines))
            new = words - known.keys()
            if len(known) + len(new) > MOST_WORDS:
                known.clear()
                new = words
            # Sorted, so that the calls of the library do not depend on how strings are hashed.
            asked = sorted(new)
            known.update(zip(asked, self._whole(asked) if asked else (), strict=True))
            return [list(chain.from_iterable(map(known.__getitem__, line))) for line in lines]

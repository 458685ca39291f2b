"""Ids of lines from those of their words, each of which is encoded once; several times faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock

Encode = Callable[[Sequence[str]], list[list[int]]]

WORDS_KEPT = 2**17
"""Known words take some 30 MB; beyond that all are forgotten, and the frequent ones are soon known again."""


class Wordwise:
    """What ``whole`` makes of lines, for one that splits at white space and then looks at each word alone.

    Only lines are taken apart in which white space is the space U+0020 and nothing else: printable ones, in
    the sense of ``str.isprintable``. The others go to ``whole`` as they are, and so do those with ``mark``,
    the character that stands for the space inside it. Safe to call from several threads.
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
            if len(known) + len(new) > WORDS_KEPT:
                known.clear()
                new = words
            # Sorted, so that what the library sees does not depend on how strings are hashed.
            asked = sorted(new)
            known.update(zip(asked, self._whole(asked) if asked else (), strict=True))
            return [list(chain.from_iterable(map(known.__getitem__, line))) for line in lines]

"""Texts that are read line by line, as often as needed, wherever they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from normlab.config.fields import flag_name
from normlab.config.units import count
from normlab.errors import UserError

LINES_AT_A_TIME = 8192
"""The most lines of a part of a text: few enough that a part's memory does not matter."""

CHARACTERS_AT_A_TIME = 2**21
"""The most characters of a part, for texts with long lines; a line is never cut."""

LONGEST_WORD = 2**15
"""The most characters without white space between them: tokenizers take minutes over many more."""

T = TypeVar("T")


@dataclass(frozen=True)
class Survey:
    """Facts about a text that one pass over it gives."""

    lines: int
    blank: bool
    """Whether no line has anything but white space."""
    digest: bytes
    """SHA-256 of ``raw`` of its lines."""


def survey(lines: Iterable[str], name: str) -> Survey:
    """Read a text once, in constant memory, and return the facts about it. Raises as ``require_words``."""
    whole, count, blank = hashlib.sha256(), 0, True
    for part in parts(lines):
        require_words(part, name, first=count + 1)
        whole.update(raw(part))
        count += len(part)
        blank = blank and not any(line.strip() for line in part)
    return Survey(count, blank, whole.digest())


def raw(part: Sequence[str]) -> bytes:
    r"""Encode lines as UTF-8, each with ``\n`` at its end."""
    return "\n".join([*part, ""]).encode()


def parts(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the lines in lists of bounded size; no list is empty."""
    return _parts(lines, len)


def paired_parts(source: Iterable[str], target: Iterable[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield both sides of a parallel text in lists of bounded size, line n beside line n.

    The iteration ends with the shorter side.
    """
    both = zip(source, target, strict=False)
    for part in _parts(both, lambda pair: len(pair[0]) + len(pair[1])):
        yield [pair[0] for pair in part], [pair[1] for pair in part]


def _parts(items: Iterable[T], characters: Callable[[T], int]) -> Iterator[list[T]]:
    part: list[T] = []
    size = 0
    for item in items:
        part.append(item)
        size += characters(item)
        if len(part) == LINES_AT_A_TIME or size >= CHARACTERS_AT_A_TIME:
            yield part
            part = list[T]()
            size = 0
    if part:
        yield part


def require_words(lines: Iterable[str], name: str, *, first: int = 1) -> None:
    """Raise UserError for a word of more than ``LONGEST_WORD`` characters; ``first`` numbers the lines."""
    for number, line in enumerate(lines, first):
        if len(line) > LONGEST_WORD and (longest := max(map(len, line.split()), default=0)) > LONGEST_WORD:
            raise UserError(
                f"{name}, line {number:,} has a word of {longest:,} characters, and at most {LONGEST_WORD:,} "
                "are allowed; put spaces into it, or leave the line out"
            )


def require_texts(given: Sequence[str], needed: Sequence[str], what: str) -> None:
    """Raise UserError if a needed field of the configuration is not given; ``what`` says which are needed."""
    if missing := [name for name in needed if name not in given]:
        came, absent = (", ".join(map(flag_name, names)) for names in (given, missing))
        raise UserError(f"only {came} came, but {what}; pass {absent}")


def require_parallel(names: tuple[str, str], counts: tuple[int, int]) -> None:
    """Raise UserError if a side of a parallel text is empty or the numbers of lines differ."""
    for name, lines in zip(names, counts, strict=True):
        if not lines:
            raise UserError(f"{name} is empty; pass a file with one sentence a line")
    if counts[0] != counts[1]:
        raise UserError(
            f"{names[0]} has {count(counts[0], 'line')} but {names[1]} has {counts[1]}; line n "
            "of one must be the translation of line n of the other"
        )


def require_unchanged(name: str, before: bytes, now: bytes) -> None:
    """Raise UserError if the digest of a text is no longer the one of its first reading."""
    if before != now:
        raise UserError(
            f"{name} changed while it was prepared; type the command again when nothing writes to it any more"
        )

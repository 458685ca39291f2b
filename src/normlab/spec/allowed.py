"""The values that the fields of a dataclass may hold, as a table that its ``__post_init__`` checks."""

from __future__ import annotations

import difflib
import functools
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeVar

from normlab.errors import UserError

MOST = 2**63
"""Whole numbers are below this limit, which tensors cannot hold."""


@dataclass(frozen=True)
class Range:
    """Numbers ``>= least``, ``> above`` and ``< below``, if these are given; never NaN."""

    least: float = -math.inf
    above: float = -math.inf
    below: float | None = None
    whole: bool = False

    def holds(self, value: object) -> bool:
        if not isinstance(value, Integral if self.whole else Real) or _beyond(value):
            return False
        number = float(value)
        inside = number >= self.least and (self.above == -math.inf or number > self.above)
        return inside and (self.below is None or number < self.below)

    def wanted(self, value: object) -> str:
        """Describe what is allowed, as far as ``value`` breaks it."""
        if not isinstance(value, Integral if self.whole else Real):
            return "a whole number" if self.whole else "a number"
        if _beyond(value) > 0:
            return f"below {MOST:,}"
        words = [f"at least {self.least:g}"] if self.least > -math.inf else []
        words += [f"above {self.above:g}"] if self.above > -math.inf else []
        words += [f"below {self.below:g}"] if self.below is not None and self.below < math.inf else []
        words += ["finite"] if self.below == math.inf and value == math.inf else []
        return " and ".join(words)


def _beyond(value: object) -> int:
    """Return 1 for a whole number that is too large, -1 for one too far below zero, else 0."""
    whole = int(value) if isinstance(value, Integral) else 0
    return (whole >= MOST) - (whole <= -MOST)


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def holds(self, value: object) -> bool:
        return value in self.words

    def wanted(self, value: object) -> str:
        """Describe what is allowed, with the word that may be meant if one is near."""
        close = difflib.get_close_matches(str(value), self.words, 1)
        words = ", ".join(word or "''" for word in self.words)
        allowed = f"one of {words}" if len(self.words) > 1 else repr(self.words[0])
        return allowed + (f" (did you mean {close[0]!r}?)" if close and len(self.words) > 1 else "")


@dataclass(frozen=True)
class Steps:
    """One of a few words, or the numbers of steps, such as 10,50."""

    words: tuple[str, ...]

    def holds(self, value: object) -> bool:
        return value in self.words or bool(re.fullmatch(r"[0-9]{1,15}(,[0-9]{1,15})*", str(value)))

    def wanted(self, value: object) -> str:
        """Describe what is allowed."""
        words = ", ".join(word or "''" for word in self.words)
        return f"one of {words}, or steps such as 10,50"


SIZE = Range(least=1, whole=True)
COUNT = Range(least=0, whole=True)
SHARE = Range(least=0, below=1)
POSITIVE = Range(above=0, below=math.inf)
AMOUNT = Range(least=0, below=math.inf)


Rule = TypeVar("Rule", bound=Choice | Range | Steps)


def check(section: object, table: Mapping[Rule, str]) -> None:
    """Raise UserError at the first field whose value is not allowed.

    ``table`` maps each rule to the fields under it, separated by spaces; it holds for every item of a tuple.
    A field of type ``Literal`` needs no rule: its type is one.
    """
    for rule, names in [*table.items(), *_literals(type(section))]:
        for name in names.split():
            given = getattr(section, name)
            for value in given if isinstance(given, tuple) else (given,):
                if not rule.holds(value):
                    shown = {1: "more", -1: "less"}.get(_beyond(value)) or repr(value)
                    raise UserError(f"{name} is {rule.wanted(value)}, got {shown}")


@functools.cache
def _literals(kind: type) -> list[tuple[Choice, str]]:
    hints = typing.get_type_hints(kind)
    return [
        (Choice(typing.get_args(hint)), name)
        for name, hint in hints.items()
        if typing.get_origin(hint) is typing.Literal
    ]

"""Claims: the assertions of a paper as tests on measured numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Final, Literal, TypeAlias

Verdict: TypeAlias = Literal["agrees", "disagrees", "undecided", "not run"]
VERDICTS: Final[tuple[Verdict, ...]] = ("disagrees", "undecided", "not run", "agrees")
"""Verdicts in the order in which they decide: a whole agrees only where each of its parts does."""


@dataclass(frozen=True)
class Measure:
    """A measured number with its 95% interval: the number itself where nothing was drawn at random."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Measure:
        """A number without spread: measured again, it would be the same."""
        return cls(value, value, value)


@dataclass(frozen=True)
class Claim:
    """The assertion that a measure lies between two bounds.

    Raises ValueError for a claim that nothing could contradict.
    """

    says: str
    """The assertion in words, naming what is compared."""
    measure: str
    """The name that a reproduction gives to the number."""
    at_least: float = -inf
    at_most: float = inf
    published: str = ""
    """The number or formula that the paper prints for this, where it prints one."""

    def __post_init__(self) -> None:
        if not (isfinite(self.at_least) or isfinite(self.at_most)) or self.at_least > self.at_most:
            raise ValueError(
                f"the claim {self.says!r} allows {self.at_least} to {self.at_most}, which decides nothing; "
                "give at_least, at_most or both, the smaller one first"
            )

    def verdict(self, measures: Mapping[str, Measure]) -> Verdict:
        """``agrees`` where the whole interval is within the bounds, ``disagrees`` where all of it is outside,
        ``undecided`` where it is on both sides or not a number, ``not run`` where nothing was measured.
        """
        if self.measure not in measures:
            return "not run"
        found = measures[self.measure]
        if self.at_least <= found.low and found.high <= self.at_most:
            return "agrees"
        if found.high < self.at_least or found.low > self.at_most:
            return "disagrees"
        return "undecided"

    def allowed(self) -> str:
        """The bounds in words."""
        if self.at_least == self.at_most:
            return f"{self.at_least:g}"
        if isfinite(self.at_least) and isfinite(self.at_most):
            return f"{self.at_least:g} to {self.at_most:g}"
        return f"at least {self.at_least:g}" if isfinite(self.at_least) else f"at most {self.at_most:g}"


def at_least(bound: float, says: str, measure: str, published: str = "") -> Claim:
    """The claim that a measure is at least ``bound``."""
    return Claim(says, measure, at_least=bound, published=published)


def at_most(bound: float, says: str, measure: str, published: str = "") -> Claim:
    """The claim that a measure is at most ``bound``."""
    return Claim(says, measure, at_most=bound, published=published)


def within(low: float, high: float, says: str, measure: str, published: str = "") -> Claim:
    """The claim that a measure lies from ``low`` to ``high``."""
    return Claim(says, measure, low, high, published)


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """Combine verdicts into the first of ``VERDICTS`` that is among them; ``not run`` where there is none."""
    given = set(verdicts)
    return next((verdict for verdict in VERDICTS if verdict in given), "not run")

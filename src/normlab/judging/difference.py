"""What is known of two things that were compared at several seeds, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A point estimate with a 95% interval, which has no ends if there are too few runs."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def least(self) -> float:
        """The smallest absolute value in the interval, if it excludes 0."""
        return min(abs(self.low or 0.0), abs(self.high or 0.0))

    @property
    def largest(self) -> float:
        """The largest absolute value in the interval."""
        return max(abs(self.low or 0.0), abs(self.high or 0.0))


@dataclass(frozen=True)
class Difference:
    """Two things compared: how good each is when it trains, and how often it trains."""

    a: str
    b: str
    seeds: int
    """The number of seeds at which both trained."""
    answer: str
    """``better`` (``a`` is, or ``b``), ``equal`` (no difference that matters), or ``open`` (too few seeds).
    """
    sentence: str = ""
    """The answer in words."""
    delta: Interval | None = None
    """The headline score of ``a`` minus that of ``b``, with an interval that holds for all pairs at once;
    None if both trained at fewer than two seeds.
    """
    p: float | None = None
    """Two-sided, corrected for the number of pairs; below 0.05 exactly when the interval excludes 0."""
    effect: float | None = None
    """If the answer is open, the difference to look for: the one seen, or the margin if that is larger."""
    seeds_needed: int | None = None
    """The number of seeds that would show ``effect``; None if that takes more than a thousand."""
    p_trains: float | None = None
    """The p of both training equally often (Fisher's exact test), corrected for the number of pairs."""
    trains_sentence: str = ""
    """How often each trains, in words; empty if there is no difference."""

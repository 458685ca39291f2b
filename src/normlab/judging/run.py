"""One run as ``judge`` sees it: its change, its seed, and its score or why it has none."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from normlab.errors import UserError

TRAINED: Final = "trained"
DIVERGED: Final = "diverged"
FAILED: Final = "failed"
MISSING: Final = "missing"
"""No run with this seed is known: it says nothing about the change."""


@dataclass(frozen=True)
class ScoredRun:
    """A run that has ended."""

    change: str
    seed: str | None
    """None if its source names none."""
    score: float | None
    """None if it has none, or none that is finite."""
    outcome: str = TRAINED
    """``trained``, ``diverged`` or ``failed``."""
    reason: str = ""
    """Why it has no score, in words."""
    where: str = ""
    """The file, and the line or column, that it was read from."""
    metric: str = ""
    """What its source calls the score; empty if that has no name."""


def ended(
    change: str, seed: str | None, score: float | None, where: str, *, reason: str = "", metric: str = ""
) -> ScoredRun:
    """Return a run with the outcome that its score shows: None is a failure, NaN a divergence."""
    if score is None:
        return ScoredRun(change, seed, None, FAILED, reason or "it has no score", where, metric)
    if not math.isfinite(score):
        return ScoredRun(change, seed, None, DIVERGED, reason or f"its score is {score}", where, metric)
    return ScoredRun(change, seed, score, where=where, metric=metric)


@dataclass(frozen=True)
class Take:
    """Which of the values that a run logged is its score."""

    how: str = "last"
    """``last``, ``best`` or ``mean``."""
    number: int = 1
    """For ``mean``, the number of last values that are averaged."""

    @classmethod
    def of(cls, text: str) -> Take:
        """Read ``last``, ``best`` or ``mean:5``. Raises UserError for anything else."""
        if text in ("last", "best"):
            return cls(text)
        match = re.fullmatch(r"mean:([1-9]\d*)", text)
        if match is None:
            raise UserError(f"--take is {text!r}; type last, best, or mean:5 for the mean of the last five")
        return cls("mean", int(match[1]))

    def score(self, values: Sequence[float], *, higher_is_better: bool) -> float | None:
        """Return the score of a run from its values in order; None without any, NaN if its end is NaN.

        A run that has diverged stays so: the best value before that does not count.
        """
        if not values:
            return None
        if not math.isfinite(values[-1]) or self.how == "last":
            return values[-1]
        if self.how == "mean":
            last = values[-self.number :]
            return sum(last) / len(last)
        finite = [value for value in values if math.isfinite(value)]
        return max(finite) if higher_is_better else min(finite)


@dataclass(frozen=True)
class ScoreOptions:
    """What the user said about where changes, seeds and scores are found."""

    metric: str = ""
    """The column or key of the score, or for logs a regular expression."""
    take: Take = Take()
    by: tuple[str, ...] = ()
    """Columns that say what was changed."""
    seed: str = ""
    """The column of the seed."""
    name: str = ""
    """A regular expression for the names of files or runs, with groups ``change`` and ``seed``."""
    higher_is_better: bool = False

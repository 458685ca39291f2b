"""What scores say about changes: means, every pair, the noise floor, and what so many seeds can tell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final

from normlab.base.io import to_plain
from normlab.base.metric import Metric
from normlab.judging.difference import Difference, Interval
from normlab.judging.run import MISSING, TRAINED

KEEP: Final = "keep"
DISCARD: Final = "discard"
UNDECIDED: Final = "undecided"
DESCRIBED: Final = "described"
"""The verdict if no baseline is named: what is known is described, and nothing is decided."""


@dataclass(frozen=True)
class ChangeResult:
    """One change: its runs in the order of the seeds, and what they say."""

    name: str
    scores: tuple[float | None, ...]
    """None for a run that failed, diverged or is missing."""
    outcomes: tuple[str, ...]
    """``trained``, ``diverged``, ``failed`` or ``missing``."""
    reasons: tuple[str, ...]
    """Why a run has no score, empty if it has one."""
    mean: Interval | None = None
    """Over the seeds that trained; None if none did."""
    trains: Interval | None = None
    """The share of runs that trained."""
    verdict: str = ""
    """``keep``, ``discard`` or ``undecided`` against the baseline; empty if there is none."""
    why: str = ""
    """Why it is undecided though it is better, in words."""

    def value(self, metric: Metric) -> float | None:
        """The mean score; None if no seed trained."""
        return self.mean.value if self.mean else None

    @property
    def trained(self) -> int:
        return self.outcomes.count(TRAINED)

    @property
    def ended(self) -> int:
        """The number of runs, without those that are missing."""
        return len(self.outcomes) - self.outcomes.count(MISSING)

    @property
    def states(self) -> str:
        """The outcomes with the number of seeds of each: ``trained (2), diverged (1)``."""
        return ", ".join(f"{state} ({number})" for state, number in Counter(self.outcomes).items())


@dataclass(frozen=True, repr=False)
class Judgement:
    """What ``normlab.judge`` returns: changes, their differences, and the same in sentences."""

    source: str
    metric: Metric
    margin: float
    """The smallest difference that matters; 0: every difference does."""
    seeds: tuple[str, ...]
    changes: tuple[ChangeResult, ...]
    differences: tuple[Difference, ...] = ()
    noise: float | None = None
    """The root mean square difference between two seeds of one change; None if it is not known."""
    can_tell: dict[int, float] = field(default_factory=dict)
    """By a number of seeds, the difference that they find in four of five cases."""
    baseline: str = ""
    """The change that the others are compared with; empty if none is named."""
    seeds_named: bool = True
    looked_at: bool = False
    """Whether the scores have decided how many seeds there are."""
    sentences: tuple[str, ...] = ()
    """What was found, the headline first."""
    command: str = ""

    noun = "change"

    @property
    def headline(self) -> Metric:
        """The metric by which changes are compared."""
        return self.metric

    @property
    def ranked(self) -> tuple[ChangeResult, ...]:
        """The changes: first those that trained at every seed, then by mean score."""

        def place(change: ChangeResult) -> tuple[bool, float, int]:
            score = self.metric.sort_key(change.value(self.metric))
            return 0 < change.trained == change.ended, score, change.trained

        return tuple(sorted(self.changes, key=place, reverse=True))

    @property
    def verdict(self) -> str:
        """``keep`` if any change is to be kept, ``discard`` if none can be, else ``undecided``.

        Without a baseline it is ``described``.
        """
        verdicts = {change.verdict for change in self.changes} - {""}
        if not verdicts:
            return DESCRIBED
        if KEEP in verdicts:
            return KEEP
        return DISCARD if verdicts == {DISCARD} else UNDECIDED

    @property
    def missing(self) -> tuple[str, ...]:
        """In words, which seeds each change lacks."""
        sentences = list[str]()
        for change in self.changes:
            outcomes = zip(self.seeds, change.outcomes, strict=True)
            seeds = [seed for seed, outcome in outcomes if outcome == MISSING]
            if seeds:
                sentences.append(f"{change.name} has no run with seed {', '.join(seeds)}")
        return tuple(sentences)

    @property
    def failed(self) -> tuple[str, ...]:
        """In words, each run that has no score, and why."""
        return tuple(
            f"{change.name}, seed {seed}: {outcome}, {reason}"
            for change in self.changes
            for seed, outcome, reason in zip(self.seeds, change.outcomes, change.reasons, strict=True)
            if outcome not in (TRAINED, MISSING)
        )

    @property
    def noise_floor(self) -> str:
        """In words, by how much two seeds of one change differ; empty if that is not known."""
        if self.noise is None:
            return ""
        return f"Two seeds of the same change differ by {self.metric.amount(self.noise)} (root mean square)"

    @property
    def power(self) -> str:
        """In words, which difference so many seeds find; empty if that is not known."""
        finite = {seeds: size for seeds, size in self.can_tell.items() if math.isfinite(size)}
        if not finite:
            return ""
        sizes = ", ".join(f"with {seeds} seeds {self.metric.shown(size)}" for seeds, size in finite.items())
        return f"The smallest difference that is found in four of five cases, in {self.metric.label}: {sizes}"

    def lines(self) -> Iterator[str]:
        """All sentences: what was found, each pair, the noise, and what is missing or failed."""
        for sentence in self.sentences:
            yield f"{sentence}."
        for change in self.changes:
            if change.why:
                yield f"{change.why}."
        if self.looked_at:
            yield (
                "How many seeds were run was decided by these scores. Intervals and p do not make up for "
                "that; the verdict of --baseline and --candidate does."
            )
        for difference in self.differences:
            yield f"{difference.sentence}."
            if difference.trains_sentence:
                yield f"{difference.trains_sentence}."
        for sentence in (self.noise_floor, self.power, *self.missing):
            if sentence:
                yield f"{sentence}."
        if not self.seeds_named:
            yield "No seeds are named, so runs of two changes are paired in the order they are listed in."

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"Judgement({self.sentences[0] if self.sentences else self.source})"

    def _repr_html_(self) -> str:
        return "<br>".join(escape(line) for line in self.lines())

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON and the page."""
        return {
            "verdict": self.verdict,
            "baseline": self.baseline,
            "metric": self.metric.name,
            "higher_is_better": self.metric.higher_is_better,
            "digits": self.metric.digits,
            "margin": self.margin,
            "seeds": list(self.seeds),
            "changes": [to_plain(change) for change in self.ranked],
            "differences": [to_plain(difference) for difference in self.differences],
            "noise": self.noise,
            "can_tell": [
                {"seeds": seeds, "difference": size if math.isfinite(size) else None}
                for seeds, size in self.can_tell.items()
            ],
            "missing": list(self.missing),
            "failed": list(self.failed),
            "lines": list(self.lines()),
            "source": self.source,
            "command": self.command,
        }

    def page(self, path: str | Path) -> Path:
        """Write the judgement as a page, one file that needs no network; return the path."""
        from normlab.report.judge import judgement_page

        return judgement_page(self).write(Path(path))

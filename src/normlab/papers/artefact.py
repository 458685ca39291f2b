"""Artefacts: the tables, figures and statements of papers as data."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from normlab.papers.claim import Claim, Measure, Verdict, together, whole
from normlab.papers.trainings import LAPTOP, Scale, Trainings


@dataclass(frozen=True)
class Paper:
    """A paper, or a page, whose tables, figures and statements are artefacts."""

    key: str
    """The part of an artefact's id before the dot."""
    title: str
    authors: str
    """Authors and year."""
    url: str
    about: str
    """What it claims, in a few sentences."""


@dataclass(frozen=True)
class Drawing:
    """A chart of a reproduction's table: the columns that become positions, colours and panels."""

    table: str
    x: str
    y: str
    title: str
    x_title: str
    y_title: str
    colour: str = ""
    """Column whose values differ by colour, such as the placement."""
    panel: str = ""
    """Column whose values each have a chart, side by side on one scale."""
    kind: Literal["line", "bar", "cells"] = "line"
    """``cells`` is a heat map of ``shade`` over x and y."""
    shade: str = ""
    theory: str = ""
    """Column drawn as a dashed line next to what was measured."""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Artefact:
    """A table, figure, statement or piece of code of a paper, with its claims and their study."""

    id: str
    """``<paper's key>.<name>``, say ``liu2020.parameters``."""
    paper: str
    """Authors and year, section (arXiv id), or the publisher of a page."""
    shows: str
    """The content of the table or figure, in one sentence."""
    published: Mapping[str, float | str]
    """Name to number or formula, as printed."""
    asserts: str
    """The claim that a reproduction decides, in words."""
    study: Callable[..., Measurement] | None = None
    """The function of a ``Lab`` and the settings that measures it; None if there is none yet."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The study's arguments: sizes, depths, seeds."""
    trainings: Mapping[Scale, Trainings] = field(default_factory=dict)
    """The runs that the study reads, by scale; empty if it trains nothing."""
    rests_on: Sequence[str] = ()
    """The ids of the artefacts whose results the study reads, so it is measured after them."""
    alone: bool = False
    """Whether the study measures time and needs the machine to itself."""
    claims: Sequence[Claim] = ()
    """The claim as tests on the study's measures."""
    drawings: Sequence[Drawing] = ()
    discussion: str = ""
    """Contradictions with another paper or within this one, and what was known before measuring."""
    finding: str = ""
    """Why we think that the result differs from the paper; written after the measurement."""
    version: int = 1
    """The version number of the claims; earlier versions are kept with what was found for them."""
    date: str = ""
    """The day on which this version was written."""
    reason: str = ""
    """Why this version replaced the one before."""

    def __post_init__(self) -> None:
        if self.version > 1 and not (self.date and self.reason):
            raise ValueError(f"version {self.version} of {self.id} needs a date and a reason; give both")

    @property
    def study_name(self) -> str:
        """The study's name; empty if there is none yet."""
        return getattr(self.study, "__name__", "")

    def shown_at(self, scale: Scale) -> Scale:
        """The scale itself, or the smallest one if it trains nothing at that one."""
        return scale if scale in self.trainings else next(iter(self.trainings), LAPTOP)

    def settings_at(self, scale: Scale) -> dict[str, Any]:
        """The study's arguments at a scale."""
        own = self.trainings[scale].settings if scale in self.trainings else {}
        return {**self.settings, **own}

    @property
    def kind(self) -> Literal["artefact", "dispute"]:
        """What it counts as: an artefact of a paper, or a public dispute."""
        return "dispute" if self.id.startswith("disputes.") else "artefact"

    def fingerprint(self, scale: Scale = LAPTOP) -> str:
        """First 16 hex digits of the SHA-256 of what is asserted and how it is measured: everything that can
        change a verdict or a count. It reveals a result that was measured for another claim.
        """
        runs = {"trainings": self.trainings[scale].content()} if scale in self.trainings else {}
        content = {
            **runs,
            "id": self.id,
            "published": dict(self.published),
            "study": [self.study_name, getattr(self.study, "version", 1)],
            "settings": dict(self.settings),
            "rests_on": self.rests_on,
            "claims": [claim.content() for claim in self.claims],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=_plain).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return a measure of runs, or a sequence, as plain data."""
    return value.content() if hasattr(value, "content") else list(value)


@dataclass(frozen=True)
class Measurement:
    """The result of a study: measures by name, tables of flat rows, and facts about how they were made."""

    measures: Mapping[str, Measure]
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reproduction:
    """The measurement of an artefact as stored."""

    id: str
    fingerprint: str
    """The fingerprint of the artefact when this was measured."""
    measures: Mapping[str, Measure]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    """Name to rows, each flat, of words and numbers."""
    facts: Mapping[str, str]
    """Text, sizes, seeds, machine and versions, in words."""
    seconds: float
    stand_in: str = ""
    """Name of a missing text that the built-in corpus stood in for; empty if none was missing."""
    scale: Scale = LAPTOP
    """The scale of its trainings, if it has any."""
    lock: str = ""
    """The commit that locked the claim; empty if there was none."""
    began: str = ""
    """When the first of its trainings, or the study itself, began: UTC in ISO 8601."""

    def verdict(self, claims: Sequence[Claim]) -> Verdict:
        """Return the verdict on all claims together; undecided if they were measured on another text.

        A check counts if it fails, because then the measurement is wrong.
        """
        if self.stand_in:
            return "undecided"
        found = [(c, c.verdict(self.measures)) for c in claims]
        return together(verdict for c, verdict in found if verdict != "agrees" or not c.check)

    def tally(self, claims: Sequence[Claim]) -> Tally:
        """Count claims by verdict, with the parts of one claim as one, and checks that pass."""
        parts: dict[object, list[Verdict]] = {}
        for claim in claims:
            if not claim.check:
                parts.setdefault(claim.part_of or claim, []).append(claim.verdict(self.measures))
        counted = Counter(map(whole, parts.values()))
        checks = [c.verdict(self.measures) == "agrees" for c in claims if c.check]
        return Tally(dict(counted), sum(checks), len(checks))


@dataclass(frozen=True)
class Tally:
    """Counts of claims by verdict, and of checks, of one artefact or of several."""

    verdicts: Mapping[Verdict, int] = field(default_factory=dict)
    passed: int = 0
    checks: int = 0

    @property
    def claims(self) -> int:
        """The number of claims that are not checks."""
        return sum(self.verdicts.values())

    def __add__(self, other: Tally) -> Tally:
        counted = Counter(self.verdicts) + Counter(other.verdicts)
        return Tally(dict(counted), self.passed + other.passed, self.checks + other.checks)


@dataclass(frozen=True)
class Superseded:
    """A version of an artefact's claims that was replaced, with what was measured for it."""

    version: int
    date: str
    reason: str
    asserts: str
    claims: Sequence[Claim]
    found: Reproduction

"""Artefacts: the tables, figures and statements of papers as data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from normlab.spec.claim import Claim, Measure, Verdict, together


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
    """Column whose values are told apart by colour, such as the placement."""
    panel: str = ""
    """Column whose values have a chart each, side by side on one scale."""
    kind: Literal["line", "bar", "cells"] = "line"
    """``cells`` is a heat map of ``shade`` over x and y."""
    shade: str = ""
    theory: str = ""
    """Column drawn as a dashed line beside what was measured."""
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
    """Name to number, or to formula, as they were printed."""
    asserts: str
    """The claim that a reproduction decides, in words."""
    study: str = ""
    """The name of the function that measures it, one of ``normlab.papers.STUDIES``; empty: none yet."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The study's arguments: sizes, depths, seeds."""
    alone: bool = False
    """Whether the study measures time, and wants the machine for itself."""
    claims: Sequence[Claim] = ()
    """The claim as tests on the study's measures."""
    drawings: Sequence[Drawing] = ()
    discussion: str = ""
    """Contradictions with another paper or within this one, and what was known before the measurement."""

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of what is asserted and how it is measured: a result that was
        measured for another claim shows.
        """
        content = {
            "id": self.id,
            "published": dict(self.published),
            "study": self.study,
            "settings": dict(self.settings),
            "claims": [{**asdict(c), "says": "", "published": ""} for c in self.claims],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=list).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Measurement:
    """The result of a study: measures by name, tables of flat rows, and facts about how it was done."""

    measures: Mapping[str, Measure]
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reproduction:
    """The measurement of an artefact as it is stored."""

    id: str
    fingerprint: str
    """The fingerprint of the artefact when this was measured."""
    measures: Mapping[str, Measure]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    """Name to rows, each a flat one of words and numbers."""
    facts: Mapping[str, str]
    """Text, sizes, seeds, machine and versions, in words."""
    seconds: float
    stand_in: str = ""
    """Name of a text that was not there, so that the built-in corpus stood in for it; empty: none."""

    def verdict(self, artefact: Artefact) -> Verdict:
        """The verdict on all claims together; undecided where they were measured on another text."""
        return "undecided" if self.stand_in else together(c.verdict(self.measures) for c in artefact.claims)

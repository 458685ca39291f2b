"""Artefacts: the tables, figures and statements of papers as data, and what was measured for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from normlab.base.chart import Drawing
from normlab.papers.estimate import Estimate
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
class Artefact:
    """A table, figure, statement or piece of code of a paper, with the study that measures it."""

    id: str
    """``<paper's key>.<name>``, say ``liu2020.parameters``."""
    paper: str
    """Authors and year, section (arXiv id), or the publisher of a page."""
    shows: str
    """The content of the table or figure, in one sentence."""
    published: Mapping[str, float | str]
    """Name to number or formula, as printed."""
    beside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By printed name, the measures and trained cells that correspond to it under other names."""
    study: Callable[..., Measurement] | None = None
    """The function of a ``Lab`` and the settings that measures it; None if there is none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The study's arguments: sizes, depths, seeds."""
    trainings: Mapping[Scale, Trainings] = field(default_factory=dict)
    """The runs that the study reads, by scale; empty if it trains nothing."""
    alone: bool = False
    """Whether the study measures time and needs the machine to itself."""
    drawings: Sequence[Drawing] = ()
    discussion: str = ""
    """Contradictions with another paper or within this one, and why we think that a result differs."""

    @property
    def study_name(self) -> str:
        """The study's name; empty if there is none."""
        return getattr(self.study, "__name__", "")

    def shown_at(self, scale: Scale) -> Scale:
        """The scale itself, or the smallest one if it trains nothing at that one."""
        return scale if scale in self.trainings else next(iter(self.trainings), LAPTOP)

    def settings_at(self, scale: Scale) -> dict[str, Any]:
        """The study's arguments at a scale."""
        of_scale = self.trainings[scale].settings if scale in self.trainings else {}
        return {**self.settings, **of_scale}

    @property
    def kind(self) -> Literal["artefact", "dispute"]:
        """What it counts as: an artefact of a paper, or a public dispute."""
        return "dispute" if self.id.startswith("disputes.") else "artefact"


@dataclass(frozen=True)
class Measurement:
    """The result of a study: measures by name, tables of flat rows, and facts about how they were made."""

    measures: Mapping[str, Estimate] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reproduction:
    """The measurement of an artefact as stored."""

    id: str
    measures: Mapping[str, Estimate]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    """Name to rows, each flat, of words and numbers."""
    facts: Mapping[str, str]
    """Text, sizes, seeds, machine and versions, in words."""
    seconds: float
    stand_in: str = ""
    """Name of a missing text that the built-in corpus stood in for; empty if none was missing."""
    scale: Scale = LAPTOP
    """The scale of its trainings, if it has any."""
    began: str = ""
    """When the first of its trainings, or the study itself, began: UTC in ISO 8601."""

"""A diagnosis, as its JSON file holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from normlab.base.chart import Drawing
from normlab.report.results.plain import fields_of


@dataclass(frozen=True)
class FindingResult:
    """A conclusion in a sentence: what is seen, and after a semicolon what to do about it."""

    severity: str
    sentence: str
    table: str
    """The table that it is drawn from; may be empty."""
    numbers: Mapping[str, Any]
    """Values of that table by their columns, or counts of its rows."""
    reference: str = ""

    @classmethod
    def of(cls, finding: Mapping[str, Any]) -> Self:
        return cls(**fields_of(cls, finding))

    @property
    def head(self) -> str:
        """What is seen."""
        return self.sentence.partition("; ")[0]

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return self.sentence.partition("; ")[2]


@dataclass(frozen=True)
class StudyResult:
    """A study, and how its tables are drawn."""

    name: str
    title: str
    intro: str
    batch: str
    """What it was measured on."""
    charts: Sequence[Drawing]

    @classmethod
    def of(cls, study: Mapping[str, Any]) -> Self:
        values = fields_of(cls, study)
        return cls(**values | {"charts": [Drawing.from_plain(chart) for chart in study["charts"]]})


@dataclass(frozen=True)
class DiagnosisResult:
    """``Diagnosis.to_plain()``, with what a command adds: title, case and command."""

    model: str
    preset: str
    facts: Mapping[str, str]
    structure: str
    stacks: Mapping[str, str]
    """The label of each stack by its name."""
    findings: Sequence[FindingResult]
    seconds: Mapping[str, float]
    """By study."""
    peak_memory_bytes: int
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    """Rows by the name of their table; the studies choose the columns."""
    cause: FindingResult | None = None
    """The finding that explains the most; None if none is grave."""
    verdict: str = "nothing found"
    studies: Sequence[StudyResult] = ()
    title: str = ""
    case: Mapping[str, str] = field(default_factory=dict)
    """More facts, about a recipe or a run."""
    command: str = ""

    @classmethod
    def of(cls, diagnosis: Mapping[str, Any]) -> Self:
        """Read plain values. Raises UserError for a chart of an unknown kind."""
        values = fields_of(cls, diagnosis)
        values["findings"] = [FindingResult.of(finding) for finding in diagnosis["findings"]]
        cause = diagnosis.get("cause")
        values["cause"] = FindingResult.of(cause) if cause else None
        values["studies"] = [StudyResult.of(study) for study in diagnosis.get("studies", ())]
        return cls(**values)

"""A checked training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from normlab.report.results.plain import fields_of


@dataclass(frozen=True)
class Finding:
    """A property that fails, or a note: where, and what was seen."""

    property: str
    module: str
    """Empty for the model as a whole."""
    evidence: str
    advice: str = ""

    @classmethod
    def of(cls, finding: Mapping[str, Any]) -> Self:
        return cls(**fields_of(cls, finding))


@dataclass(frozen=True)
class Failure(Finding):
    """A property that fails."""

    follows: Sequence[Finding] = ()
    """The failures that it explains."""

    @classmethod
    def of(cls, finding: Mapping[str, Any]) -> Self:
        values = fields_of(cls, finding)
        return cls(**values | {"follows": tuple(map(Finding.of, finding["follows"]))})


@dataclass(frozen=True)
class UnreachedLoss:
    """One of the losses that are added up, which could not be judged by itself."""

    number: int
    reason: str


@dataclass(frozen=True)
class Source:
    """Where a module is written."""

    file: str
    line: int
    is_stand_in: bool = False
    """Whether it is the class of a module further out, because the module's own belongs to a library."""


@dataclass(frozen=True)
class CheckResult:
    """``Report.to_dict()``, with what a command adds: title, command, sources and parameters."""

    model: str
    failures: Sequence[Failure]
    """Causes first."""
    notes: Sequence[Finding]
    holds: Sequence[str]
    untestable: Mapping[str, str]
    """Why properties were not judged, by their names."""
    statements: Mapping[str, str]
    """What properties state, by their names."""
    seconds: Mapping[str, float]
    verdict: str = ""
    judged: int = 0
    applicable: int = 0
    unjudged: Sequence[str] | None = None
    """Those of ``untestable`` that apply; None in a report that does not tell them apart."""
    allowed: Sequence[str] = ()
    unreached_losses: Sequence[UnreachedLoss] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    command: str = ""
    sources: Mapping[str, Source] = field(default_factory=dict)
    """By module."""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> CheckResult:
        values = fields_of(cls, report)
        values["failures"] = tuple(map(Failure.of, report["failures"]))
        values["notes"] = tuple(map(Finding.of, report["notes"]))
        losses = report.get("unreached_losses", ())
        values["unreached_losses"] = tuple(UnreachedLoss(**fields_of(UnreachedLoss, loss)) for loss in losses)
        sources = values.get("sources", {}).items()
        values["sources"] = {module: Source(**fields_of(Source, place)) for module, place in sources}
        return cls(**values)

    @property
    def applying(self) -> Sequence[str]:
        """Those of ``untestable`` that apply, as far as the report says."""
        return tuple(self.untestable) if self.unjudged is None else self.unjudged

    def is_allowed(self, failure: Failure) -> bool:
        """Whether a failure does not count."""
        return failure.property in self.allowed

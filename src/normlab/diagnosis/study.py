"""Studies of a model: what each measures, and the findings that rules read off its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from normlab.base.chart import Drawing
from normlab.base.registry import Registry
from normlab.diagnosis.presets import PRESETS, require_preset
from normlab.diagnosis.subject import SMALL_TOKENS, Subject
from normlab.diagnosis.tables import Table, Tables, Value
from normlab.diagnosis.wording import format_number
from normlab.errors import UserError

XIONG: Final = "Xiong et al. 2020, {} (arXiv 2002.04745)"
LIU: Final = "Liu et al. 2020, {} (arXiv 2004.08249)"
SEVERITIES: Final = ("note", "warning", "problem")
"""From a mere observation to something that stops a training."""


@dataclass(frozen=True)
class Finding:
    """One conclusion in a sentence. ``name`` is the same in all diagnoses, so programs can look for it.

    ``numbers`` are the evidence: values of ``table`` under the names of their columns, counts of its rows,
    and what the rule computes from them, such as a ratio.

    >>> print(normlab.Finding("late", "note", "the last layer is late", "depth", {"layers": 3}))
    note: the last layer is late [depth: layers = 3]
    """

    name: str
    severity: str
    sentence: str
    table: str
    numbers: Mapping[str, Value]
    reference: str = ""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise UserError(
                f"the severity of a finding is {', '.join(SEVERITIES)}, got {self.severity!r}; choose one"
            )

    @property
    def evidence(self) -> str:
        """The table and the numbers, in words."""
        numbers = ", ".join(f"{name} = {format_number(value)}" for name, value in self.numbers.items())
        return ": ".join(filter(None, (self.table, numbers)))

    def to_plain(self) -> dict[str, Any]:
        return {**vars(self), "numbers": dict(self.numbers)}

    def __str__(self) -> str:
        support = "; ".join(filter(None, (self.evidence, self.reference)))
        return f"{self.severity}: {self.sentence}" + (f" [{support}]" if support else "")


Rule = Callable[[Tables], Iterator[Finding]]
"""Draws findings from tables, and nothing from tables that are empty."""

SMALL_BATCH: Final = f"the first mini-batch, or about {SMALL_TOKENS} tokens of the batch"
MINI_BATCHES: Final = "the mini-batches, or the batch in four parts"


@dataclass(frozen=True)
class Study:
    """A measurement of a model, with everything that a diagnosis needs to run, judge and draw it.

    Raises UserError for a preset that does not exist.
    """

    name: str
    measure: Callable[[Subject], Table | Iterable[Table]]
    """Returns one or more tables. Tables of the same name, from several studies, are joined."""
    preset: str
    """The smallest preset that includes it: ``cheap`` is a few passes, ``standard`` no second derivatives."""
    rules: tuple[Rule, ...] = ()
    """Draw findings from the tables."""
    title: str = ""
    """Heading of its charts on the page, which a study without charts does not need."""
    intro: str = ""
    """An explanation of the charts, with their source."""
    charts: tuple[Drawing, ...] = ()
    batch: str = "the whole batch"
    """The part of the batch that it is measured on, in words."""
    order: int = 100
    """Its place among the studies: small numbers run first, and come first on the page."""

    def __post_init__(self) -> None:
        require_preset(self.preset)

    def to_plain(self) -> dict[str, Any]:
        words = {"name": self.name, "title": self.title, "intro": self.intro, "batch": self.batch}
        return words | {"charts": [chart.to_plain() for chart in self.charts]}


_STUDIES: Final[Registry[Study]] = Registry("study")


def register(study: Study) -> Study:
    """Add a study to every diagnosis whose preset includes it. Raises UserError if its name is taken.

    It takes an object and decorates no function: a study is a measurement with rules and charts of its own,
    which its file defines one after the other and puts together at the end.
    """
    _STUDIES[study.name] = study
    return study


def registered(preset: str = PRESETS[-1]) -> list[Study]:
    """Return the studies that a preset includes, in their order."""
    require_preset(preset)
    included = PRESETS[: PRESETS.index(preset) + 1]
    return sorted((s for s in _STUDIES.values() if s.preset in included), key=lambda s: (s.order, s.name))


def studies_named(names: Iterable[str]) -> list[Study]:
    """Return the studies of these names, in their order. Raises UserError for an unknown name."""
    wanted = [_STUDIES[name] for name in names]
    return [study for study in registered() if study in wanted]


_RULES: Final[list[Rule]] = []


def rule(function: Rule) -> Rule:
    """Register the decorated function as a rule of its own, which reads tables that studies measure.

    Like the rules of a study it yields findings, and nothing from tables that are empty.
    """
    _RULES.append(function)
    return function


def find(tables: Mapping[str, Table], lr: float | None = None) -> tuple[Finding, ...]:
    """Apply all rules, of studies and others, to these tables; the most severe findings come first."""
    measured, findings = Tables(tables, lr), list[Finding]()
    of_studies = [rule for study in registered() for rule in study.rules]
    for apply in (*of_studies, *_RULES):
        findings += apply(measured)
    return by_severity(findings)


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings, the most severe ones first."""
    return tuple(sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity)))

"""Studies of a model: what each measures, its tables, and the findings read off them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from normlab.base.chart import StudyChart
from normlab.diagnosis.presets import PRESETS, require_preset
from normlab.diagnosis.subject import SMALL_TOKENS, Subject
from normlab.errors import UserError, nearest

Value: TypeAlias = float | int | str | None
Row: TypeAlias = Mapping[str, Any]
"""Values by column, each of them a ``Value``."""


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words under one name; every row has the same columns.

    Raises UserError for a row whose columns differ from the first's.
    """

    name: str
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if tuple(row) != self.columns:
                raise UserError(
                    f"table {self.name!r}: a row has the columns {tuple(row)}, not {self.columns}; give "
                    "every row the same ones"
                )

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.rows[0]) if self.rows else ()

    def column(self, name: str) -> list[Value]:
        """Return the values of a column, one per row. Raises UserError for a column that does not exist."""
        self._require(name)
        return [row[name] for row in self.rows]

    def where(self, **equal: Value) -> Table:
        """Return a table of the rows that have these values. Raises like ``column``."""
        self._require(*equal)
        return Table(self.name, tuple(r for r in self.rows if all(r[k] == v for k, v in equal.items())))

    def _require(self, *names: str) -> None:
        for name in set(names).difference(self.columns) if self.rows else ():
            raise UserError(
                f"table {self.name!r} has no column {name!r}; it has {', '.join(map(repr, self.columns))}"
            )

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Tables:
    """The tables of a diagnosis by name, empty for a study that did not run, and the learning rate."""

    by_name: Mapping[str, Table]
    lr: float | None = None

    @property
    def warmup_steps(self) -> int:
        """The steps of the warm-up that is declared or that a schedule gives; 0 without one."""
        return max((int(as_float(n) or 0) for n in self.table("plan").column("warmup_steps")), default=0)

    @property
    def first_share(self) -> float:
        """The share of the learning rate at which the warm-up begins: one over its number of steps, unless a
        schedule says otherwise; 1 without a warm-up.
        """
        known = [as_float(row.get("first_share")) for row in self.table("plan")]
        return next((share for share in known if share is not None), 1 / max(self.warmup_steps, 1))

    def table(self, name: str) -> Table:
        return self.by_name.get(name, Table("", ()))

    def stacks(self, name: str) -> Iterator[tuple[str, Table]]:
        """Yield the rows of each stack under its label, in the order of the stream."""
        table = self.table(name)
        for stack in dict.fromkeys(table.column("stack")):
            rows = sorted(table.where(stack=stack), key=lambda row: as_float(row.get("index")) or 0.0)
            yield self.label(stack), Table(name, tuple(rows))

    def label(self, stack: Value) -> str:
        """Name a stack by its container's path, with the last name only if stacks need it."""
        stacks = dict.fromkeys(self.table("structure").column("stack"))
        outer = [str(name).rpartition(".")[0] for name in stacks]
        short = str(stack).rpartition(".")[0]
        speaks = not short.rpartition(".")[2].isdigit()  # nn.Sequential's numbers alone say nothing
        return short if short and speaks and outer.count(short) <= 1 else str(stack) or "the model"

    def module(self, row: Row) -> str:
        """Return the path of the module that is the branch of a sublayer, given any row about it."""
        for known in self.table("structure").where(stack=row["stack"], index=row["index"]):
            return str(known.get("module") or known["stack"])
        return str(row["stack"])


def as_float(value: Value) -> float | None:
    """Return a finite number as a float, and None for anything else."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def floats(rows: Iterable[Row], column: str) -> list[float]:
    """Return the finite numbers of a column."""
    return [x for row in rows if (x := as_float(row[column])) is not None]


def extremes(rows: Iterable[Row], column: str) -> tuple[Row, Row] | None:
    """Return the rows with the smallest and the largest positive value, or None if there is no such row."""
    ordered = sorted((r for r in rows if (as_float(r[column]) or 0.0) > 0), key=lambda r: r[column])
    return (ordered[0], ordered[-1]) if ordered else None


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


XIONG: Final = "Xiong et al. 2020, {} (arXiv 2002.04745)"
LIU: Final = "Liu et al. 2020, {} (arXiv 2004.08249)"
SEVERITIES: Final = ("note", "warning", "problem")
"""From a mere observation to something that stops a training."""


@dataclass(frozen=True)
class Finding:
    """One conclusion in a sentence. ``name`` is the same in all diagnoses, so programs can look for it.

    ``numbers`` are the evidence: values of ``table`` under the names of their columns, or counts of its rows.

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
    charts: tuple[StudyChart, ...] = ()
    batch: str = "the whole batch"
    """The part of the batch that it is measured on, in words."""
    order: int = 100
    """Its place among the studies: small numbers run first, and come first on the page."""

    def __post_init__(self) -> None:
        require_preset(self.preset)

    def to_plain(self) -> dict[str, Any]:
        words = {"name": self.name, "title": self.title, "intro": self.intro, "batch": self.batch}
        return words | {"charts": [chart.to_plain() for chart in self.charts]}


_STUDIES: Final[dict[str, Study]] = {}


def register(study: Study) -> Study:
    """Add a study to every diagnosis whose preset includes it. Raises UserError if its name is taken."""
    if _STUDIES.setdefault(study.name, study) is not study:
        raise UserError(f"the study name {study.name!r} is taken; give yours another")
    return study


def registered(preset: str = PRESETS[-1]) -> list[Study]:
    """Return the studies that a preset includes, in their order."""
    require_preset(preset)
    included = PRESETS[: PRESETS.index(preset) + 1]
    return sorted((s for s in _STUDIES.values() if s.preset in included), key=lambda s: (s.order, s.name))


def studies_named(names: Iterable[str]) -> list[Study]:
    """Return the studies of these names, in their order. Raises UserError for an unknown name."""
    wanted = list(names)
    for name in wanted:
        if name not in _STUDIES:
            raise UserError(f"there is no study {name!r}{nearest(name, _STUDIES)}")
    return [study for study in registered() if study.name in wanted]


def find(tables: Mapping[str, Table], lr: float | None = None) -> tuple[Finding, ...]:
    """Apply the rules of all studies to these tables; the most severe findings come first."""
    known = Tables(tables, lr)
    return by_severity(finding for study in registered() for rule in study.rules for finding in rule(known))


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings, the most severe ones first."""
    return tuple(sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity)))


def format_number(value: Value) -> str:
    """Write a number with three significant digits, or all digits before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return str(value)


def format_share(share: float) -> str:
    """Write a share as a percentage, with two significant digits below one per cent."""
    return f"{share:.0%}" if not 0 < abs(share) < 0.01 else f"{100 * share:.2g}%"


def format_cosine(value: float) -> str:
    """Write a cosine with two decimals, and zero without a sign."""
    return f"{round(value, 2) + 0.0:.2f}"


def at_peak(first: str, warmup_steps: int, first_share: float) -> str:
    """Say that a change is at the peak of the rate, and how large the first one of a warm-up is."""
    begun = f" at the peak of the learning rate, and by {first} {start_of_warmup(warmup_steps, first_share)}"
    return begun if warmup_steps else ""


def start_of_warmup(warmup_steps: int, first_share: float) -> str:
    """Say at what share of the learning rate the first step of a warm-up is."""
    in_proportion = math.isclose(first_share * warmup_steps, 1, rel_tol=1e-6)
    share = f"1/{warmup_steps}" if in_proportion else format_share(first_share)
    return f"at {share} of the learning rate, where the warm-up of {warmup_steps:,} steps begins"

"""Findings: sentences of a diagnosis, each with the numbers that support it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from normlab.diagnosis.table import Row, Table, Value
from normlab.errors import UserError

XIONG: Final = "Xiong et al. 2020, {} (arXiv 2002.04745)"
LIU: Final = "Liu et al. 2020, {} (arXiv 2004.08249)"

SEVERITIES: Final = ("note", "warning", "problem")
"""From a mere observation to something that stops a training."""


@dataclass(frozen=True)
class Finding:
    """One conclusion in a sentence. ``name`` is the same in all diagnoses, so that programs can look for it.

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
    module: str = ""
    """The path of the module where it is; empty for a finding about the whole model."""
    do: str = ""
    """What to change, or to look at."""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise UserError(
                f"the severity of a finding is {', '.join(SEVERITIES)}, got {self.severity!r}; choose one"
            )

    @property
    def evidence(self) -> str:
        """The table and the numbers on one line."""
        numbers = ", ".join(f"{name} = {said(value)}" for name, value in self.numbers.items())
        return ": ".join(filter(None, (self.table, numbers)))

    def __str__(self) -> str:
        """The severity, the sentence, its evidence and its reference."""
        support = "; ".join(filter(None, (self.evidence, self.reference)))
        return f"{self.severity}: {self.sentence}" + (f" [{support}]" if support else "")


@dataclass(frozen=True)
class Tables:
    """The tables of a diagnosis by name, empty for a study that did not run, and the learning rate."""

    by_name: Mapping[str, Table]
    lr: float | None = None

    @property
    def warmup_steps(self) -> int:
        """The steps of the declared warm-up, whose first one is taken at the learning rate over their number;
        0 without one.
        """
        return max((int(number(n) or 0) for n in self.table("plan").column("warmup_steps")), default=0)

    def table(self, name: str) -> Table:
        return self.by_name.get(name, Table("", ()))

    def stacks(self, name: str) -> Iterator[tuple[str, Table]]:
        """Yield the rows of each stack under its label, in the order of the stream."""
        table = self.table(name)
        for stack in dict.fromkeys(table.column("stack")):
            rows = sorted(table.where(stack=stack), key=lambda row: number(row.get("index")) or 0.0)
            yield self.label(stack), Table(name, tuple(rows))

    def label(self, stack: Value) -> str:
        """Name a stack by its container's path, with the last name only where stacks need it."""
        stacks = dict.fromkeys(self.table("structure").column("stack"))
        outer = [str(name).rpartition(".")[0] for name in stacks]
        short = str(stack).rpartition(".")[0]
        told = not short.rpartition(".")[2].isdigit()  # nn.Sequential's numbers say nothing alone
        return short if short and told and outer.count(short) <= 1 else str(stack) or "the model"

    def module(self, row: Row) -> str:
        """Return the path of the module that is the branch of a sublayer, given any row about it."""
        for known in self.table("structure").where(stack=row["stack"], index=row["index"]):
            return str(known.get("module") or known["stack"])
        return str(row["stack"])


def told(finding: Finding) -> str:
    """Return a finding in a line: where it is, what it is, and what to do."""
    where = f"{finding.module}: " if finding.module and finding.module not in finding.sentence else ""
    return f"{where}{finding.sentence}" + (f"; {finding.do}" if finding.do else "")


def at_least(findings: Iterable[Finding], severity: str) -> list[Finding]:
    """Return the findings of this severity or above."""
    return [f for f in findings if SEVERITIES.index(f.severity) >= SEVERITIES.index(severity)]


def number(value: Value) -> float | None:
    """Return a finite number as a float, and None for anything else."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def numbers(rows: Iterable[Row], column: str) -> list[float]:
    """Return the finite numbers of a column."""
    return [x for row in rows if (x := number(row[column])) is not None]


def extremes(rows: Iterable[Row], column: str) -> tuple[Row, Row] | None:
    """Return the rows with the smallest and the largest positive value, or None if there is no such row."""
    ordered = sorted((r for r in rows if (number(r[column]) or 0.0) > 0), key=lambda r: float(r[column] or 0))
    return (ordered[0], ordered[-1]) if ordered else None


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def said(value: Value) -> str:
    """Write a number with three significant digits, or all digits before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return str(value)


def percent(share: float) -> str:
    """Write a share as a percentage, with two significant digits below one per cent."""
    return f"{share:.0%}" if not 0 < abs(share) < 0.01 else f"{100 * share:.2g}%"


def cosine(value: float) -> str:
    """Write a cosine with two decimals, and zero without a sign."""
    return f"{round(value, 2) + 0.0:.2f}"


def warmed(warmup_steps: int) -> str:
    """Say where the first step of a warm-up is: at what share of the learning rate."""
    return f"at 1/{warmup_steps} of the learning rate, where the warm-up of {warmup_steps:,} steps begins"


Rule = Callable[[Tables], Iterator[Finding]]
"""Draws findings from tables, and nothing from tables that are empty."""

"""One sentence of a diagnosis, with the numbers that it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from normlab.diagnosis.table import Row, Table, Value

XIONG: Final = "Xiong et al. 2020, {} (arXiv 2002.04745)"
LIU: Final = "Liu et al. 2020, {} (arXiv 2004.08249)"

SEVERITIES: Final = ("note", "warning", "problem")
"""From what is merely so to what stops a training."""


@dataclass(frozen=True)
class Finding:
    """What was measured and what it means. ``name`` is the same in every diagnosis, for programs to look for.

    ``numbers`` are the evidence: values of ``table`` under their columns' names, or counted from it.
    """

    name: str
    severity: str
    sentence: str
    table: str
    numbers: Mapping[str, Value]
    reference: str = ""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"a finding is one of {', '.join(SEVERITIES)}, not {self.severity!r}")

    @property
    def evidence(self) -> str:
        """Table and numbers on one line."""
        numbers = ", ".join(f"{name} = {said(value)}" for name, value in self.numbers.items())
        return ": ".join(filter(None, (self.table, numbers)))

    def __str__(self) -> str:
        """Severity, sentence, evidence and reference."""
        support = "; ".join(filter(None, (self.evidence, self.reference)))
        return f"{self.severity}: {self.sentence}" + (f" [{support}]" if support else "")


@dataclass(frozen=True)
class Records:
    """The tables of a diagnosis, an empty one for a study that was not done; and the learning rate."""

    tables: Mapping[str, Table]
    lr: float | None = None
    _empty: Table = field(default=Table("", ()), init=False, repr=False)

    def table(self, name: str) -> Table:
        return self.tables.get(name, self._empty)

    def stacks(self, name: str) -> Iterator[tuple[str, Table]]:
        """The table's rows of each stack, in the order of the stream."""
        table = self.table(name)
        for stack in dict.fromkeys(table.column("stack")):
            rows = sorted(table.where(stack=stack), key=lambda row: number(row.get("index")) or 0.0)
            yield self.label(stack), Table(name, tuple(rows))

    def label(self, stack: Value) -> str:
        """A stack in words: its container's path without the last name, where that is a name and tells it
        from others.
        """
        outer = [
            str(name).rpartition(".")[0] for name in dict.fromkeys(self.table("structure").column("stack"))
        ]
        short = str(stack).rpartition(".")[0]
        told = not short.rpartition(".")[2].isdigit()  # nn.Sequential's numbers say nothing alone
        return short if short and told and outer.count(short) <= 1 else str(stack) or "the model"


def at_least(findings: Iterable[Finding], severity: str) -> list[Finding]:
    """Those that are as severe, or more."""
    return [f for f in findings if SEVERITIES.index(f.severity) >= SEVERITIES.index(severity)]


def number(value: Value) -> float | None:
    """A value that can be reckoned with, else None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def numbers(rows: Iterable[Row], column: str) -> list[float]:
    """The finite numbers of a column."""
    return [x for row in rows if (x := number(row[column])) is not None]


def extremes(rows: Iterable[Row], column: str) -> tuple[Row, Row] | None:
    """The rows with the smallest and the largest positive value, None where there is none."""
    ordered = sorted((r for r in rows if (number(r[column]) or 0.0) > 0), key=lambda r: float(r[column] or 0))
    return (ordered[0], ordered[-1]) if ordered else None


def mean(values: Sequence[float]) -> float:
    """The arithmetic one."""
    return sum(values) / len(values)


def place(row: Row) -> str:
    """A sublayer in words, layers counted from 1: ``layer 3, ffn``."""
    return f"layer {int(row['layer'] or 0) + 1}, {str(row['role']).replace('_', '-')}"


def said(value: Value) -> str:
    """A number at three digits, or all those before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return str(value)


def percent(share: float) -> str:
    """A share in words; one below a hundredth at two digits."""
    return f"{share:.0%}" if not 0 < abs(share) < 0.01 else f"{100 * share:.2g}%"


def cosine(value: float) -> str:
    """At two digits behind the point, and never a zero with a sign."""
    return f"{round(value, 2) + 0.0:.2f}"

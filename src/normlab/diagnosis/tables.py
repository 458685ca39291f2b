"""Tables of numbers and words: what studies return, and what findings are read off."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from normlab.errors import UserError

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
        rows = (row for row in self.rows if all(row[name] == value for name, value in equal.items()))
        return Table(self.name, tuple(rows))

    def _require(self, *names: str) -> None:
        """Raise UserError for a column that does not exist; an empty table has any."""
        for name in names:
            if self.rows and name not in self.columns:
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
        return max((int(steps) for steps in floats(self.table("plan"), "warmup_steps")), default=0)

    @property
    def first_share(self) -> float:
        """The share of the learning rate at which the warm-up begins: one over its number of steps, unless a
        schedule says otherwise; 1 without a warm-up.
        """
        for row in self.table("plan"):
            share = as_float(row.get("first_share"))
            if share is not None:
                return share
        return 1 / max(self.warmup_steps, 1)

    def table(self, name: str) -> Table:
        return self.by_name.get(name, Table("", ()))

    def stacks(self, name: str) -> Iterator[tuple[str, Table]]:
        """Yield the rows of each stack under its label, in the order of the stream."""
        table = self.table(name)
        for stack in dict.fromkeys(table.column("stack")):
            rows = sorted(table.where(stack=stack), key=lambda row: as_float(row.get("index")) or 0.0)
            yield self.label(stack), Table(name, tuple(rows))

    def label(self, stack: Value) -> str:
        """Name a stack by its container's path; its last name is kept only if that does not identify it."""
        stacks = dict.fromkeys(self.table("structure").column("stack"))
        containers = [str(name).rpartition(".")[0] for name in stacks]
        container = str(stack).rpartition(".")[0]
        says_nothing = container.rpartition(".")[2].isdigit()  # as a number of nn.Sequential's
        if container and not says_nothing and containers.count(container) <= 1:
            return container
        return str(stack) or "the model"

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
    numbers = [as_float(row[column]) for row in rows]
    return [number for number in numbers if number is not None]


def extremes(rows: Iterable[Row], column: str) -> tuple[Row, Row] | None:
    """Return the rows with the smallest and the largest positive value, or None if there is no such row."""
    positive = [row for row in rows if (as_float(row[column]) or 0.0) > 0]
    if not positive:
        return None
    ordered = sorted(positive, key=lambda row: row[column])  # of equals, the first is the smallest
    return ordered[0], ordered[-1]


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)

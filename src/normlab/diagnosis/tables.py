"""Tables, the results of studies, and what rules read off them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from normlab.errors import UserError

Value: TypeAlias = float | int | str | None
Row: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words under one name; every row has the same columns.

    Raises UserError for a row that has others than the first.
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
        """Return the values of a column, one per row. Raises UserError for a column that there is not."""
        self._require(name)
        return [row[name] for row in self.rows]

    def where(self, **equal: Value) -> Table:
        """Return a table of the rows that have these values. Raises as ``column``."""
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
        """The steps of the declared warm-up, whose first one is taken at the learning rate over their number;
        0 without one.
        """
        return max((int(as_float(n) or 0) for n in self.table("plan").column("warmup_steps")), default=0)

    def table(self, name: str) -> Table:
        return self.by_name.get(name, Table("", ()))

    def stacks(self, name: str) -> Iterator[tuple[str, Table]]:
        """Yield the rows of each stack under its label, in the order of the stream."""
        table = self.table(name)
        for stack in dict.fromkeys(table.column("stack")):
            rows = sorted(table.where(stack=stack), key=lambda row: as_float(row.get("index")) or 0.0)
            yield self.label(stack), Table(name, tuple(rows))

    def label(self, stack: Value) -> str:
        """Name a stack by its container's path, with the last name only where stacks need it."""
        stacks = dict.fromkeys(self.table("structure").column("stack"))
        outer = [str(name).rpartition(".")[0] for name in stacks]
        short = str(stack).rpartition(".")[0]
        speaks = not short.rpartition(".")[2].isdigit()  # nn.Sequential's numbers say nothing alone
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
    ordered = sorted(
        (r for r in rows if (as_float(r[column]) or 0.0) > 0), key=lambda r: float(r[column] or 0)
    )
    return (ordered[0], ordered[-1]) if ordered else None


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)

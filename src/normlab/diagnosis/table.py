"""Tables, the results of studies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

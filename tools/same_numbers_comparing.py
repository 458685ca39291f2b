"""Compares the tables and tensors of two results bit by bit, under a map from old names to new ones."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from safetensors import deserialize

from same_numbers_driver import TABLES

Row = Mapping[str, Any]
ABSENT: Final = "nothing"
"""Stands for a value that one of the two results does not have."""
FINDINGS: Final = "findings"
"""The table with what a diagnosis concludes from the others."""
FLOATS: Final = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


class Names:
    """The newest names of tables, columns, text in cells and tensors.

    ``tables``, ``columns`` and ``words`` map a new name to older ones. A column is given for one table, as
    ``table.column``, or for all; a name with dots is renamed part by part. ``tensors`` maps a regular
    expression over old names of tensors to what replaces the match, in cells that hold paths as well.
    """

    def __init__(self, renames: Mapping[str, Any]) -> None:
        self._tables, self._columns, self._words = (
            {old: new for new, olds in renames[kind].items() for old in olds}
            for kind in ("tables", "columns", "words")
        )
        self._tensors = [(re.compile(old), new) for old, new in renames["tensors"].items()]
        self._left_out = frozenset(renames["left_out"])

    def tensor(self, name: str) -> str:
        """The newest name of a tensor."""
        for old, new in self._tensors:
            name = old.sub(new, name)
        return name

    def tables(self, tables: Mapping[str, Sequence[Row]]) -> dict[str, list[dict[str, Any]]]:
        """The tables under newest names, without the columns that are left out."""
        renamed: dict[str, list[dict[str, Any]]] = {}
        for name, rows in tables.items():
            table = self._tables.get(name, name)
            renamed[table] = [self._row(table, row) for row in rows]
        return renamed

    def _row(self, table: str, row: Row) -> dict[str, Any]:
        named = {self._column(table, name): self._cell(value) for name, value in row.items()}
        return {name: value for name, value in named.items() if name not in self._left_out}

    def _column(self, table: str, name: str) -> str:
        for_table = self._columns.get(f"{table}.{name}")
        if for_table is not None:
            return for_table.removeprefix(f"{table}.")
        return ".".join(self._columns.get(part, part) for part in name.split("."))

    def _cell(self, value: Any) -> Any:
        return self.tensor(self._words.get(value, value)) if isinstance(value, str) else value


class Tensor(NamedTuple):
    """A stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def apart(self, other: Tensor) -> float:
        """The largest absolute difference; not a number where there is none to state."""
        if self[:2] != other[:2] or self.dtype not in FLOATS:
            return math.nan
        ours, theirs = (np.frombuffer(t.data, FLOATS[t.dtype]).astype(np.float64) for t in (self, other))
        with np.errstate(invalid="ignore"):  # two infinities have no difference
            return float(np.abs(ours - theirs).max(initial=0.0))


@dataclass(frozen=True)
class Result:
    """What one configuration gave."""

    tables: Mapping[str, Sequence[Row]]
    tensors: Mapping[str, Tensor]

    @property
    def cells(self) -> int:
        return sum(len(row) for rows in self.tables.values() for row in rows)


def load(folder: Path, names: Names) -> Result:
    """A result that the driver wrote, under newest names."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, stored in deserialize(file.read_bytes()):
            tensor = Tensor(stored["dtype"], tuple(stored["shape"]), bytes(stored["data"]))
            tensors[names.tensor(f"{file.stem}.{name}")] = tensor
    tables = json.loads((folder / TABLES).read_text(encoding="utf-8"))
    return Result(names.tables(tables), tensors)


def shared(base: Result, head: Result) -> tuple[Result, Result, str]:
    """Two diagnoses without the tables that only one has, and which these are, in words.

    Studies come and go, and what one measures stays the same without the others. Findings are taken apart
    by their table and name, so that those of a study that is gone are no difference.
    """
    tables = {"BASE": _by_finding(base.tables), "HEAD": _by_finding(head.tables)}
    both = tables["BASE"].keys() & tables["HEAD"].keys()
    parts = []
    for side, of_side in tables.items():
        alone = sorted(of_side.keys() - both)
        if alone:
            parts.append(f"only {side} has {', '.join(alone)}")
    in_both = {
        side: {name: rows for name, rows in of_side.items() if name in both}
        for side, of_side in tables.items()
    }
    return Result(in_both["BASE"], base.tensors), Result(in_both["HEAD"], head.tensors), "; ".join(parts)


def _by_finding(tables: Mapping[str, Sequence[Row]]) -> dict[str, Sequence[Row]]:
    parted: dict[str, Sequence[Row]] = {name: rows for name, rows in tables.items() if name != FINDINGS}
    for row in tables.get(FINDINGS, ()):
        name = f"{FINDINGS}.{row['name']}.{row['table']}".rstrip(".")
        parted[name] = [*parted.get(name, ()), row]
    return parted


def difference(base: Result, head: Result, added: Collection[str] = ()) -> str:
    """The first difference, and how many there are; empty where every bit is the same.

    The columns of ``added`` may be missing from the base.
    """
    cells = []
    for place, before, after in _cells(base.tables, head.tables):
        is_new = before == ABSENT and place.rpartition(", ")[2] in added
        if not is_new:
            cells.append((place, before, after))
    names = sorted(base.tensors.keys() | head.tensors.keys())
    tensors = [name for name in names if base.tensors.get(name) != head.tensors.get(name)]
    parts = []
    if cells:
        where, before, after = cells[0]
        tables = ", ".join(dict.fromkeys(place.split(", ")[0].split(" row ")[0] for place, *_ in cells))
        parts.append(f"{where}: {before!r} became {after!r} (first of {len(cells)} cells in {tables})")
    if tensors:
        parts.append(f"{len(tensors)} of {len(names)} tensors differ, {_first(tensors[0], base, head)}")
    return "; ".join(parts)


def _first(name: str, base: Result, head: Result) -> str:
    before, after = base.tensors.get(name), head.tensors.get(name)
    if before is None or after is None:
        return f"first {name}, which only {'HEAD' if before is None else 'BASE'} has"
    if before[:2] != after[:2]:
        return f"first {name}, {before.dtype} {list(before.shape)} became {after.dtype} {list(after.shape)}"
    return f"first {name}, by up to {before.apart(after):.3g}"


def _cells(
    base: Mapping[str, Sequence[Row]], head: Mapping[str, Sequence[Row]]
) -> Iterator[tuple[str, Any, Any]]:
    """Place and both values of every cell that differs, in the order of the tables."""
    for table in dict.fromkeys((*base, *head)):
        before, after = base.get(table, ()), head.get(table, ())
        if len(before) != len(after):
            yield f"{table}, number of rows", len(before), len(after)
        for number, (old, new) in enumerate(zip(before, after, strict=False), start=1):
            step = f", step {old['step']}" if "step" in old else ""
            for column in dict.fromkeys((*old, *new)):
                values = old.get(column, ABSENT), new.get(column, ABSENT)
                if not same(*values):
                    yield f"{table} row {number}{step}, {column}", *values


def same(one: Any, other: Any) -> bool:
    """Whether two cells are equal to the last bit; a whole number equals the same number as a float."""
    if isinstance(one, (bool, str, type(None))) or isinstance(other, (bool, str, type(None))):
        return type(one) is type(other) and one == other
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return struct.pack("d", one) == struct.pack("d", other)

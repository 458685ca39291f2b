"""The values in print, from data files beside the papers' modules; a table as named cells."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


class PrintedTable(dict[str, float | str]):
    """The cells of a table in print, each under ``<column> <row>``, and what is published besides.

    A cell ``""`` was left empty in print and is left out. Raises ValueError for a row with another number of
    cells than there are columns.
    """

    def __init__(
        self, columns: Sequence[str], rows: Mapping[str, Sequence[float | str]], **besides: float | str
    ) -> None:
        self.columns, self.rows = tuple(columns), tuple(rows)
        self.names = {(column, row): f"{column} {row}" for row in rows for column in columns}
        """The name of each cell by column and row."""
        for row, values in rows.items():
            if len(values) != len(columns):
                raise ValueError(
                    f"row {row!r} has {len(values)} cells for {len(columns)} columns; "
                    "write '' for an empty one"
                )
            self |= {self.names[c, row]: v for c, v in zip(columns, values, strict=True) if v != ""}
        self |= besides


def printed(id_: str) -> Mapping[str, float | str]:
    """What is published for an artefact of normlab's own, in ``<paper's key>.toml`` under its name."""
    key, _, name = id_.partition(".")
    values = _values(key)[name]
    if "columns" not in values:
        return values
    return PrintedTable(values["columns"], values["rows"], **values.get("besides", {}))


@cache
def _values(key: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{key}.toml").read_text(encoding="utf-8"))

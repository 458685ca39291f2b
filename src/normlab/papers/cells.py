"""A printed table as named cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def cells(columns: Sequence[str], rows: Mapping[str, Sequence[float | str]]) -> dict[str, float | str]:
    """Each cell under ``<column> <row>``; a cell ``""`` was left empty in print and is left out.

    Raises ValueError for a row with another number of cells than there are columns.
    """
    named: dict[str, float | str] = {}
    for row, values in rows.items():
        if len(values) != len(columns):
            raise ValueError(
                f"row {row!r} has {len(values)} cells for {len(columns)} columns; write '' for an empty one"
            )
        named |= {f"{column} {row}": v for column, v in zip(columns, values, strict=True) if v != ""}
    return named

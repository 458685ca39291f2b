"""The rule that holds for every table: all measured numbers should be finite."""

from __future__ import annotations

from collections.abc import Iterator

from normlab.diagnosis.rules.finding import Finding, Tables, number


def not_finite(tables: Tables) -> Iterator[Finding]:
    """Report every table with values that are infinite or not a number."""
    for name, table in tables.by_name.items():
        cells = ((row, column, value) for row in table for column, value in row.items())
        bad = [(r, c) for r, c, value in cells if isinstance(value, float) and number(value) is None]
        if bad:
            row, column = bad[0]
            where = ", ".join(str(v) for v in row.values() if isinstance(v, (str, int)))
            yield Finding(
                "not_finite",
                "problem",
                f"{len(bad)} values of {name} are infinite or not a number, the first being {column} at "
                f"{where}",
                name,
                {"values": len(bad), column: row[column]},
            )

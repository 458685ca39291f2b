"""Tables of results in documents, each between ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""

from __future__ import annotations

from collections.abc import Mapping


def with_tables(document: str, tables: Mapping[str, str]) -> str:
    """Return the document with these tables in their places. Raises ValueError if it has no place for one."""
    for name, table in tables.items():
        before, start, rest = document.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        if not start or not end:
            raise ValueError(
                f"the document has no place for {name}: <!-- {name} --> and <!-- end of {name} -->"
            )
        document = f"{before}{start}\n{table}\n\n{end}{after}"
    return document

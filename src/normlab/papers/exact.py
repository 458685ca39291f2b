"""Exact statements of the papers: lemmas, bounds, counts and identities, each a check of what normlab builds.

They are data, the entries ``[[exact]]`` of ``findings/<paper>.toml``. A statement names a measure of an
artefact's study and the bounds that rounding, or the sampling of an identity, leaves it. One that does not
hold means that the implementation is wrong, not the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.base.files import read_toml
from normlab.base.io import from_plain
from normlab.errors import UserError
from normlab.papers.estimate import Estimate
from normlab.papers.finding import BOUNDS, FILES, Expectation, tables_of


@dataclass(frozen=True)
class Statement:
    """A sentence that a correct implementation cannot contradict."""

    says: str
    where: str
    artefact: str
    """The id of the artefact whose study measures it."""
    measures: tuple[str, ...]
    """The names of its measures, each of which has to lie within the bounds."""
    expects: Expectation
    paper: str = ""

    def __post_init__(self) -> None:
        if not self.measures:
            raise UserError(
                "measures is empty, and nothing would be compared; name a measure of the artefact"
            )

    def holds(self, measured: Mapping[str, Estimate]) -> bool:
        """Whether every measure is there and its whole interval lies within the bounds."""
        return all(
            name in measured and self.expects.reading(measured[name]) == "agrees" for name in self.measures
        )


def read_statements(file: Path) -> tuple[Statement, ...]:
    """Read the exact statements of a paper's file. Raises UserError for an entry that it cannot have."""
    entries = tables_of(read_toml(file), "exact", str(file))
    return tuple(_statement(entry, file.stem) for entry in entries)


def _statement(entry: Mapping[str, Any], paper: str) -> Statement:
    bounds = {key: value for key, value in entry.items() if key in BOUNDS}
    words = {key: value for key, value in entry.items() if key not in BOUNDS}
    name = str(entry.get("says", "a statement"))
    statement: Statement = from_plain(Statement, {**words, "expects": bounds, "paper": paper}, name)
    return statement


def known_statements() -> list[Statement]:
    """Return all known exact statements, paper by paper."""
    return [statement for file in FILES for statement in read_statements(file)]

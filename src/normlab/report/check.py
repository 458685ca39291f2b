"""The page of a check: what fails and what to do, what holds, and what could not be tested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from normlab.config.io import validated
from normlab.config.units import count, duration
from normlab.errors import UserError
from normlab.report.page import Block, Cell, Code, Details, Page, Section, Table, Text, write_page

PARTS: Final = ("model", "failures", "notes", "holds", "untestable", "statements", "seconds", "facts")
"""Parts without which a report cannot be drawn."""


@validated
def write_check_page(report: Mapping[str, Any], path: Path) -> Path:
    """Write the page of ``Report.to_dict()``, to which ``title`` and ``command`` may be added.

    Raises UserError if a part of the report is missing.
    """
    return write_page(path, check_page(report))


def check_page(report: Mapping[str, Any]) -> str:
    """Draw the report that ``write_check_page`` receives as one self-contained HTML page."""
    if missing := [part for part in PARTS if part not in report]:
        raise UserError(f"the report has no {', '.join(missing)}; give that of Report.to_dict()")
    failures, holds = report["failures"], report["holds"]
    first = failures[0] if failures else None
    headline = f"{first['property']} fails at {first['module'] or 'the model'}" if first else "Nothing fails"
    kept = "property holds" if len(holds) == 1 else "properties hold"
    lead = f"{len(holds)} {kept}, {len(report['untestable'])} could not be tested."
    return Page(
        title=str(report.get("title") or f"Check of {report['model']}"),
        headline=headline,
        facts=[f"{name} {value}" for name, value in report["facts"].items()],
        lead=f"{first['evidence']}. {lead}" if first else lead,
        blocks=list(_sections(report)),
    ).html()


def _sections(report: Mapping[str, Any]) -> Iterator[Section]:
    if report["failures"]:
        yield Section(
            "What fails", [b for one in report["failures"] for b in _failure(one, report)], "failures"
        )
    if report["notes"]:
        rows = [
            [Cell(n["property"]), Cell(n["module"] or "the model"), Cell(n["evidence"])]
            for n in report["notes"]
        ]
        caption = "Unusual, and perhaps meant: nothing here fails a check."
        yield Section("Notes", [Table(("property", "place", "seen"), rows, caption, 3)], "notes")
    if report["untestable"]:
        rows = [
            [Cell(n, report["statements"].get(n, "")), Cell(why)] for n, why in report["untestable"].items()
        ]
        table = Table(("property", "why"), rows, text_columns=2)
        yield Section("What could not be tested", [table], "untestable")
    rows = [
        [Cell(n), Cell(report["statements"].get(n, "")), Cell(duration(report["seconds"].get(n, 0.0)))]
        for n in report["holds"]
    ]
    holds: list[Block] = [Table(("property", "what it states", "time"), rows, text_columns=2)]
    yield Section("What holds", holds if rows else [Text("Nothing that could be tested.")], "holds")
    if report.get("command"):
        yield Section("How it was made", [Code(str(report["command"]))], "how")


def _failure(one: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[Block]:
    where = one["module"] or "the model"
    yield Text(f"{one['property']} fails at {where}: {one['evidence']}.", "alarm")
    if statement := report["statements"].get(one["property"]):
        yield Text(statement, "note")
    if one["advice"]:
        yield Text(f"What to do: {one['advice']}.")
    if one["follows"]:
        rows = [
            [Cell(v["property"]), Cell(v["module"] or "the model"), Cell(v["evidence"])]
            for v in one["follows"]
        ]
        table = Table(("property", "place", "seen"), rows, text_columns=3)
        yield Details(f"What it explains: {count(len(rows), 'further failure')}", [table])

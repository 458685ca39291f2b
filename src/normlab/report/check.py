"""The page of a check: what fails and what to do, what holds, and what could not be tested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from normlab.config.io import validated
from normlab.config.units import count, duration
from normlab.report.page import (
    Block,
    Cell,
    Code,
    Details,
    Page,
    PageTable,
    Section,
    Text,
    breakable,
    capital,
    require_parts,
    write_page,
)

PARTS: Final = "model failures notes holds untestable statements seconds facts"


@validated
def write_check_page(report: Mapping[str, Any], path: Path) -> Path:
    """Write the page of ``Report.to_dict()``, to which ``title`` and ``command`` may be added.

    Raises UserError if a part of the report is missing.
    """
    return write_page(path, check_page(report))


def check_page(report: Mapping[str, Any]) -> str:
    """Draw the report that ``write_check_page`` receives as one self-contained HTML page."""
    require_parts(report, PARTS, "Report.to_dict()")
    failures, holds = report["failures"], report["holds"]
    first = failures[0] if failures else None
    kept = "property holds" if len(holds) == 1 else "properties hold"
    lead = f"{len(holds)} {kept}, {len(report['untestable'])} could not be tested."
    return Page(
        title=str(report.get("title") or f"Check of {report['model']}"),
        headline=f"{_property(first)} fails at {_place(first)}" if first else "Nothing fails",
        facts=[f"{name} {value}" for name, value in report["facts"].items()],
        lead=f"{capital(first['evidence'])}. {lead}" if first else lead,
        blocks=list(_sections(report)),
    ).html()


def _sections(report: Mapping[str, Any]) -> Iterator[Section]:
    states = report["statements"]
    if report["failures"]:
        failures = [block for one in report["failures"] for block in _failure(one, states)]
        yield Section("What fails", failures, "failures")
    if report["notes"]:
        caption = "Unusual, and perhaps meant: nothing here fails a check."
        yield Section("Notes", [_places(report["notes"], caption)], "notes")
    if report["untestable"]:
        rows = [[_name(n, states.get(n, "")), Cell(why)] for n, why in report["untestable"].items()]
        table = PageTable(("property", "why"), rows, text_columns=2)
        yield Section("What could not be tested", [table], "untestable")
    rows = [
        [_name(n), Cell(states.get(n, "")), Cell(duration(report["seconds"].get(n, 0.0)))]
        for n in report["holds"]
    ]
    holds: list[Block] = [PageTable(("property", "what it states", "time"), rows, text_columns=2)]
    yield Section("What holds", holds if rows else [Text("Nothing that could be tested.")], "holds")
    if report.get("command"):
        yield Section("How it was made", [Code(str(report["command"]))], "how")


def _failure(one: Mapping[str, Any], states: Mapping[str, str]) -> Iterator[Block]:
    yield Text(f"{_property(one)} fails at {_place(one)}: {one['evidence']}.", "alarm")
    if statement := states.get(one["property"]):
        yield Text(f"What should hold: {statement}", "note")
    if one["advice"]:
        yield Text(f"What to do: {one['advice']}.")
    if follows := one["follows"]:
        yield Details(f"What it explains: {count(len(follows), 'further failure')}", [_places(follows)])


def _places(found: Sequence[Mapping[str, Any]], caption: str = "") -> PageTable:
    rows = [[_name(v["property"]), Cell(_place(v)), Cell(v["evidence"])] for v in found]
    return PageTable(("property", "place", "seen"), rows, caption, text_columns=3)


def _name(name: str, small: str = "") -> Cell:
    return Cell(breakable(name), small)


def _property(found: Mapping[str, Any]) -> str:
    return capital(found["property"].replace("_", " "))


def _place(found: Mapping[str, Any]) -> str:
    return found["module"] or "the model"

"""The page of a transfer: whether the best learning rate carries, and the losses by rate and size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from normlab.config.io import validated
from normlab.config.units import count, duration, short_rate
from normlab.report.page import Cell, Code, Notes, Page, PageTable, Section, Text, require_parts, write_page

PARTS: Final = "title axis sizes sentence lines plan decays cost steps facts"


@validated
def write_transfer_page(transfer: Mapping[str, Any], path: Path) -> Path:
    """Write the page of ``Transfer.to_dict()``, to which ``command`` may be added.

    Raises UserError if a part is missing.
    """
    require_parts(transfer, PARTS, "Transfer.to_dict()")
    cost, notes = transfer["cost"], [Text(line) for line in transfer["lines"][1:]]
    sections = [Section("", [Notes(notes)], "glance", listed=False)]
    for own in transfer["decays"]:
        label, losses = own["label"], _losses(own, transfer["axis"])
        sections.append(Section(f"With {label}", [losses], label.replace(" ", "_"), f"{own['sentence']}."))
    if transfer.get("command"):
        sections.append(Section("How it was made", [Code(str(transfer["command"]))], "how"))
    facts = [f"{name} {value}" for name, value in transfer["facts"].items()]
    page = Page(
        title=str(transfer["title"]),
        headline=transfer["sentence"],
        facts=[*facts, f"{count(cost['trials'], 'trial')} in {duration(cost['seconds'])}"],
        lead=f"Before it began: {transfer['plan']}.",
        blocks=sections,
        recipes=[],
    )
    return write_page(path, page.html())


def _losses(sweep: Mapping[str, Any], axis: str) -> PageTable:
    """Rates down, sizes across: the mean loss over seeds."""
    by_size = {one["size"]: {t["rate"]: t for t in one["rates"]} for one in sweep["sizes"]}
    rates = sorted({rate for trials in by_size.values() for rate in trials})
    rows = [
        [Cell(short_rate(rate)), *(_cell(trials.get(rate)) for trials in by_size.values())] for rate in rates
    ]
    return PageTable(["learning rate", *(f"{axis} {size}" for size in by_size)], rows)


def _cell(trial: Mapping[str, Any] | None) -> Cell:
    if trial is None:
        return Cell("–", "not tried", tone="faint")
    if trial["loss"] is None:
        return Cell("–", trial["stopped"], tone="alarm")
    return Cell(f"{trial['loss']:.3f}")

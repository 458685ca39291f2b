"""The page of a diagnosis, drawn without torch from ``diagnosis.json``: findings, charts, every table."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from normlab.base.files import write_text_atomic
from normlab.base.io import validated
from normlab.base.units import count, duration
from normlab.report.page import (
    Block,
    Cell,
    Code,
    Details,
    Html,
    Page,
    PageTable,
    Row,
    Section,
    Text,
    anchor,
    capital,
    charts_in,
    number_cell,
)
from normlab.report.studies import DiagnosisView, folded, pictured, pictures, rows_table

TOP: Final = "scales"
"""The study whose charts come first: the scale of the stream by layer."""


@validated
def write_diagnosis(diagnosis: Mapping[str, Any], folder: Path, name: str = "diagnosis") -> Path:
    """Write ``name.json`` and ``name.html`` into the folder, and return the path of the page.

    ``diagnosis`` is ``Diagnosis.to_plain()`` with ``title``, ``case`` (more facts) and ``command``; numbers
    that are not finite are "nan", "inf" and "-inf".
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(diagnosis, ensure_ascii=False, allow_nan=False)
    write_text_atomic(folder / f"{name}.json", f"{text}\n")
    page = folder / f"{name}.html"
    write_text_atomic(page, diagnosis_page(diagnosis).html())
    return page


def diagnosis_page(diagnosis: Mapping[str, Any]) -> Page:
    """The page for what ``write_diagnosis`` receives."""
    view = DiagnosisView(diagnosis)
    first, rest = _first([*pictures(view)])
    charts = [c.name for section in (*first, *rest) for c in charts_in(section.blocks)]
    return Page(
        title=f"Diagnosis of {diagnosis.get('title') or diagnosis['model']}",
        headline=_cause(diagnosis),
        facts=_facts(diagnosis),
        lead=_lead(diagnosis),
        blocks=[
            *first,
            Section("", _findings(diagnosis, charts), "findings", listed=False),
            *rest,
            *([_tables(diagnosis, pictured(view))] if diagnosis["tables"] else []),
            _how(diagnosis),
        ],
        recipes=view.roles,
        legend="Roles",
    )


def _first(sections: Sequence[Section]) -> tuple[list[Section], list[Section]]:
    """Separate the chart that comes first from the others; what explains it goes below it."""
    top = [section for section in sections if section.anchor == TOP]
    said = [replace(s, title="", intro="", blocks=[*s.blocks, Text(s.intro, "note")]) for s in top]
    return said, [section for section in sections if section not in top]


def _cause(diagnosis: Mapping[str, Any]) -> Markup:
    cause = diagnosis.get("cause")
    if not cause:
        return Markup("{}").format(capital(diagnosis.get("verdict", "nothing found")))
    head = capital(cause["sentence"].partition("; ")[0])
    return Markup('<span class="tag {0}">{0}</span>{1}').format(cause["severity"], head)


def _lead(diagnosis: Mapping[str, Any]) -> str:
    """State the rest of the cause: what to do about it."""
    rest = capital((diagnosis.get("cause") or {"sentence": ""})["sentence"].partition("; ")[2])
    return rest if not rest or rest.endswith("?") else f"{rest}."


def _facts(diagnosis: Mapping[str, Any]) -> list[str]:
    facts = [f"{name} {value}" for name, value in diagnosis["facts"].items() if name != "batch"]
    facts += [f"{name} {value}" for name, value in diagnosis.get("case", {}).items() if name != "recipe"]
    facts.append(f"preset {diagnosis['preset']}")
    if diagnosis["seconds"]:
        facts.append(f"{duration(sum(diagnosis['seconds'].values()))} of measuring")
        facts.append(f"{diagnosis['peak_memory_bytes'] / 2**30:.2f} GiB at most")
    return facts


def _findings(diagnosis: Mapping[str, Any], charts: Sequence[str]) -> list[Block]:
    """List the findings other than the cause, the most severe first; notes are shown on request."""
    cause = diagnosis.get("cause") or {}
    named = [f for f in diagnosis["findings"] if f.items() <= cause.items()]
    others = [f for f in diagnosis["findings"] if f not in named]
    grave, notes = ([f for f in others if (f["severity"] == "note") is note] for note in (False, True))
    blocks: list[Block] = [Html(_listed(grave, charts))] if grave else []
    if named:
        why = Html(Markup('<ul class="findings">{}</ul>').format(_evidence(named[0], charts)))
        blocks.append(Details("What the first line is based on", [why]))
    if notes:
        said = f"{count(len(notes), 'note')} on other measurements"
        blocks.append(Details(said, [Html(_listed(notes, charts))], open=not grave))
    return blocks


def _listed(findings: Sequence[Row], charts: Sequence[str]) -> Markup:
    item = Markup('<li class="{0}"><p><span class="tag {0}">{0}</span>{1}</p>{2}</li>')
    items = [item.format(f["severity"], capital(f["sentence"]), _evidence(f, charts)) for f in findings]
    return Markup('<ul class="findings">{}</ul>').format(Markup("").join(items))


def _evidence(finding: Row, charts: Sequence[str]) -> Markup:
    """What is shown of a finding on request: its numbers, its chart or its table, and its source."""
    table = finding["table"]
    numbers = ", ".join(f"{name} = {number_cell(value)}" for name, value in finding["numbers"].items())
    shown = next((name for name in charts if f"{name}-".startswith(f"{table}-")), "") if table else ""
    link = Markup('<a href="#{}">{}</a>')
    place = f"figure-{shown}" if shown else f"table-{anchor(table)}"
    parts = [link.format(place, table.replace("_", " "))] if table else []
    parts += [Markup("{}").format(numbers.replace("_", " "))] if numbers else []
    source = Markup("<details class=source><summary>source</summary>{}</details>")
    said = Markup('<div class="note">{}{}</div>')
    cited = source.format(finding["reference"]) if finding.get("reference") else ""
    return said.format(Markup(": ").join(parts), cited) if parts or cited else Markup("")


def _tables(diagnosis: Mapping[str, Any], left_out: Collection[str]) -> Section:
    tables = {name: rows for name, rows in diagnosis["tables"].items() if rows and name not in left_out}
    blocks = [rows_table(name, folded(rows)) for name, rows in tables.items()]
    return Section("Tables", blocks, "tables", "Every number behind the charts.")


def _how(diagnosis: Mapping[str, Any]) -> Section:
    batches = {study["name"]: study["batch"] for study in diagnosis.get("studies", ())}
    studies = [
        [Cell(name.replace("_", " ")), Cell(batches.get(name, "")), Cell(duration(seconds))]
        for name, seconds in diagnosis["seconds"].items()
    ]
    told = {**diagnosis["facts"], **diagnosis.get("case", {})}
    facts = [[Cell(name), Cell(str(value))] for name, value in told.items()]
    blocks: list[Block] = [
        Text(
            "Everything was measured without dropout; nothing was trained, and the model is unchanged. "
            "Statistics ignore padding."
        ),
        *([Code(diagnosis["command"])] if diagnosis.get("command") else []),
        Details("Structure of the model", [Code(diagnosis["structure"])]),
        Details("Facts", [PageTable(("", ""), facts, text_columns=2)]),
        Details("Studies", [PageTable(("study", "measured on", "time"), studies, text_columns=2)]),
    ]
    return Section("How it was measured", blocks, "how")

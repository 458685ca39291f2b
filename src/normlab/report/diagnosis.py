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
    Section,
    Text,
    anchor,
    capital,
    charts_in,
    number_cell,
)
from normlab.report.results.diagnosis import DiagnosisResult, FindingResult
from normlab.report.studies import drawn_tables, folded, rows_table, study_sections, tables_shown_whole

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
    result = DiagnosisResult.of(diagnosis)
    sections = list(study_sections(result))
    charts = [chart.name for section in sections for chart in charts_in(section.blocks)]
    return Page(
        title=f"Diagnosis of {result.title or result.model}",
        headline=_headline(result),
        facts=_facts(result),
        lead=_lead(result),
        blocks=[
            *(_at_the_top(section) for section in sections if section.anchor == TOP),
            Section("", _findings(result, charts), "findings", listed=False),
            *(section for section in sections if section.anchor != TOP),
            *([_tables(result, tables_shown_whole(result))] if result.tables else []),
            _how(result),
        ],
        series=drawn_tables(result).roles,
        legend="Roles",
    )


def _at_the_top(section: Section) -> Section:
    """Return the section that comes first without a heading; what explains its charts goes below them."""
    return replace(section, title="", intro="", blocks=[*section.blocks, Text(section.intro, "note")])


def _headline(result: DiagnosisResult) -> Markup:
    if result.cause is None:
        return Markup.escape(capital(result.verdict))
    form = Markup('<span class="tag {0}">{0}</span>{1}')
    return form.format(result.cause.severity, capital(result.cause.head))


def _lead(result: DiagnosisResult) -> str:
    """State what to do about the cause."""
    remedy = "" if result.cause is None else capital(result.cause.remedy)
    return remedy if not remedy or remedy.endswith("?") else f"{remedy}."


def _facts(result: DiagnosisResult) -> list[str]:
    facts = [f"{name} {value}" for name, value in result.facts.items() if name != "batch"]
    facts += [f"{name} {value}" for name, value in result.case.items() if name != "recipe"]
    facts.append(f"preset {result.preset}")
    if result.seconds:
        facts.append(f"{duration(sum(result.seconds.values()))} of measuring")
        facts.append(f"{result.peak_memory_bytes / 2**30:.2f} GiB at most")
    return facts


def _findings(result: DiagnosisResult, charts: Sequence[str]) -> list[Block]:
    """List the findings other than the cause, the most severe first; notes are shown on request."""
    others = [finding for finding in result.findings if finding != result.cause]
    grave = [finding for finding in others if finding.severity != "note"]
    notes = [finding for finding in others if finding.severity == "note"]
    blocks: list[Block] = [Html(_listed(grave, charts))] if grave else []
    if result.cause is not None and result.cause in result.findings:
        evidence = Markup('<ul class="findings">{}</ul>').format(_evidence(result.cause, charts))
        blocks.append(Details("What the first line is based on", [Html(evidence)]))
    if notes:
        summary = f"{count(len(notes), 'note')} on other measurements"
        blocks.append(Details(summary, [Html(_listed(notes, charts))], open=not grave))
    return blocks


def _listed(findings: Sequence[FindingResult], charts: Sequence[str]) -> Markup:
    form = Markup('<li class="{0}"><p><span class="tag {0}">{0}</span>{1}</p>{2}</li>')
    items = [
        form.format(finding.severity, capital(finding.sentence), _evidence(finding, charts))
        for finding in findings
    ]
    return Markup('<ul class="findings">{}</ul>').format(Markup("").join(items))


def _evidence(finding: FindingResult, charts: Sequence[str]) -> Markup:
    """What a finding rests on: a link to its chart or table, its numbers and, on request, its source."""
    parts = []
    if finding.table:
        name = finding.table.replace("_", " ")
        parts.append(Markup('<a href="#{}">{}</a>').format(_place(finding.table, charts), name))
    if finding.numbers:
        numbers = [f"{name} = {number_cell(value)}" for name, value in finding.numbers.items()]
        parts.append(Markup.escape(", ".join(numbers).replace("_", " ")))
    source = Markup("")
    if finding.reference:
        form = Markup("<details class=source><summary>source</summary>{}</details>")
        source = form.format(finding.reference)
    if not parts and not source:
        return Markup("")
    return Markup('<div class="note">{}{}</div>').format(Markup(": ").join(parts), source)


def _place(table: str, charts: Sequence[str]) -> str:
    """The anchor of the first chart of a table, else that of the table itself."""
    for name in charts:
        if name == table or name.startswith(f"{table}-"):
            return f"figure-{name}"
    return f"table-{anchor(table)}"


def _tables(result: DiagnosisResult, left_out: Collection[str]) -> Section:
    tables = {name: rows for name, rows in result.tables.items() if rows and name not in left_out}
    blocks = [rows_table(name, folded(rows)) for name, rows in tables.items()]
    return Section("Tables", blocks, "tables", "Every number behind the charts.")


def _how(result: DiagnosisResult) -> Section:
    batches = {study.name: study.batch for study in result.studies}
    studies = [
        [Cell(name.replace("_", " ")), Cell(batches.get(name, "")), Cell(duration(seconds))]
        for name, seconds in result.seconds.items()
    ]
    facts = [[Cell(name), Cell(value)] for name, value in {**result.facts, **result.case}.items()]
    blocks: list[Block] = [
        Text(
            "Everything was measured without dropout; nothing was trained, and the model is unchanged. "
            "Statistics ignore padding."
        )
    ]
    if result.command:
        blocks.append(Code(result.command))
    blocks += [
        Details("Structure of the model", [Code(result.structure)]),
        Details("Facts", [PageTable(("", ""), facts, text_columns=2)]),
        Details("Studies", [PageTable(("study", "measured on", "time"), studies, text_columns=2)]),
    ]
    return Section("How it was measured", blocks, "how")

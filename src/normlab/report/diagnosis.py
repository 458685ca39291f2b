"""The page of a diagnosis, drawn without torch from ``diagnosis.json``: findings, charts, every table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from normlab.errors import UserError
from normlab.report.page import Block, Cell, Code, Details, Html, Page, Section, Table, Text
from normlab.report.studies import Row, View, anchor, pictured, pictures
from normlab.spec.arguments import validate_arguments
from normlab.spec.serialise import NOT_FINITE
from normlab.spec.units import count, duration
from normlab.store.folder import write_text_atomic

ROWS: Final = 400
"""Rows of a table on the page, at most; the file beside it holds all."""


PARTS: Final = (
    "model",
    "preset",
    "facts",
    "structure",
    "stacks",
    "findings",
    "seconds",
    "tables",
    "peak_memory_bytes",
)
"""Parts without which a diagnosis cannot be drawn."""


@validate_arguments
def write_diagnosis(diagnosis: Mapping[str, Any], folder: Path, name: str = "diagnosis") -> Path:
    """Write ``name.json`` and ``name.html`` into the folder, and return the path of the page.

    ``diagnosis`` is ``Diagnosis.to_plain()`` with ``title``, ``case`` (more facts) and ``command``; numbers
    that are not finite are "nan", "inf" and "-inf".
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(diagnosis, ensure_ascii=False, allow_nan=False)
    write_text_atomic(folder / f"{name}.json", f"{text}\n")
    page = folder / f"{name}.html"
    write_text_atomic(page, diagnosis_page(diagnosis))
    return page


@validate_arguments
def diagnosis_page(diagnosis: Mapping[str, Any]) -> str:
    """Draw the diagnosis that ``write_diagnosis`` receives as one self-contained HTML page.

    Raises UserError if a part of it is missing.
    """
    if missing := [name for name in PARTS if name not in diagnosis]:
        raise UserError(f"the diagnosis has no {', '.join(missing)}; give that of Diagnosis.to_plain()")
    view = View(diagnosis)
    return Page(
        title=f"Diagnosis of {diagnosis.get('title') or diagnosis['model']}",
        headline=_headline(diagnosis),
        facts=_facts(diagnosis),
        lead="",
        blocks=[
            Section("", [_findings(diagnosis["findings"])], "findings", listed=False),
            *pictures(view),
            _tables(diagnosis, pictured(view)),
            _how(diagnosis),
        ],
        recipes=view.roles,
    ).html()


def _headline(diagnosis: Mapping[str, Any]) -> Markup:
    counted = Counter(finding["severity"] for finding in diagnosis["findings"])
    said = [count(counted[kind], kind) for kind in ("problem", "warning") if counted[kind]]
    title = diagnosis.get("title") or diagnosis["model"]
    return Markup("{}: {}").format(title, " and ".join(said) or "nothing that stands out")


def _facts(diagnosis: Mapping[str, Any]) -> list[str]:
    facts = [f"{name} {value}" for name, value in diagnosis["facts"].items() if name != "batch"]
    facts += [f"{name} {value}" for name, value in diagnosis.get("case", {}).items() if name != "recipe"]
    facts.append(f"preset {diagnosis['preset']}")
    facts.append(f"{duration(sum(diagnosis['seconds'].values()))} of measuring")
    return [*facts, f"{diagnosis['peak_memory_bytes'] / 2**30:.2f} GiB at most"]


def _findings(findings: Sequence[Row]) -> Html:
    """List the findings, the most severe first; notes fold away if there is anything else."""
    item = Markup('<li class="{0}"><p><span class="tag {0}">{0}</span>{1}</p><p class="note">{2}</p></li>')

    def listed(some: Sequence[Row]) -> Markup:
        said = [(f["severity"], f["sentence"][:1].upper() + f["sentence"][1:], _support(f)) for f in some]
        return Markup('<ul class="findings">{}</ul>').format(Markup("").join(item.format(*f) for f in said))

    grave = [finding for finding in findings if finding["severity"] != "note"]
    notes = [finding for finding in findings if finding["severity"] == "note"]
    html = listed(grave) if grave else Markup("")
    if notes:
        folded = Markup("<details{}><summary>{} on other measurements</summary>{}</details>")
        html += folded.format("" if grave else Markup(" open"), count(len(notes), "note"), listed(notes))
    return Html(html)


def _support(finding: Row) -> str:
    numbers = ", ".join(f"{name} = {_cell(value)}" for name, value in finding["numbers"].items())
    measured = ": ".join(filter(None, (finding["table"].replace("_", " "), numbers.replace("_", " "))))
    return " · ".join(filter(None, (measured, finding["reference"])))


def _tables(diagnosis: Mapping[str, Any], left_out: Collection[str]) -> Section:
    blocks: list[Block] = []
    for name, rows in diagnosis["tables"].items():
        if not rows or name in left_out:
            continue
        header = list(rows[0])
        numeric = [all(not isinstance(r[c], str) or r[c] in NOT_FINITE for r in rows) for c in header]
        order = sorted(range(len(header)), key=lambda i: numeric[i])  # words to the left
        words = len(header) - sum(numeric)
        body = [[Cell(_cell(row[header[i]])) for i in order] for row in rows[:ROWS]]
        table = Table([header[i].replace("_", " ") for i in order], body, text_columns=words)
        cut = f"The first {ROWS} of {len(rows):,} rows; the JSON file beside this page holds all."
        more = [Text(cut, "note")] if len(rows) > ROWS else []
        summary = Markup("{} <span class=note>{} rows</span>").format(name.replace("_", " "), len(rows))
        blocks.append(Details(summary, [*more, table], f"table-{anchor(name)}"))
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
            "Statistics leave padding out."
        ),
        *([Code(diagnosis["command"])] if diagnosis.get("command") else []),
        Details("Structure of the model", [Code(diagnosis["structure"])]),
        Details("Facts", [Table(("", ""), facts, text_columns=2)]),
        Details("Studies", [Table(("study", "measured on", "time"), studies, text_columns=2)]),
    ]
    return Section("How it was measured", blocks, "how")


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

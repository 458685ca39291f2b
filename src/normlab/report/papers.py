"""The pages of the papers: all findings with their effects, and each table or figure beside what was
measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from normlab.base.files import write_text_atomic
from normlab.base.units import count, duration
from normlab.errors import UserError
from normlab.papers import PAPERS, phrases
from normlab.papers.artefact import Artefact, Drawing, Reproduction
from normlab.papers.cells import PrintedTable
from normlab.papers.effects import RATIO
from normlab.papers.estimate import Estimate
from normlab.papers.finding import Answer, Evidence, Reading, Reviewed
from normlab.papers.results import ArtefactStatus, State, disagreements, result_name
from normlab.report.charts import installed
from normlab.report.page import (
    Block,
    Cell,
    Chart,
    Code,
    Columns,
    Details,
    Page,
    PageTable,
    Section,
    Text,
    already_drawn,
    anchor,
    breakable,
    labelled,
    number_cell,
)
from normlab.report.studies import rows_table

if TYPE_CHECKING:
    import polars as pl

CELL_TABLE: Final = "cells"
"""Table of the trained cells: ``cell``, the metric's mean, ``low``, ``high``, ``seeds`` and ``trained``."""
CELLS: Final = 12
"""At most so many published values are shown without asking."""
TONES: Final[Mapping[State, str]] = {
    "measured": "good",
    "not all runs": "alarm",
    "another text": "alarm",
    "damaged": "alarm",
    "not run": "faint",
    "answered": "faint",
}
ANSWERS: Final[Mapping[Answer, str]] = {
    "supported": "good",
    "partly": "",
    "contradicted": "bad",
    "not tested here": "faint",
}
READINGS: Final[Mapping[Reading, str]] = {
    "agrees": "good",
    "contradicts": "bad",
    "open": "",
    "waits": "faint",
}


def write_reproduction_page(standing: ArtefactStatus, folder: Path) -> Path:
    """Write ``<folder>/<id>.html``, or ``<id>@<scale>.html``, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{result_name(standing.artefact.id, standing.scale)}.html"
    write_text_atomic(page, reproduction_page(standing))
    return page


def reproduction_page(standing: ArtefactStatus, findings: Sequence[Reviewed] = ()) -> str:
    """Return an artefact and its measurements as one self-contained HTML page, with the findings that rest on
    it.
    """
    artefact, found = standing.artefact, standing.found
    name = result_name(artefact.id, standing.scale)
    pictures, legend = _pictures(artefact, found)
    return Page(
        title=name,
        headline=f"{name}: {phrases.state(standing)}",
        facts=_facts(standing),
        lead=artefact.shows,
        blocks=[
            *_warnings(standing),
            *([Section("Findings", [_finding_table(findings)], "findings")] if findings else []),
            _published(artefact, found),
            *pictures,
            *(
                [Section("Discussion", [Text(artefact.discussion)], "discussion")]
                if artefact.discussion
                else []
            ),
            *_tables(found),
            _how(standing),
        ],
        recipes=legend,
    ).html()


def _facts(standing: ArtefactStatus) -> list[str]:
    artefact, found = standing.artefact, standing.found
    facts = [artefact.paper]
    if found is not None:
        seconds = {row["run"]: row["seconds"] for row in found.tables.get("runs", ())}
        trained = f"{count(len(seconds), 'run')}, {duration(sum(seconds.values()))} of training"
        facts += [f"{found.scale} scale, {trained}" if seconds else ""]
        facts += [f"{duration(found.seconds)} of measuring"]
    return [fact for fact in facts if fact]


def _warnings(standing: ArtefactStatus) -> Iterator[Block]:
    artefact, found = standing.artefact, standing.found
    yield from (Text(caution, "alarm") for caution in phrases.cautions(standing))
    if found is not None and found.scale in artefact.trainings:
        differs = artefact.trainings[found.scale].differs
        yield Text(f"Measured at the {found.scale} scale: {differs}")
    if standing.state == "not run":
        yield Text(f"Nothing was measured. To measure it: {phrases.command(artefact, standing.scale)}")


def _pictures(artefact: Artefact, found: Reproduction | None) -> tuple[list[Block], list[str]]:
    """The charts of an artefact, and the legend that they share; none where they cannot be drawn."""
    if found is None or not installed():
        return [], []
    from normlab.report.charts.artefact import colours
    from normlab.report.charts.drawing import frame

    tables = {name: frame(rows) for name, rows in found.tables.items() if rows}
    drawn = [
        name
        for drawing in artefact.drawings
        if drawing.table in tables and drawing.colour in tables[drawing.table].columns
        for name in colours(drawing, tables[drawing.table])
    ]
    legend = list(dict.fromkeys(drawn))
    blocks: list[Block] = []
    for place, drawing in enumerate(artefact.drawings if tables else ()):
        try:
            blocks.append(Columns(_charts(drawing, tables, legend, place)))
        except UserError as error:
            blocks.append(Text(str(error), "alarm"))
    return ([Section("What was measured", blocks, "pictures")] if blocks else []), legend


def _charts(
    drawing: Drawing, tables: Mapping[str, pl.DataFrame], legend: list[str], place: int
) -> list[Chart]:
    from normlab.report.charts.artefact import panels

    if drawing.table not in tables:
        held = ", ".join(tables)
        raise UserError(f"{drawing.title}: the result has no table {drawing.table!r} but {held}.")
    table = tables[drawing.table]
    caption = "Dashed line: theory." if drawing.theory and drawing.kind == "line" else ""
    caption = f"Shade: {drawing.shade.replace('_', ' ')}." if drawing.kind == "cells" else caption
    name = f"{anchor(drawing.table)}-{place}"
    return [
        labelled(Chart(name, drawing.title, caption, already_drawn(chart)), panel)
        for panel, chart in panels(drawing, table, legend).items()
    ]


def _published(artefact: Artefact, found: Reproduction | None) -> Section:
    """The published values beside the trained cells of the same names; a table as it was printed."""
    ours = {str(row["cell"]): row for row in (found.tables.get(CELL_TABLE, ()) if found else ())}
    published, metric = artefact.published, metric_of(ours)
    printed = published if isinstance(published, PrintedTable) else None
    shown = {*printed.names.values(), *printed.rows} if printed else set()
    rows = [
        [Cell(name), Cell(number_cell(published.get(name))), *(_ours(ours.get(name), metric) if ours else ())]
        for name in dict.fromkeys([*published, *ours])
        if name not in shown
    ]
    measured = (f"here, {metric} [95%]", phrases.SEEDS, "trained")
    header = ("", "published", *(measured if ours else ()))
    table = PageTable(header, rows, text_columns=len(header))
    listed = table if ours or len(rows) <= CELLS else Details(count(len(rows), "published value"), [table])
    blocks = [*([_printed(printed, ours)] if printed else []), *([listed] if rows else [])]
    title = "Published and measured" if ours else "Published"
    return Section(title, blocks, "published", artefact.paper)


def _printed(published: PrintedTable, ours: Mapping[str, Mapping[str, Any]]) -> PageTable:
    """The paper's table as it was printed, with what was measured for a cell below its value, and what was
    measured for a cell of the row's name at the row's end.
    """

    def here(name: str, before: str) -> str:
        mean, _, trained = _ours(ours.get(name), metric_of(ours))
        return f"{before}{mean.text}; {trained.text} trained" if name in ours else ""

    of_rows = any(row in ours for row in published.rows)
    rows = [
        [
            Cell(row),
            *(Cell(number_cell(published.get(name)), small=here(name, "here ")) for name in names),
            *([Cell(here(row, "") or "–")] if of_rows else []),
        ]
        for row in published.rows
        for names in [[published.names[column, row] for column in published.columns]]
    ]
    header = ("", *published.columns, *([f"here, {metric_of(ours)} [95%]"] if of_rows else []))
    return PageTable(header, rows, text_columns=len(header))


def metric_of(ours: Mapping[str, Mapping[str, Any]]) -> str:
    """The metric of the table of cells, its second column."""
    return next((name for row in ours.values() for name in list(row)[1:2]), "")


def _ours(row: Mapping[str, Any] | None, metric: str) -> tuple[Cell, ...]:
    """A trained cell: its mean with the interval, every seed, and how many trained."""
    if row is None:
        return Cell("–"), Cell("–"), Cell("–")
    mean = Estimate(float(row[metric]), float(row["low"]), float(row["high"]))
    return Cell(phrases.scored(mean, metric)), Cell(str(row["seeds"])), Cell(str(row["trained"]))


def _tables(found: Reproduction | None) -> Iterator[Section]:
    if found is None:
        return
    blocks = [rows_table(name, list(rows)) for name, rows in found.tables.items() if rows]
    measures = [
        [Cell(name.replace("_", " ")), Cell(phrases.estimated(m))] for name, m in found.measures.items()
    ]
    if measures:
        blocks.append(
            Details("Every measure", [PageTable(("measure", "value [95%]"), measures, text_columns=2)])
        )
    yield Section("Tables", blocks, "tables", "Every number behind the charts and the findings.")


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(own)}" for name, own in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _how(standing: ArtefactStatus) -> Section:
    artefact, found, scale = standing.artefact, standing.found, standing.scale
    facts: dict[str, str] = {"scale": scale} if scale in artefact.trainings else {}
    if artefact.study:
        settings = {k: _plain(v) for k, v in artefact.settings_at(scale).items() if k != "measures"}
        facts = {"study": artefact.study_name, **settings, **facts}
    if found is not None:
        facts = {**facts, **found.facts}
    rows = [[Cell(name.replace("_", " ")), Cell(value)] for name, value in facts.items()]
    code = [Code(phrases.command(artefact, scale))] if artefact.study else []
    return Section("How", [*code, PageTable(("", ""), rows, text_columns=2)], "how")


def write_papers_page(
    findings: Sequence[Reviewed],
    standings: Sequence[ArtefactStatus],
    folder: Path,
    others: Sequence[ArtefactStatus] = (),
) -> Path:
    """Write ``<folder>/papers.html``, with links to the pages in that folder; return its path.

    ``others`` are results at other scales, which get tables of their own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    linked = {path.stem for path in folder.glob("*.html")}
    page = folder / "papers.html"
    write_text_atomic(page, papers_page(findings, standings, linked, others))
    return page


def papers_page(
    findings: Sequence[Reviewed],
    standings: Sequence[ArtefactStatus],
    linked: set[str],
    others: Sequence[ArtefactStatus] = (),
) -> str:
    """Return all findings, then all artefacts, as one self-contained HTML page, with links to the pages of
    ``linked``.
    """
    by_paper = {key: list(group) for key, group in groupby(findings, lambda one: one.finding.paper)}
    sections = [_of_paper(key, group) for key, group in by_paper.items()]
    keys = (standings, lambda s: s.artefact.id.partition(".")[0]), (others, lambda s: f"{s.scale} scale")
    tables = [
        Section(key, [_overview(group, linked)], anchor(f"tables {key}"), listed=False)
        for some, name in keys
        for key, group in groupby(some, name)
    ]
    return Page(
        title="normlab papers",
        headline=phrases.counted(findings),
        facts=[f"{len(standings)} tables and figures"],
        lead=" ".join(phrases.LEGEND),
        blocks=[
            *(Text(sentence, "alarm") for sentence in disagreements(standings)),
            *sections,
            Section("Tables and figures", tables, "tables_and_figures"),
        ],
        recipes=["agrees", "contradicts", "open", "waits"] if installed() else (),
    ).html()


def _of_paper(key: str, findings: Sequence[Reviewed]) -> Section:
    """A paper's findings: the table, the picture, and each with all of its evidence on request."""
    details = [_details(one) for one in findings]
    return Section(PAPERS[key].authors, [_finding_table(findings), *forests(findings), *details], key)


def _finding_table(findings: Iterable[Reviewed]) -> PageTable:
    header = ("", "finding", "the paper has", "first effect", "measured [95%], runs", "answer", "why")
    rows = [
        [
            Cell(one.finding.id),
            Cell(one.finding.short, small=one.finding.where),
            Cell(one.finding.published),
            Cell(
                one.main.piece.says if one.main else "–",
                small=one.main.regime.setting.short if one.main else "",
            ),
            Cell(phrases.in_a_line(one), small=phrases.expected(one.main) if one.main else ""),
            Cell(phrases.answer(one), small=phrases.tally(one), tone=ANSWERS[one.finding.answer]),
            Cell(one.finding.because),
        ]
        for one in findings
    ]
    return PageTable(header, rows, text_columns=7)


def _details(one: Reviewed) -> Details:
    """A finding whole: the sentence, and every effect with its regime and what was expected of it."""
    finding = one.finding
    blocks: list[Block] = [Text(finding.says), Text(finding.because), _evidence_table(one.evidence)]
    if finding.needs:
        blocks.insert(2, Text(f"To test it: {finding.needs}"))
    if one.left_out:
        blocks += [Text("Measured, and not counted:"), _evidence_table(one.left_out)]
    answer = f"{phrases.answer(one)} ({phrases.tally(one)})"
    return Details(f"{finding.id}: {finding.short}: {answer}", blocks, anchor(finding.id))


def _evidence_table(pieces: Sequence[Evidence]) -> PageTable:
    header = ("effect", "measured [95%], runs", "expected", "reading", "regime")
    rows = [
        [
            Cell(
                piece.piece.says, small=f"not counted: {piece.piece.because}" if piece.piece.because else ""
            ),
            Cell(phrases.of_evidence(piece)),
            Cell(piece.piece.expects.in_words(), small=phrases.origin(piece)),
            Cell(piece.reading, tone=READINGS[piece.reading]),
            Cell(piece.regime.name, small=f"{piece.regime.setting.says} {piece.regime.says}"),
        ]
        for piece in pieces
    ]
    return PageTable(header, rows, text_columns=5)


def forests(findings: Sequence[Reviewed]) -> list[Chart]:
    """A forest plot for each unit of a paper's effects, of those that count."""
    charts = []
    for unit, title in phrases.DRAWN.items():
        rows = forest_rows(findings, unit)
        if not rows:
            continue
        equal = 1.0 if unit == RATIO else 0.0
        name = anchor(f"{findings[0].finding.paper} {unit}")
        caption = f"Each effect with its 95% interval; dotted: no difference ({equal:g})."
        charts.append(Chart(name, title[0].upper() + title[1:], caption, _forest(rows, title, equal), rows))
    return charts


def _forest(rows: Sequence[Mapping[str, Any]], title: str, equal: float) -> Any:
    def draw(_: int) -> Any:
        from normlab.report.charts.findings import forest

        return forest(rows, title, equal, ratios=equal == 1)

    return draw


def forest_rows(findings: Sequence[Reviewed], unit: str) -> list[dict[str, Any]]:
    """The effects of a unit that compare two sides and have an estimate, in the order of their findings."""
    rows = []
    for one in findings:
        for piece in one.evidence:
            found = piece.estimate
            ends = (found.value, found.low, found.high)
            if found.unit == unit and piece.equal is not None and all(map(math.isfinite, ends)):
                effect = f"{one.finding.id} {piece.piece.says} · {piece.regime.setting.short}"
                spread = dict(zip(("value", "low", "high"), ends, strict=True))
                rows.append({"effect": effect, "reading": piece.reading, **spread})
    return rows


def _overview(standings: Iterable[ArtefactStatus], linked: set[str]) -> PageTable:
    rows = [
        [
            Cell(breakable(name), href=f"{name}.html" if name in linked else ""),
            Cell(phrases.state(s), tone=TONES.get(s.state, "")),
            Cell(s.artefact.shows, small=s.artefact.paper),
        ]
        for s in standings
        for name in [result_name(s.artefact.id, s.scale)]
    ]
    return PageTable(("table or figure", "state", "what it shows"), rows, text_columns=3)

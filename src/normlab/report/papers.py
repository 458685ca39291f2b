"""The page of the papers: all findings with their effects, and the list of their tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from normlab.base.files import write_text_atomic
from normlab.papers import PAPERS, phrases
from normlab.papers.effects import RATIO
from normlab.papers.finding import Answer, Evidence, Reading, Reviewed
from normlab.papers.results import ArtefactStatus, State, disagreements, result_name
from normlab.report.charts import installed
from normlab.report.page import Block, Cell, Chart, Details, Page, PageTable, Section, Text, anchor, breakable

if TYPE_CHECKING:
    from normlab.report.charts.drawing import Drawn

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
    by_paper = groupby(findings, lambda review: review.finding.paper)
    sections = [_of_paper(key, list(group)) for key, group in by_paper]
    artefacts_by_paper = groupby(standings, lambda standing: standing.artefact.id.partition(".")[0])
    others_by_scale = groupby(others, lambda standing: f"{standing.scale} scale")
    tables = [
        Section(title, [_overview(group, linked)], anchor(f"tables {title}"), listed=False)
        for title, group in (*_lists(artefacts_by_paper), *_lists(others_by_scale))
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
        series=["agrees", "contradicts", "open", "waits"] if installed() else (),
    ).html()


def _lists(groups: Iterable[tuple[str, Iterable[ArtefactStatus]]]) -> list[tuple[str, list[ArtefactStatus]]]:
    """Return the groups of ``groupby``, which empties each when the next is asked for."""
    return [(title, list(group)) for title, group in groups]


def _of_paper(key: str, findings: Sequence[Reviewed]) -> Section:
    """A paper's findings: the table, the picture, and each with all of its evidence on request."""
    details = [_details(review) for review in findings]
    return Section(PAPERS[key].authors, [finding_table(findings), *forests(findings), *details], key)


def finding_table(findings: Iterable[Reviewed]) -> PageTable:
    """A row for each finding: its first effect, what was measured of it, and the answer."""
    header = ("", "finding", "the paper has", "first effect", "measured [95%], runs", "answer", "why")
    rows = []
    for review in findings:
        finding, main = review.finding, review.main
        effect, expected = Cell("–"), ""
        if main is not None:
            effect = Cell(main.piece.says, small=main.regime.setting.short)
            expected = phrases.expected(main)
        rows.append(
            [
                Cell(finding.id),
                Cell(finding.short, small=finding.where),
                Cell(finding.published),
                effect,
                Cell(phrases.in_a_line(review), small=expected),
                Cell(phrases.answer(review), small=phrases.tally(review), tone=ANSWERS[finding.answer]),
                Cell(finding.because),
            ]
        )
    return PageTable(header, rows, text_columns=7)


def _details(review: Reviewed) -> Details:
    """A finding in full: the sentence, and every effect with its regime and what was expected of it."""
    finding = review.finding
    blocks: list[Block] = [Text(finding.says), Text(finding.because)]
    if finding.needs:
        blocks.append(Text(f"To test it: {finding.needs}"))
    blocks.append(_evidence_table(review.evidence))
    if review.left_out:
        blocks += [Text("Measured, and not counted:"), _evidence_table(review.left_out)]
    answer = f"{phrases.answer(review)} ({phrases.tally(review)})"
    return Details(f"{finding.id}: {finding.short}: {answer}", blocks, anchor(finding.id))


def _evidence_table(pieces: Sequence[Evidence]) -> PageTable:
    """A row for each effect, with what was expected of it and what it says of the finding."""
    header = ("effect", "measured [95%], runs", "expected", "reading", "regime")
    rows = []
    for evidence in pieces:
        piece, regime = evidence.piece, evidence.regime
        rows.append(
            [
                Cell(piece.says, small=f"not counted: {piece.because}" if piece.because else ""),
                Cell(phrases.of_evidence(evidence)),
                Cell(piece.expects.in_words(), small=phrases.origin(evidence)),
                Cell(phrases.reading(evidence), tone=READINGS[evidence.reading]),
                Cell(regime.name, small=f"{regime.setting.says} {regime.says}"),
            ]
        )
    return PageTable(header, rows, text_columns=5)


def forests(findings: Sequence[Reviewed]) -> list[Chart]:
    """The forest plots of a paper's effects that count, one for each unit in ``phrases.DRAWN``."""
    charts = []
    for unit, title in phrases.DRAWN.items():
        rows = forest_rows(findings, unit)
        if not rows:
            continue
        name = anchor(f"{findings[0].finding.paper} {unit}")
        charts.append(_forest(name, title, rows, is_ratio=unit == RATIO))
    return charts


def _forest(name: str, title: str, rows: Sequence[Mapping[str, Any]], *, is_ratio: bool) -> Chart:
    equal = 1.0 if is_ratio else 0.0

    def draw(_: int) -> Drawn:
        from normlab.report.charts.findings import forest

        return forest(rows, title, equal, ratios=is_ratio)

    caption = f"Each effect with its 95% interval; dotted: no difference ({equal:g})."
    return Chart(name, title[0].upper() + title[1:], caption, draw, rows)


def forest_rows(findings: Sequence[Reviewed], unit: str) -> list[dict[str, Any]]:
    """The effects of a unit that compare two sides and have an estimate, in the order of their findings."""
    rows = []
    for review in findings:
        for evidence in review.evidence:
            estimate = evidence.estimate
            ends = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
            compares = estimate.unit == unit and evidence.equal is not None
            if compares and all(map(math.isfinite, ends.values())):
                setting = evidence.regime.setting.short
                effect = f"{review.finding.id} {evidence.piece.says} · {setting}"
                rows.append({"effect": effect, "reading": evidence.reading, **ends})
    return rows


def _overview(standings: Iterable[ArtefactStatus], linked: set[str]) -> PageTable:
    """A row for each table or figure, with a link to its page if that is there."""
    rows = []
    for standing in standings:
        name, artefact = result_name(standing.artefact.id, standing.scale), standing.artefact
        rows.append(
            [
                Cell(breakable(name), href=f"{name}.html" if name in linked else ""),
                Cell(phrases.state(standing), tone=TONES.get(standing.state, "")),
                Cell(artefact.shows, small=artefact.paper),
            ]
        )
    return PageTable(("table or figure", "state", "what it shows"), rows, text_columns=3)

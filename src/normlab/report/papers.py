"""The overview of all artefacts of the papers and their verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from normlab.config.units import count
from normlab.papers.results import ArtefactStatus, disagreements, result_name
from normlab.papers.words import disagreeing, in_short, overall, pace, standing_in_words
from normlab.report.page import Cell, Page, PageTable, Section, Text, breakable
from normlab.report.reproduction import state_cell
from normlab.runs.folder import write_text_atomic


def write_papers_page(
    standings: Sequence[ArtefactStatus], folder: Path, others: Sequence[ArtefactStatus] = ()
) -> Path:
    """Write ``<folder>/papers.html``, with links to the pages in that folder; return its path.

    ``others`` are results at other scales, which have tables of their own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    linked = {path.stem for path in folder.glob("*.html")}
    page = folder / "papers.html"
    write_text_atomic(page, papers_page(standings, linked, others))
    return page


def papers_page(
    standings: Sequence[ArtefactStatus], linked: set[str], others: Sequence[ArtefactStatus] = ()
) -> str:
    """Return all artefacts, and the results at other scales, as one self-contained HTML page, with links to
    the pages of ``linked``.
    """
    keys = (standings, lambda s: s.artefact.id.partition(".")[0]), (others, lambda s: f"{s.scale} scale")
    sections = [(key, list(group)) for some, name in keys for key, group in groupby(some, name)]
    holding, *rest = overall(standings)
    return Page(
        title="normlab papers",
        headline=f"{count(len(standings), 'artefact')} of the papers: {holding}",
        facts=rest,
        lead="Every table, figure and statement of the papers: was what it asserts found, and by which "
        "numbers? A claim is written before its result is measured; one that was changed keeps its earlier "
        "versions, with what was found for them. A check cannot fail unless the measurement is wrong.",
        blocks=[
            *(Text(disagreeing(found), "alarm") for found in disagreements(standings)),
            *(
                Section(key, [_table(group, linked, pace(standings))], key.replace(" ", "-"))
                for key, group in sections
            ),
        ],
    ).html()


def _table(standings: Sequence[ArtefactStatus], linked: set[str], seconds: float | None) -> PageTable:
    rows = [
        [
            Cell(breakable(name), href=f"{name}.html" if name in linked else ""),
            state_cell(s.state, standing_in_words(s)),
            Cell(s.artefact.shows, small=s.artefact.paper),
            Cell(in_short(s, seconds)),
        ]
        for s in standings
        for name in (result_name(s.artefact.id, s.scale),)
    ]
    return PageTable(
        ("artefact", "claims that hold", "what it shows", "what was measured"), rows, text_columns=4
    )

"""The pages of the papers: one artefact with its verdicts and measurements, and an overview of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import polars as pl

from normlab.base.files import write_text_atomic
from normlab.base.units import count, duration
from normlab.errors import UserError
from normlab.papers import words
from normlab.papers.artefact import Artefact, Drawing, Reproduction
from normlab.papers.cells import PrintedTable
from normlab.papers.claim import Claim, Measure
from normlab.papers.results import ArtefactStatus, State, disagreements, result_name
from normlab.report.charts.artefact import colours, panels
from normlab.report.charts.drawing import frame
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
    anchor,
    breakable,
    labelled,
    number_cell,
)
from normlab.report.studies import rows_table

CELL_TABLE: Final = "cells"
"""Table of the trained cells: ``cell``, the metric's mean, ``low``, ``high``, ``seeds`` and ``trained``."""
CELLS: Final = 12
"""At most so many published values are shown without asking."""
TONES: Final[Mapping[State, str]] = {
    "agrees": "good",
    "checked": "good",
    "disagrees": "bad",
    "damaged": "alarm",
    "stale": "alarm",
    "not run": "faint",
    "no study yet": "faint",
}


def write_reproduction_page(standing: ArtefactStatus, folder: Path) -> Path:
    """Write ``<folder>/<id>.html``, or ``<id>@<scale>.html``, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{result_name(standing.artefact.id, standing.scale)}.html"
    write_text_atomic(page, reproduction_page(standing))
    return page


def reproduction_page(standing: ArtefactStatus) -> str:
    """Return an artefact and its measurements as one self-contained HTML page."""
    artefact, found = standing.artefact, standing.found
    name = result_name(artefact.id, standing.scale)
    tables = {} if found is None else {name: frame(rows) for name, rows in found.tables.items() if rows}
    drawn = [
        name
        for drawing in artefact.drawings
        if drawing.colour in (table := tables.get(drawing.table, pl.DataFrame())).columns
        for name in colours(drawing, table)
    ]
    legend = list(dict.fromkeys(drawn))
    explained = (
        ("Discussion", artefact.discussion, "discussion"),
        ("Why it differs", artefact.finding, "finding"),
    )
    return Page(
        title=name,
        headline=f"{name}: {words.standing_in_words(standing)}",
        facts=_facts(standing),
        lead=artefact.shows,
        blocks=[
            *_warnings(standing),
            *_claims(standing),
            *_pictures(artefact, tables, legend),
            *(Section(title, [Text(said)], place) for title, said, place in explained if said),
            _published(artefact, found),
            *_tables(found),
            _how(standing),
        ],
        recipes=legend,
    ).html()


def _facts(standing: ArtefactStatus) -> list[str]:
    artefact, found = standing.artefact, standing.found
    version = f"version {artefact.version} of the claims, {artefact.date}" if artefact.version > 1 else ""
    facts = [artefact.paper, version]
    if found is not None:
        seconds = {row["run"]: row["seconds"] for row in found.tables.get("runs", ())}
        trained = f"{count(len(seconds), 'run')}, {duration(sum(seconds.values()))} of training"
        facts += [f"{found.scale} scale, {trained}" if seconds else ""]
        facts += [f"{duration(found.seconds)} of measuring"]
    return [fact for fact in facts if fact]


def _warnings(standing: ArtefactStatus) -> Iterator[Block]:
    artefact, found = standing.artefact, standing.found
    yield from (Text(caution, "alarm") for caution in words.cautions(standing))
    if found is not None and found.scale in artefact.trainings:
        yield Text(f"Measured at the {found.scale} scale: {words.setting(artefact, found.scale)}")
    if found is None and not standing.trouble:
        measure = f"To measure it: {words.command(artefact, standing.scale)}"
        yield Text(f"Nothing was measured. {measure if artefact.study else 'No study decides it yet.'}")


def _claims(standing: ArtefactStatus) -> Iterator[Section]:
    """Yield the claims, and their earlier versions with what was found for them."""
    artefact = standing.artefact
    changed = f"Version {artefact.version}, {artefact.date}. {artefact.reason}"
    blocks: list[Block] = [Text(artefact.asserts), *([Text(changed)] if artefact.version > 1 else [])]
    blocks += _judged(artefact.claims, standing.measures)
    yield Section("What is asserted", blocks, "claims")
    before: list[Block] = []
    for one in standing.before:
        said = f"{words.earlier(one)}. Fingerprint {one.found.fingerprint}. {one.asserts}"
        before += [Text(said), *_judged(one.claims, one.found.measures)]
    if before:
        intro = "Versions that were replaced, for the reason above, with their verdicts."
        yield Section("Earlier claims", before, "earlier", intro)


def _judged(claims: Sequence[Claim], measures: Mapping[str, Measure]) -> Iterator[Block]:
    """Yield the table of the claims that are verdicts, and that of the checks."""
    for name, note in (("claim", ""), ("check", CHECKS)):
        if rows := [_claim(c, measures) for c in claims if bool(c.check) is bool(note)]:
            header = (name, "verdict", "measured [95%]", "allowed", "published")
            yield PageTable(header, rows, note, text_columns=5)


CHECKS: Final = "Checks hold by construction or by a wide margin. They do not count among the verdicts."


def _claim(claim: Claim, measures: Mapping[str, Measure]) -> list[Cell]:
    verdict = claim.verdict(measures)
    return [
        Cell(claim.says, small=claim.measure.replace("_", " ")),
        Cell(verdict, small=words.undecided(claim, measures), tone=TONES.get(verdict, "")),
        Cell(words.measured(measures.get(claim.measure)) or "–"),
        Cell(claim.allowed(), small="; ".join(words.basis(claim, measures))),
        Cell(claim.published or "–"),
    ]


def _pictures(artefact: Artefact, tables: Mapping[str, pl.DataFrame], legend: list[str]) -> Iterator[Section]:
    blocks: list[Block] = []
    for place, drawing in enumerate(artefact.drawings if tables else ()):
        try:
            blocks.append(Columns(_charts(drawing, tables, legend, place)))
        except UserError as error:
            blocks.append(Text(str(error), "alarm"))
    if blocks:
        yield Section("What was measured", blocks, "pictures")


def _charts(
    drawing: Drawing, tables: Mapping[str, pl.DataFrame], legend: list[str], place: int
) -> list[Chart]:
    if drawing.table not in tables:
        held = ", ".join(tables)
        raise UserError(f"{drawing.title}: the result has no table {drawing.table!r} but {held}.")
    table = tables[drawing.table]
    caption = "Dashed line: theory." if drawing.theory and drawing.kind == "line" else ""
    caption = f"Shade: {drawing.shade.replace('_', ' ')}." if drawing.kind == "cells" else caption
    name = f"{anchor(drawing.table)}-{place}"
    return [
        labelled(Chart(name, drawing.title, caption, chart), panel)
        for panel, chart in panels(drawing, table, legend).items()
    ]


def _published(artefact: Artefact, found: Reproduction | None) -> Section:
    """The published values beside the trained cells of the same names; a table as it was printed."""
    ours = {str(row["cell"]): row for row in (found.tables.get(CELL_TABLE, ()) if found else ())}
    published, metric = artefact.published, _metric(ours)
    printed = published if isinstance(published, PrintedTable) else None
    shown = {*printed.names.values(), *printed.rows} if printed else set()
    rows = [
        [Cell(name), Cell(number_cell(published.get(name))), *(_ours(ours.get(name), metric) if ours else ())]
        for name in dict.fromkeys([*published, *ours])
        if name not in shown
    ]
    header = ("", "published", f"here, {metric} [95%]", "seeds", "trained") if ours else ("", "published")
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
        mean, _, trained = _ours(ours.get(name), _metric(ours))
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
    header = ("", *published.columns, *([f"here, {_metric(ours)} [95%]"] if of_rows else []))
    return PageTable(header, rows, text_columns=len(header))


def _metric(ours: Mapping[str, Mapping[str, Any]]) -> str:
    """The metric of the table of cells, its second column."""
    return next((name for row in ours.values() for name in list(row)[1:2]), "")


def _ours(row: Mapping[str, Any] | None, metric: str) -> tuple[Cell, ...]:
    """A trained cell: its mean with the interval, every seed, and how many trained."""
    if row is None:
        return Cell("–"), Cell("–"), Cell("–")
    mean = Measure(float(row[metric]), float(row["low"]), float(row["high"]))
    return Cell(words.measured(mean)), Cell(str(row["seeds"])), Cell(str(row["trained"]))


def _tables(found: Reproduction | None) -> Iterator[Section]:
    if found is None:
        return
    blocks = [rows_table(name, frame(rows).to_dicts()) for name, rows in found.tables.items() if rows]
    measures = [[Cell(name.replace("_", " ")), Cell(words.measured(m))] for name, m in found.measures.items()]
    blocks.append(Details("Every measure", [PageTable(("measure", "value [95%]"), measures, text_columns=2)]))
    yield Section("Tables", blocks, "tables", "Every number behind the charts and the claims.")


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(own)}" for name, own in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _how(standing: ArtefactStatus) -> Section:
    artefact, found, scale = standing.artefact, standing.found, standing.scale
    facts: dict[str, str] = {"scale": scale} if scale in artefact.trainings else {}
    facts["claims' fingerprint"] = artefact.fingerprint(scale)
    if artefact.study:
        measures = "measures", "gpu", "paper"  # which the claims say in words
        settings = {k: _plain(v) for k, v in artefact.settings_at(scale).items() if k not in measures}
        facts = {"study": artefact.study_name, **settings, **facts}
    if found is not None:
        facts = {**facts, **found.facts, "measured for": found.fingerprint}
    rows = [[Cell(name.replace("_", " ")), Cell(value)] for name, value in facts.items()]
    code = [Code(words.command(artefact, scale))] if artefact.study else []
    return Section("How", [*code, PageTable(("", ""), rows, text_columns=2)], "how")


def write_papers_page(
    standings: Sequence[ArtefactStatus], folder: Path, others: Sequence[ArtefactStatus] = ()
) -> Path:
    """Write ``<folder>/papers.html``, with links to the pages in that folder; return its path.

    ``others`` are results at other scales, which get tables of their own.
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
    kinds = {kind: words.overall(some) for kind, some in words.by_kind(standings).items()}
    (counted, (holding, *rest)), *more = kinds.items()
    seconds = words.pace(standings)
    keys = (standings, lambda s: s.artefact.id.partition(".")[0]), (others, lambda s: f"{s.scale} scale")
    sections = [
        Section(key, [_overview(group, linked, seconds)], key.replace(" ", "-"))
        for some, name in keys
        for key, group in groupby(some, name)
    ]
    return Page(
        title="normlab papers",
        headline=f"{counted} of the papers: {holding}",
        facts=[*rest, *(f"{kind}: {', '.join(found)}" for kind, found in more)],
        lead="Every table, figure and statement of the papers: was what it asserts found, and by which "
        "numbers? A claim is written before its result is measured; a changed claim keeps its earlier "
        "versions, with what was found for them. A check can fail only if the measurement is wrong.",
        blocks=[*(Text(sentence, "alarm") for sentence in disagreements(standings)), *sections],
    ).html()


def _overview(standings: Iterable[ArtefactStatus], linked: set[str], seconds: float | None) -> PageTable:
    rows = [
        [
            Cell(breakable(name), href=f"{name}.html" if name in linked else ""),
            Cell(words.standing_in_words(s), tone=TONES.get(s.state, "")),
            Cell(s.artefact.shows, small=s.artefact.paper),
            Cell(words.in_short(s, seconds)),
        ]
        for s in standings
        for name in [result_name(s.artefact.id, s.scale)]
    ]
    return PageTable(
        ("artefact", "claims that hold", "what it shows", "what was measured"), rows, text_columns=4
    )

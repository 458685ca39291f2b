"""The page of one table or figure of a paper: what is published beside what was measured, charts, tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from normlab.base.files import write_text_atomic
from normlab.base.units import count, duration
from normlab.errors import UserError
from normlab.papers import phrases
from normlab.papers.artefact import Artefact, Reproduction
from normlab.papers.cells import PrintedTable
from normlab.papers.finding import Reviewed
from normlab.papers.results import ArtefactStatus, result_name
from normlab.report.drawings import DrawnTables, draw, groups_of
from normlab.report.page import (
    Block,
    Cell,
    Code,
    Columns,
    Details,
    Page,
    PageTable,
    Row,
    Section,
    Text,
    anchor,
    number_cell,
)
from normlab.report.papers import finding_table
from normlab.report.studies import rows_table

MOST_VALUES: Final = 12
"""A list of more published values than this is folded, unless something measured stands beside it."""


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
    artefact, reproduction = standing.artefact, standing.found
    name = result_name(artefact.id, standing.scale)
    charts, legend = _charts_with_legend(artefact, reproduction)
    blocks = list(_warnings(standing))
    if findings:
        blocks.append(Section("Findings", [finding_table(findings)], "findings"))
    blocks += [_published(standing), *charts]
    if artefact.discussion:
        blocks.append(Section("Discussion", [Text(artefact.discussion)], "discussion"))
    if reproduction is not None:
        blocks.append(_tables(reproduction))
    blocks.append(_how(standing))
    return Page(
        title=name,
        headline=f"{name}: {phrases.state(standing)}",
        facts=_facts(artefact, reproduction),
        lead=artefact.shows,
        blocks=blocks,
        series=legend,
    ).html()


def _facts(artefact: Artefact, reproduction: Reproduction | None) -> list[str]:
    facts = [artefact.paper]
    if reproduction is not None:
        # a run may have a row for each of its scores
        seconds = {row["run"]: row["seconds"] for row in reproduction.tables.get("runs", ())}
        if seconds:
            trained = f"{count(len(seconds), 'run')}, {duration(sum(seconds.values()))} of training"
            facts.append(f"{reproduction.scale} scale, {trained}")
        facts.append(f"{duration(reproduction.seconds)} of measuring")
    return [fact for fact in facts if fact]


def _warnings(standing: ArtefactStatus) -> Iterator[Block]:
    artefact, reproduction = standing.artefact, standing.found
    for caution in phrases.cautions(standing):
        yield Text(caution, "alarm")
    if reproduction is not None and reproduction.scale in artefact.trainings:
        differs = artefact.trainings[reproduction.scale].differs
        yield Text(f"Measured at the {reproduction.scale} scale: {differs}")
    if standing.state == "not run":
        yield Text(f"Nothing was measured. To measure it: {phrases.command(artefact, standing.scale)}")


# ------------------------------------------------------------------------------------------------- charts


def _charts_with_legend(
    artefact: Artefact, reproduction: Reproduction | None
) -> tuple[list[Block], list[str]]:
    """The section of an artefact's charts, none if nothing was measured, and the legend that they share."""
    if reproduction is None or not artefact.drawings:
        return [], []
    tables = {name: rows for name, rows in reproduction.tables.items() if rows}
    if not tables:
        return [], []
    legend = _legend(artefact, tables)
    drawn = DrawnTables(tables, {}, legend)
    blocks: list[Block] = []
    for place, drawing in enumerate(artefact.drawings):
        try:
            blocks.append(Columns(draw(drawing, drawn, f"{anchor(drawing.table)}-{place}")))
        except UserError as error:
            blocks.append(Text(str(error), "alarm"))
    return [Section("What was measured", blocks, "pictures")], legend


def _legend(artefact: Artefact, tables: Mapping[str, Sequence[Row]]) -> list[str]:
    """What has a colour in any of the charts, in the order of the tables."""
    names: dict[str, None] = {}
    for drawing in artefact.drawings:
        names |= dict.fromkeys(groups_of(drawing, tables.get(drawing.table, ())))
    return list(names)


# ------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class TrainedCell:
    """What was trained here for a cell of a paper's table, in words."""

    metric: str
    score: str
    """The mean with its interval."""
    seeds: str
    """The score of every seed."""
    trained: str
    """How many seeds trained."""


def _trained_cells(standing: ArtefactStatus) -> dict[str, TrainedCell]:
    """The trained cells of an artefact by name."""
    return {
        name: TrainedCell(phrases.metric_of(row), phrases.score(row), str(row["seeds"]), str(row["trained"]))
        for name, row in phrases.cells_of(standing).items()
    }


def _published(standing: ArtefactStatus) -> Section:
    """The published values beside the trained cells of the same names.

    A printed table comes first, as it was printed. A list below it has the names that the table does not.
    """
    published, trained = standing.artefact.published, _trained_cells(standing)
    blocks: list[Block] = []
    names_in_table = set[str]()
    if isinstance(published, PrintedTable):
        blocks.append(_printed(published, trained))
        names_in_table = {*published.names.values(), *published.rows}
    listed = [name for name in dict.fromkeys([*published, *trained]) if name not in names_in_table]
    if listed:
        table = _listed(listed, published, trained)
        folded = not trained and len(listed) > MOST_VALUES
        blocks.append(Details(count(len(listed), "published value"), [table]) if folded else table)
    title = "Published and measured" if trained else "Published"
    return Section(title, blocks, "published", standing.artefact.paper)


def _listed(
    names: Sequence[str], published: Mapping[str, float | str], trained: Mapping[str, TrainedCell]
) -> PageTable:
    """Published values by name; beside them, if anything was trained, what was measured."""
    header = ["", "published"]
    if trained:
        header += [_heading(trained), phrases.SEEDS, "trained"]
    rows = []
    for name in names:
        row = [Cell(name), Cell(number_cell(published.get(name)))]
        cell = trained.get(name)
        if cell is not None:
            row += [Cell(cell.score), Cell(cell.seeds), Cell(cell.trained)]
        elif trained:
            row += [Cell("–")] * 3
        rows.append(row)
    return PageTable(header, rows, text_columns=len(header))


def _heading(trained: Mapping[str, TrainedCell]) -> str:
    """The heading of a column of scores; all cells of a table have one metric."""
    metric = next((cell.metric for cell in trained.values()), "")
    return f"here, {metric} [95%]"


def _printed(published: PrintedTable, trained: Mapping[str, TrainedCell]) -> PageTable:
    """The paper's table as it was printed, with what was measured here in the places that it belongs to.

    What was trained has a name, and the name says where it stands. With the rows ``pre`` and ``post``, and
    the columns ``accuracy`` and ``F1``:

        |      | accuracy       | F1   | here      |
        | pre  | 29.1           | 55.0 | 28.7; ... |    "pre" is measured as a whole: a column at the end
        | post | 27.3           | 53.2 | –         |
        |      | here 26.9; ... |      |           |    "accuracy post" is one cell: below the published value
    """
    has_rows = any(row in trained for row in published.rows)
    header = ["", *published.columns]
    if has_rows:
        header.append(_heading(trained))
    rows = []
    for row in published.rows:
        cells = [Cell(row)]
        for column in published.columns:
            name = published.names[column, row]
            small = f"here {_in_short(trained[name])}" if name in trained else ""
            cells.append(Cell(number_cell(published.get(name)), small=small))
        if has_rows:
            cells.append(Cell(_in_short(trained[row]) if row in trained else "–"))
        rows.append(cells)
    return PageTable(header, rows, text_columns=len(header))


def _in_short(cell: TrainedCell) -> str:
    return f"{cell.score}; {cell.trained} trained"


def _tables(reproduction: Reproduction) -> Section:
    blocks = [rows_table(name, list(rows)) for name, rows in reproduction.tables.items() if rows]
    measures = [
        [Cell(name.replace("_", " ")), Cell(phrases.estimated(estimate))]
        for name, estimate in reproduction.measures.items()
    ]
    if measures:
        table = PageTable(("measure", "value [95%]"), measures, text_columns=2)
        blocks.append(Details("Every measure", [table]))
    return Section("Tables", blocks, "tables", "Every number behind the charts and the findings.")


def _how(standing: ArtefactStatus) -> Section:
    """The settings of the study, and the facts about its measurement."""
    artefact, scale = standing.artefact, standing.scale
    facts: dict[str, str] = {}
    blocks: list[Block] = []
    if artefact.study:
        blocks.append(Code(phrases.command(artefact, scale)))
        facts["study"] = artefact.study_name
        settings = artefact.settings_at(scale)
        facts |= {name: _in_words(value) for name, value in settings.items() if name != "measures"}
    if scale in artefact.trainings:
        facts["scale"] = scale
    if standing.found is not None:
        facts |= standing.found.facts
    rows = [[Cell(name.replace("_", " ")), Cell(value)] for name, value in facts.items()]
    blocks.append(PageTable(("", ""), rows, text_columns=2))
    return Section("How", blocks, "how")


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(inner)}" for name, inner in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value))
    return str(value)

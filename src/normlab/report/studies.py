"""The charts of a diagnosis, a section for each study, and its tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from markupsafe import Markup

from normlab.base.chart import Drawing, HeatMap
from normlab.base.units import count
from normlab.errors import UserError
from normlab.report.drawings import DrawnTables, draw, in_words
from normlab.report.page import Block, Columns, Details, Row, Section, Text, anchor, table_of
from normlab.report.results.diagnosis import DiagnosisResult, StudyResult

ROWS: Final = 400
"""A table on the page has at most so many rows; the file beside it holds all."""


def rows_table(name: str, rows: Sequence[Row]) -> Details:
    """A table that is shown on request, with columns of words to the left of numbers."""
    blocks: list[Block] = []
    if len(rows) > ROWS:
        cut = f"The first {ROWS} of {len(rows):,} rows; the JSON file beside this page holds all."
        blocks.append(Text(cut, "note"))
    headings = {column: column.replace("_", " ") for column in rows[0]}
    blocks.append(table_of(in_words(rows, headings), ROWS))
    summary = Markup("{} <span class=note>{}</span>").format(name.replace("_", " "), count(len(rows), "row"))
    return Details(summary, blocks, f"table-{anchor(name)}")


def folded(rows: Sequence[Row]) -> list[Row]:
    """Merge rows that differ only in their layer, their index and the numbers in paths."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        common = tuple(_template(value) for name, value in row.items() if name not in COUNTED)
        groups.setdefault(common, []).append(row)
    return [
        {name: _together([row[name] for row in group], name) for name in group[0]}
        for group in groups.values()
    ]


COUNTED: Final = ("index", "layer")
"""Columns that number the sublayers and layers of a stack."""


def _template(value: Any) -> Any:
    """Return a path with a star for each number; other values as they are."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", value) if isinstance(value, str) else value


def _together(values: Sequence[Any], name: str) -> Any:
    """Return the value of a group of rows: a range, or the template of their paths."""
    if len(set(values)) == 1:
        return values[0]
    return f"{min(values)} to {max(values)}" if name in COUNTED else _template(values[0])


def study_sections(result: DiagnosisResult) -> Iterator[Section]:
    """Yield a section for each study whose charts have something to show."""
    tables = drawn_tables(result)
    for study in result.studies:
        blocks: list[Block] = []
        for chart in _measured(result, study):
            try:
                blocks += draw(chart, tables)
            except UserError as error:  # a study of the user's own whose charts do not fit its tables
                blocks.append(Text(str(error), "alarm"))
        if blocks:
            title = study.title or study.name.replace("_", " ")
            yield Section(title, [Columns(blocks)], study.name, study.intro)


def drawn_tables(result: DiagnosisResult) -> DrawnTables:
    """The tables of a diagnosis, as its charts need them."""
    return DrawnTables(result.tables, result.stacks)


def _measured(result: DiagnosisResult, study: StudyResult) -> list[Drawing]:
    """Return the charts that a study declares, if their tables hold rows."""
    return [chart for chart in study.charts if result.tables.get(chart.table)]


def tables_shown_whole(result: DiagnosisResult) -> set[str]:
    """Return the tables that a chart shows whole, so that the page need not repeat their rows."""
    charts = [chart for study in result.studies for chart in _measured(result, study)]
    return {chart.table for chart in charts if isinstance(chart, HeatMap)}

"""The charts of a diagnosis, drawn from its tables in the way that its studies describe.

What draws is imported when a chart is drawn: it needs packages that are optional.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from normlab.base.chart import ByDepth, Growth, HeatMap, Lines, Strips, StudyChart
from normlab.base.io import NOT_FINITE
from normlab.base.units import count
from normlab.report.page import Block, Chart, Columns, Details, Row, Section, Text, anchor, labelled, table_of
from normlab.report.results.diagnosis import DiagnosisResult, StudyResult

if TYPE_CHECKING:
    from normlab.report.charts.drawing import Drawn

ROLES: Final = {
    "self_attention": "self-attention",
    "cross_attention": "cross-attention",
    "ffn": "feed-forward",
    "branch": "branch",
}
"""The roles of sublayers in words, in the order of their colours."""


class DiagnosisView:
    """The tables of a diagnosis, with the role and the place of each sublayer in words."""

    def __init__(self, result: DiagnosisResult) -> None:
        self.tables = result.tables
        self.stacks = result.stacks
        self.studies = result.studies

    @cached_property
    def sublayers(self) -> dict[tuple[str, int | None], Row]:
        """The row of each sublayer by its stack and index; a stack's input, without an index, has none."""
        return {(row["stack"], row["index"]): row for row in self.tables.get("structure", ())}

    @cached_property
    def layers(self) -> dict[tuple[str, int], list[int]]:
        """The sublayers of each layer, by their index."""
        layers: dict[tuple[str, int], list[int]] = {}
        for row in self.tables.get("structure", ()):
            layers.setdefault((row["stack"], row["layer"]), []).append(row["index"])
        return layers

    @cached_property
    def roles(self) -> list[str]:
        """The roles that occur, in words."""
        present = {row["role"] for row in self.sublayers.values()}
        return [words for role, words in ROLES.items() if role in present]

    def charts(self, study: StudyResult) -> list[StudyChart]:
        """Return the charts that a study describes, if their tables hold rows."""
        return [chart for chart in study.charts if self.tables.get(chart.table)]

    def by_stack(self, table: str) -> Iterator[tuple[str, list[Row]]]:
        """Yield the label of each stack that has rows in a table, with these rows."""
        for stack, label in self.stacks.items():
            rows = [row for row in self.tables.get(table, ()) if row.get("stack") == stack]
            if rows:
                yield label, rows

    def place(self, row: Row) -> dict[str, Any]:
        """Return a row's ``depth``, its module, and its role as ``recipe``. The depth is the layer; a layer's
        sublayers stand between it and the next; the stack's input stands half a layer before the first.
        """
        sublayer = self.sublayers.get((row["stack"], row.get("index")))
        if sublayer is None:
            return {"depth": -0.5, "module": row["stack"], "recipe": "the input"}
        indices = self.layers[sublayer["stack"], sublayer["layer"]]
        depth = sublayer["layer"] + indices.index(sublayer["index"]) / len(indices)
        role = ROLES.get(sublayer["role"], sublayer["role"])
        return {"depth": depth, "module": sublayer.get("module", sublayer["stack"]), "recipe": role}


ROWS: Final = 400
"""A table on the page has at most so many rows; the file beside it holds all."""


def rows_table(name: str, rows: Sequence[Row]) -> Details:
    """A table that is shown on request, with columns of words to the left of numbers."""
    blocks: list[Block] = []
    if len(rows) > ROWS:
        cut = f"The first {ROWS} of {len(rows):,} rows; the JSON file beside this page holds all."
        blocks.append(Text(cut, "note"))
    headings = {column: column.replace("_", " ") for column in rows[0]}
    blocks.append(table_of(_in_words(rows, headings), ROWS))
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


def pictures(view: DiagnosisView) -> Iterator[Section]:
    """Yield a section for each study whose charts have something to show."""
    for study in view.studies:
        charts: list[Chart] = []
        for chart in view.charts(study):
            charts += DRAW[type(chart)](view, chart)
        if charts:
            title = study.title or study.name.replace("_", " ")
            yield Section(title, [Columns(charts)], study.name, study.intro)


def pictured(view: DiagnosisView) -> set[str]:
    """Return the tables that a chart shows whole, so that the page need not repeat their rows."""
    charts = [chart for study in view.studies for chart in view.charts(study)]
    return {chart.table for chart in charts if isinstance(chart, HeatMap)}


def _by_depth(view: DiagnosisView, chart: ByDepth) -> list[Chart]:
    """A chart per stack, all with one vertical axis."""
    stacks = {label: [*_points(view, chart, rows)] for label, rows in view.by_stack(chart.table)}
    ends = _ends(chart, [point[chart.y] for points in stacks.values() for point in points])
    if ends is None:
        return []

    def draw(points: Sequence[Row]) -> Drawn:
        from normlab.report.charts.diagnosis import by_depth
        from normlab.report.charts.drawing import frame

        return by_depth(frame(points), chart, view.roles, ends)

    name = f"{chart.table}-{chart.y}"
    return [
        _chart(name, chart, draw, points, _in_words(points, _words_by_depth(points, chart)), label)
        for label, points in stacks.items()
        if points
    ]


def _ends(chart: ByDepth, values: Sequence[Any]) -> tuple[float, float] | None:
    """Return the ends of the vertical axis, with some room; None if no value can be drawn."""
    drawn = []
    for value in values:
        number = _number(value)
        if number is not None and math.isfinite(number) and (number > 0 or not chart.log):
            drawn.append(number)
    if not drawn:
        return None
    low, high = min(drawn), max(drawn)
    if chart.log:
        return low / 1.4, high * 1.4
    foot = min(0.0, low)
    return foot, high + 0.05 * (high - foot or 1.0)


def _words_by_depth(points: Sequence[Row], chart: ByDepth) -> dict[str, str]:
    """The columns of a table of sublayers; those of theory only where it expects anything."""
    words = {"module": "module", "recipe": "role", chart.y: chart.axis}
    for name in ("theory", "theory_low", "theory_high"):
        if any(point.get(name) is not None for point in points):
            words[name] = name.replace("_", " ")
    return words


def _chart(
    name: str,
    chart: StudyChart,
    draw: Callable[[Sequence[Row]], Drawn],
    points: Sequence[Row],
    rows: Sequence[Row],
    label: str = "",
) -> Chart:
    """The chart that ``draw`` draws of these points; ``rows`` are the same for a table."""
    return labelled(Chart(name, chart.title, chart.caption, lambda _: draw(points), rows), label)


def _in_words(rows: Sequence[Row], words: Mapping[str, str]) -> list[Row]:
    """The columns that ``words`` names, under their headings."""
    return [{heading: row[name] for name, heading in words.items()} for row in rows]


def _number(value: Any) -> float | None:
    """A number of a table, in which those that are not finite are words; None where there is none."""
    is_number = isinstance(value, int | float) or value in NOT_FINITE
    return float(value) if is_number else None


def _points(view: DiagnosisView, chart: ByDepth, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the points of one stack: the columns that are drawn, under the names that its chart reads."""
    rows = [row for row in rows if all(row.get(column) == value for column, value in chart.where.items())]
    if chart.sum_squares:
        rows = _rooted(rows, chart.y)
    # Vega would take a column named signal for one of its own signals
    columns = dict(zip(("theory", "theory_low", "theory_high"), (chart.theory, *chart.bounds), strict=False))
    for row in rows:
        expected = {name: row[column] for name, column in columns.items() if column in row}
        yield {**view.place(row), **expected, chart.y: row[chart.y]}


def _rooted(rows: Sequence[Row], column: str) -> list[Row]:
    """Return a row for each sublayer, with the root of the sum of the squares of its rows' values."""
    squares: dict[int, float] = {}
    for row in rows:
        index, value = row["index"], row[column]
        if index is not None and isinstance(value, float):
            squares[index] = squares.get(index, 0.0) + value**2
    return [{"stack": rows[0]["stack"], "index": index, column: sum_**0.5} for index, sum_ in squares.items()]


def _heat_map(view: DiagnosisView, chart: HeatMap) -> Iterator[Chart]:
    def draw(rows: Sequence[Row]) -> Drawn:
        from normlab.report.charts.diagnosis import heat_map
        from normlab.report.charts.drawing import frame

        return heat_map(frame(rows).rename({chart.x: "on", chart.y: "of", chart.value: "value"}), chart)

    for label, rows in view.by_stack(chart.table):
        yield _chart(chart.table, chart, draw, rows, _matrix(rows, chart), label)


def _matrix(rows: Sequence[Row], chart: HeatMap) -> list[Row]:
    """A row per sublayer, a column per branch."""
    branches = sorted({row[chart.x] for row in rows})
    shares: dict[int, dict[int, Any]] = {}
    for row in rows:
        shares.setdefault(row[chart.y], {})[row[chart.x]] = row[chart.value]
    headings = {branch: "input" if branch < 0 else f"{chart.x} {branch}" for branch in branches}
    return [
        {chart.y: sublayer, **{headings[branch]: of.get(branch) for branch in branches}}
        for sublayer, of in shares.items()
    ]


def _growth(view: DiagnosisView, chart: Growth) -> Iterator[Chart]:
    def named(row: Row, kind: str) -> Row:
        return {**row, "recipe": chart.words.get(kind, kind)}

    for label, rows in view.by_stack(chart.table):
        points = [named(row, row["kind"]) for row in rows]
        laws: list[Row] = []
        for fit in view.tables.get(chart.fits, ()):
            if fit.get("stack") == rows[0]["stack"]:
                laws += [named(point, fit["kind"]) for point in _law(fit, rows)]

        def draw(points: Sequence[Row], laws: Sequence[Row] = laws) -> Drawn:
            import polars as pl

            from normlab.report.charts.diagnosis import growth
            from normlab.report.charts.drawing import frame

            schema = {"recipe": pl.String, "law": pl.String, "depth": pl.Int64, "value": pl.Float64}
            return growth(frame(points), pl.DataFrame(laws, schema=schema))

        words = {"recipe": "changed", "seed": "seed", "depth": "sublayers N", "change": "mean square change"}
        yield _chart(chart.table, chart, draw, points, _in_words(points, words), label)


def _law(fit: Row, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield points on a fitted law; a line in N or log N goes through the means."""
    laws = {"log": math.log, "linear": float}
    changes = [row for row in rows if row["kind"] == fit["kind"] and isinstance(row["change"], float)]
    depths, slope = sorted({row["depth"] for row in changes}), fit["coefficient"]
    if not depths or not isinstance(slope, float):
        return
    if fit["law"] in laws:
        law = laws[fit["law"]]
        start = sum(row["change"] - slope * law(row["depth"]) for row in changes) / len(changes)
        values = [start + slope * law(depth) for depth in depths]
    elif isinstance(fit["exponent"], float):
        values = [slope * depth ** fit["exponent"] for depth in depths]
    else:
        return
    for depth, value in zip(depths, values, strict=True):
        yield {"law": fit["law"], "depth": depth, "value": value}


def _strips(view: DiagnosisView, chart: Strips) -> list[Chart]:
    ticks = []
    for row in view.tables[chart.table]:
        label, category = row[chart.label], str(row[chart.category]).replace("_", "-")
        if chart.without and str(label).endswith(chart.without):
            continue
        for quantity, column in chart.quantities.items():
            ticks.append({"category": category, "what": quantity, "label": label, "value": row[column]})
    if not ticks:
        return []

    def draw(ticks: Sequence[Row]) -> Drawn:
        from normlab.report.charts.diagnosis import strips
        from normlab.report.charts.drawing import frame

        return strips(frame(ticks), chart)

    words = {"category": chart.category, "what": "quantity", "label": chart.label, "value": chart.axis}
    return [_chart(chart.table, chart, draw, ticks, _in_words(ticks, words))]


def _lines(view: DiagnosisView, chart: Lines) -> list[Chart]:
    columns = {"x": chart.x, "y": chart.y}
    words = {"x": chart.x_axis, "y": chart.y_axis}
    if chart.group:
        columns["group"] = words["group"] = chart.group
    points = [{name: row[column] for name, column in columns.items()} for row in view.tables[chart.table]]

    def draw(points: Sequence[Row]) -> Drawn:
        from normlab.report.charts.diagnosis import lines
        from normlab.report.charts.drawing import frame

        return lines(frame(points), chart)

    return [_chart(f"{chart.table}-{chart.y}", chart, draw, points, _in_words(points, words))]


DRAW: Final[Mapping[type[StudyChart], Callable[[DiagnosisView, Any], Iterable[Chart]]]] = {
    ByDepth: _by_depth,
    HeatMap: _heat_map,
    Growth: _growth,
    Strips: _strips,
    Lines: _lines,
}

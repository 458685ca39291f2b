"""``draw`` makes the charts that studies, papers and pages declare as data.

Each kind of ``normlab.base.chart`` has a function here, registered by ``draws``; a kind from outside the
package registers its function in the same way. It turns rows into points, which are a table where no
chart can be drawn. What draws is imported when a chart is drawn: it needs packages that are optional.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

from normlab.base.chart import Bars, ByDepth, BySteps, Cells, Drawing, Growth, HeatMap, Lines, Strips
from normlab.base.io import NOT_FINITE
from normlab.errors import UserError
from normlab.report.charts.theme import SERIES
from normlab.report.page import Chart, Row, labelled

if TYPE_CHECKING:
    from normlab.report.charts.drawing import Drawn

ROLES: Final = {
    "self_attention": "self-attention",
    "cross_attention": "cross-attention",
    "ffn": "feed-forward",
    "branch": "branch",
}
"""The roles of sublayers in words, in the order of their colours."""


@dataclass(frozen=True)
class DrawnTables:
    """The tables that a page draws, and the words for what is in them."""

    tables: Mapping[str, Sequence[Row]]
    stacks: Mapping[str, str]
    """The label of each stack by its name; empty if rows belong to no stack."""
    legend: Sequence[str] = ()
    """What has a colour in the legend of the page, other than roles."""

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

    def by_stack(self, table: str) -> Iterator[tuple[str, list[Row]]]:
        """Yield the label of each stack that has rows in a table, with these rows."""
        for stack, label in self.stacks.items():
            rows = [row for row in self.tables.get(table, ()) if row.get("stack") == stack]
            if rows:
                yield label, rows

    def place(self, row: Row) -> dict[str, Any]:
        """Return a row's ``depth``, its module, and its role as its series.

        The depth is the layer, and a layer's sublayers stand between it and the next: of two in layer 3, the
        first stands at 3 and the second at 3.5. The stack's input stands half a layer before the first.
        """
        sublayer = self.sublayers.get((row["stack"], row.get("index")))
        if sublayer is None:
            return {"depth": -0.5, "module": row["stack"], SERIES: "the input"}
        indices = self.layers[sublayer["stack"], sublayer["layer"]]
        depth = sublayer["layer"] + indices.index(sublayer["index"]) / len(indices)
        role = ROLES.get(sublayer["role"], sublayer["role"])
        return {"depth": depth, "module": sublayer.get("module", sublayer["stack"]), SERIES: role}


Draw = Callable[[Any, DrawnTables, str], Iterable[Chart]]
"""Makes the charts of a drawing from the tables of its page, with names that begin with the given one."""
F = TypeVar("F", bound=Draw)

DRAW: Final[dict[type[Drawing], Draw]] = {}
"""What draws each kind."""


def draws(*kinds: type[Drawing]) -> Callable[[F], F]:
    """Register the decorated function as what draws the charts of these kinds."""

    def register(function: F) -> F:
        for kind in kinds:
            DRAW[kind] = function
        return function

    return register


def draw(drawing: Drawing, tables: DrawnTables, name: str = "") -> list[Chart]:
    """Return the charts of a drawing: one, or one for each stack or panel; none if there is nothing to draw.

    Args:
        drawing: what is shown.
        tables: the tables of the page, of which the drawing shows one.
        name: what the names of the charts begin with; the drawing's own name unless it is given.

    Raises:
        UserError: the page has no such table, or the table lacks a column, or nothing draws this kind.
    """
    rows = tables.tables.get(drawing.table)
    if rows is None:
        present = ", ".join(tables.tables)
        raise UserError(f"{drawing.title}: the result has no table {drawing.table!r} but {present}.")
    if not rows:
        return []
    missing = [column for column in drawing.columns if column not in rows[0]]
    if missing:
        raise UserError(
            f"the drawing {drawing.title!r} needs {', '.join(missing)} of the table {drawing.table!r}, which "
            f"has {', '.join(rows[0])}; name one of these"
        )
    if type(drawing) not in DRAW:
        kind = type(drawing).__name__
        raise UserError(f"nothing draws a {kind}; decorate a function with @draws({kind})")
    return list(DRAW[type(drawing)](drawing, tables, name or drawing.name))


def groups_of(drawing: Drawing, rows: Sequence[Row]) -> list[str]:
    """Return the groups of a drawing that have a colour each, in words and in the table's order."""
    group = getattr(drawing, "group", "")
    if not group or not rows or group not in rows[0]:
        return []
    return list(dict.fromkeys(filter(None, _named(group, [row[group] for row in rows]))))


def in_words(rows: Sequence[Row], words: Mapping[str, str]) -> list[Row]:
    """The columns that ``words`` names, under their headings."""
    return [{heading: row[name] for name, heading in words.items()} for row in rows]


def _chart(
    name: str,
    drawing: Drawing,
    picture: Callable[[Sequence[Row]], Drawn],
    points: Sequence[Row],
    rows: Sequence[Row],
    label: str = "",
) -> Chart:
    """The chart of these points; ``rows`` are the same for a table."""
    return labelled(Chart(name, drawing.title, drawing.caption, lambda _: picture(points), rows), label)


def _number(value: Any) -> float | None:
    """A number of a table, in which those that are not finite are words; None where there is none."""
    is_number = isinstance(value, int | float) or value in NOT_FINITE
    return float(value) if is_number else None


def _has_place(value: Any, *, log: bool) -> bool:
    """Whether a number can be drawn: it is finite and, on a logarithmic axis, above 0."""
    number = _number(value)
    return number is not None and math.isfinite(number) and (number > 0 or not log)


# -------------------------------------------------------------------------------- columns of any table

LOW, HIGH = "low", "high"
"""Columns of an interval, which is drawn if it encloses the measured value in every row."""


def _named(column: str, values: Sequence[Any]) -> list[str | None]:
    """Return the values of a column in words: numbers with its name, such as ``d_ff 512``."""
    known = [value for value in values if value is not None]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        return [None if value is None else str(value) for value in values]
    return [None if value is None else f"{column} {value}" for value in values]


def _points(drawing: Lines | Bars | Cells, rows: Sequence[Row]) -> list[Row]:
    """Return the points of a drawing under the names of their channels, without those that have no place."""
    channels = {"x": drawing.x, "y": drawing.y}
    if isinstance(drawing, Cells):
        channels["shade"] = drawing.value
    else:
        channels |= {"lower": LOW, "upper": HIGH}
    if isinstance(drawing, Lines) and drawing.theory:
        channels["theory"] = drawing.theory
    present = {channel: column for channel, column in channels.items() if column in rows[0]}
    groups = _words_for_each(getattr(drawing, "group", ""), rows)
    panels = [panel or "" for panel in _words_for_each(drawing.panel, rows)]
    points = []
    for row, group, panel in zip(rows, groups, panels, strict=True):
        columns = {channel: row[column] for channel, column in present.items()}
        points.append({**columns, SERIES: group, "panel": panel})
    are_numbers = all(_number(point["x"]) is not None for point in points)
    return [point for point in points if _is_drawn(drawing, point, numeric_x=are_numbers)]


def _words_for_each(column: str, rows: Sequence[Row]) -> Sequence[str | None]:
    return _named(column, [row[column] for row in rows]) if column else [""] * len(rows)


def _is_drawn(drawing: Lines | Bars | Cells, point: Row, *, numeric_x: bool) -> bool:
    if isinstance(drawing, Cells):
        return _has_place(point["shade"], log=False)
    if isinstance(drawing, Lines) and numeric_x and not _has_place(point["x"], log=drawing.log_x):
        return False
    return _has_place(point["y"], log=drawing.log_y)


@draws(Lines, Bars, Cells)
def _of_columns(drawing: Lines | Bars | Cells, tables: DrawnTables, name: str) -> Iterator[Chart]:
    """A chart for each panel, all on one scale; without a panel a single one."""
    points = _points(drawing, tables.tables[drawing.table])
    if not drawing.caption:
        drawing = replace(drawing, caption=_caption(drawing))

    @cache
    def drawn_panels() -> Mapping[str, Drawn]:
        from normlab.report.charts.columns import panels
        from normlab.report.charts.drawing import frame

        return panels(drawing, frame(points), tables.legend)

    words = _headings(drawing, points)
    for panel in dict.fromkeys(point["panel"] for point in points):
        inside = [point for point in points if point["panel"] == panel]

        def picture(_: Sequence[Row], panel: str = panel) -> Drawn:
            return drawn_panels()[panel]

        yield _chart(name, drawing, picture, inside, in_words(inside, words), panel)
    if not points:
        yield _chart(name, drawing, _nothing, (), ())


def _headings(drawing: Lines | Bars | Cells, points: Sequence[Row]) -> dict[str, str]:
    """The headings of the columns of a drawing's points, where they are a table."""
    words = {"x": drawing.x_axis or drawing.x, "y": drawing.y_axis or drawing.y}
    if isinstance(drawing, Cells):
        return words | {"shade": drawing.value.replace("_", " ")}
    if drawing.group:
        words = {SERIES: drawing.group.replace("_", " "), **words}
    optional = {"lower": "low", "upper": "high", "theory": "theory"}
    return words | {name: heading for name, heading in optional.items() if points and name in points[0]}


def _caption(drawing: Lines | Bars | Cells) -> str:
    """What a chart needs to be understood and its declaration does not say in words."""
    if isinstance(drawing, Cells):
        return f"Shade: {drawing.value.replace('_', ' ')}."
    return "Dashed line: theory." if isinstance(drawing, Lines) and drawing.theory else ""


def _nothing(_: Sequence[Row]) -> Drawn:
    from normlab.report.charts.columns import HEIGHT
    from normlab.report.charts.drawing import finish

    return finish([], HEIGHT)


# ------------------------------------------------------------------------- columns of sublayers and steps


@draws(ByDepth)
def _by_depth(drawing: ByDepth, tables: DrawnTables, name: str) -> list[Chart]:
    """A chart per stack, all with one vertical axis."""
    stacks = {
        label: [*_points_by_depth(tables, drawing, rows)] for label, rows in tables.by_stack(drawing.table)
    }
    ends = _ends(drawing, [point[drawing.y] for points in stacks.values() for point in points])
    if ends is None:
        return []

    def picture(points: Sequence[Row]) -> Drawn:
        from normlab.report.charts.diagnosis import by_depth
        from normlab.report.charts.drawing import frame

        return by_depth(frame(points), drawing, tables.roles, ends)

    return [
        _chart(name, drawing, picture, points, in_words(points, _words_by_depth(points, drawing)), label)
        for label, points in stacks.items()
        if points
    ]


def _ends(drawing: ByDepth, values: Sequence[Any]) -> tuple[float, float] | None:
    """Return the ends of the vertical axis, with some room; None if no value can be drawn."""
    drawn = []
    for value in values:
        if _has_place(value, log=drawing.log):
            drawn.append(float(value))
    if not drawn:
        return None
    low, high = min(drawn), max(drawn)
    if drawing.log:
        return low / 1.4, high * 1.4
    foot = min(0.0, low)
    return foot, high + 0.05 * (high - foot or 1.0)


def _words_by_depth(points: Sequence[Row], drawing: ByDepth) -> dict[str, str]:
    """The columns of a table of sublayers; those of theory only where it expects anything."""
    words = {"module": "module", SERIES: "role", drawing.y: drawing.axis}
    for name in ("theory", "theory_low", "theory_high"):
        if any(point.get(name) is not None for point in points):
            words[name] = name.replace("_", " ")
    return words


def _points_by_depth(tables: DrawnTables, drawing: ByDepth, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the points of one stack: the columns that are drawn, under the names that its chart reads.

    Other columns are left out, because Vega would take one named ``signal``, as tables of a diagnosis have
    it, for a signal of its own. What theory expects may have any name in the table; the chart reads it as
    ``theory``, ``theory_low`` and ``theory_high``.
    """
    rows = [row for row in rows if all(row.get(column) == value for column, value in drawing.where.items())]
    if drawing.sum_squares:
        rows = _root_sum_squares(rows, drawing.y)
    column_of = {"theory": drawing.theory}
    bounds = zip(("theory_low", "theory_high"), drawing.bounds, strict=False)  # there may be none
    column_of |= bounds
    for row in rows:
        expected = {name: row[column] for name, column in column_of.items() if column in row}
        yield {**tables.place(row), **expected, drawing.y: row[drawing.y]}


def _root_sum_squares(rows: Sequence[Row], column: str) -> list[Row]:
    """Return a row for each sublayer, with the root of the sum of the squares of its rows' values."""
    squares: dict[int, float] = {}
    for row in rows:
        index, value = row["index"], row[column]
        if index is not None and isinstance(value, float):
            squares[index] = squares.get(index, 0.0) + value**2
    return [{"stack": rows[0]["stack"], "index": index, column: sum_**0.5} for index, sum_ in squares.items()]


@draws(HeatMap)
def _heat_map(drawing: HeatMap, tables: DrawnTables, name: str) -> Iterator[Chart]:
    def picture(rows: Sequence[Row]) -> Drawn:
        from normlab.report.charts.diagnosis import heat_map
        from normlab.report.charts.drawing import frame

        return heat_map(
            frame(rows).rename({drawing.x: "on", drawing.y: "of", drawing.value: "value"}), drawing
        )

    for label, rows in tables.by_stack(drawing.table):
        yield _chart(name, drawing, picture, rows, _matrix(rows, drawing), label)


def _matrix(rows: Sequence[Row], drawing: HeatMap) -> list[Row]:
    """A row per sublayer, a column per branch."""
    branches = sorted({row[drawing.x] for row in rows})
    shares: dict[int, dict[int, Any]] = {}
    for row in rows:
        shares.setdefault(row[drawing.y], {})[row[drawing.x]] = row[drawing.value]
    headings = {branch: "input" if branch < 0 else f"{drawing.x} {branch}" for branch in branches}
    return [
        {drawing.y: sublayer, **{headings[branch]: of.get(branch) for branch in branches}}
        for sublayer, of in shares.items()
    ]


@draws(Growth)
def _growth(drawing: Growth, tables: DrawnTables, name: str) -> Iterator[Chart]:
    for label, rows in tables.by_stack(drawing.table):
        stack = rows[0]["stack"]
        fits = [fit for fit in tables.tables.get(drawing.fits, ()) if fit.get("stack") == stack]
        yield _growth_of_stack(drawing, rows, fits, name, label)


def _growth_of_stack(
    drawing: Growth, rows: Sequence[Row], fits: Sequence[Row], name: str, label: str
) -> Chart:
    """The chart of a stack: a series for each kind of change, with the laws that were fitted to it."""

    def of_kind(kind: str, point: Row) -> Row:
        return {**point, SERIES: drawing.words.get(kind, kind)}

    measured = [of_kind(row["kind"], row) for row in rows]
    points_on_laws = [of_kind(fit["kind"], point) for fit in fits for point in _on_law(fit, rows)]

    def picture(points: Sequence[Row]) -> Drawn:
        import polars as pl

        from normlab.report.charts.diagnosis import growth
        from normlab.report.charts.drawing import frame

        schema = {SERIES: pl.String, "law": pl.String, "depth": pl.Int64, "value": pl.Float64}
        return growth(frame(points), pl.DataFrame(points_on_laws, schema=schema))

    words = {SERIES: "changed", "seed": "seed", "depth": "sublayers N", "change": "mean square change"}
    return _chart(name, drawing, picture, measured, in_words(measured, words), label)


STRAIGHT_IN: Final[Mapping[str, Callable[[float], float]]] = {"log": math.log, "linear": float}
"""Laws that are a straight line in a function of the depth N: in log N, or in N itself."""


def _on_law(fit: Row, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield a point on a fitted law at every depth where its kind of change was measured.

    With the coefficient c and the exponent p of the fit, the change y at depth N is

        y(N) = a + c f(N)    "log" and "linear", with f of ``STRAIGHT_IN``
        y(N) = c N^p         "power"

    The intercept a is not kept with a fit. It is the mean of y - c f(N) over what was measured, so that the
    line goes through the means of y and f(N), as a least-squares line does. A fit without numbers yields no
    point.
    """
    changes = [row for row in rows if row["kind"] == fit["kind"] and isinstance(row["change"], float)]
    depths = sorted({row["depth"] for row in changes})
    coefficient = fit["coefficient"]
    if not depths or not isinstance(coefficient, float):
        return
    if fit["law"] in STRAIGHT_IN:
        f = STRAIGHT_IN[fit["law"]]
        intercept = sum(row["change"] - coefficient * f(row["depth"]) for row in changes) / len(changes)
        values = [intercept + coefficient * f(depth) for depth in depths]
    elif isinstance(fit["exponent"], float):
        values = [coefficient * depth ** fit["exponent"] for depth in depths]
    else:
        return
    for depth, value in zip(depths, values, strict=True):
        yield {"law": fit["law"], "depth": depth, "value": value}


@draws(Strips)
def _strips(drawing: Strips, tables: DrawnTables, name: str) -> list[Chart]:
    ticks = []
    for row in tables.tables[drawing.table]:
        label, category = row[drawing.label], str(row[drawing.category]).replace("_", "-")
        if drawing.without and str(label).endswith(drawing.without):
            continue
        for quantity, column in drawing.quantities.items():
            ticks.append({"category": category, "what": quantity, "label": label, "value": row[column]})
    if not ticks:
        return []

    def picture(ticks: Sequence[Row]) -> Drawn:
        from normlab.report.charts.diagnosis import strips
        from normlab.report.charts.drawing import frame

        return strips(frame(ticks), drawing)

    words = {"category": drawing.category, "what": "quantity", "label": drawing.label, "value": drawing.axis}
    return [_chart(name, drawing, picture, ticks, in_words(ticks, words))]


@draws(BySteps)
def _by_steps(drawing: BySteps, tables: DrawnTables, name: str) -> Iterator[Chart]:
    def picture(points: Sequence[Row]) -> Drawn:
        from normlab.report.charts.drawing import frame
        from normlab.report.charts.probes import probe_by_step

        return probe_by_step(frame(points), drawing.axis, log=drawing.log)

    for label, rows in tables.by_stack(drawing.table):
        points = [_in_a_step(row) for row in rows]
        yield _chart(name, drawing, picture, points, _a_row_per_step(points, drawing.axis), label)


def _in_a_step(row: Row) -> Row:
    """A point of a chart: the value of a module in a step; lines are shaded by ``depth``."""
    module = str(row["module"])
    if row.get("role"):
        module += f" ({row['role'].replace('_', '-')} of layer {row.get('layer')})"
    return {"step": int(row["step"]), "module": module, "depth": row["index"], "value": float(row["value"])}


def _a_row_per_step(points: Sequence[Row], axis: str) -> list[Row]:
    """The values of all modules, a row per step; what belongs to no module has the name of the axis.

    A step may have measured a module several times, once per micro-batch: the mean stands for them, as in the
    chart.
    """
    modules = list(dict.fromkeys(point["module"] for point in points))
    # a path is short enough for a heading, but a module that serves several layers has one path for all
    headings = [module.partition(" (")[0] or axis for module in modules]
    if len(set(headings)) < len(modules):
        headings = [module or axis for module in modules]
    measured: dict[int, dict[str, list[float]]] = {}
    for point in points:
        measured.setdefault(point["step"], {}).setdefault(point["module"], []).append(point["value"])
    rows: list[Row] = []
    for step, of_module in sorted(measured.items()):
        row: dict[str, Any] = {"step": step}
        for module, heading in zip(modules, headings, strict=True):
            values = of_module.get(module)
            row[heading] = sum(values) / len(values) if values else None
        rows.append(row)
    return rows

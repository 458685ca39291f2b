"""The page of a transfer: losses by rate and size, the path of the best rate, and the coordinate check.

What draws is imported when a chart is drawn: it needs packages that are optional.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from normlab.base.units import count, duration, short_rate
from normlab.report.charts.theme import SERIES
from normlab.report.page import (
    Block,
    Cell,
    Chart,
    Code,
    Columns,
    Details,
    Notes,
    Page,
    PageTable,
    Section,
    Text,
    breakable,
    capital,
    with_whole_rates,
)
from normlab.report.results.transfer import (
    BestRate,
    CoordinateCheck,
    CoordinateRow,
    Estimate,
    FittedPoint,
    RateResult,
    SizeResult,
    SweepResult,
    TransferResult,
)
from normlab.scaling import ALL

if TYPE_CHECKING:
    import polars as pl

    from normlab.report.charts.drawing import Drawn


MEANING: Final = (
    "Means over seeds at the end of the trials. Paler: some seeds were not tried, because the best rate was "
    "seen to lie elsewhere, or because the trials were cut short. A dash: no seed was tried."
)
MARKS: Final = (
    "Dots: means over seeds, with their range; hollow: over some seeds only. Thick lines: the fitted "
    "curves; diamonds: their best rates with 95% intervals. A loss above that of a model that has learnt "
    "nothing is drawn at the upper edge. Cross: ended early, as the table says."
)


def transfer_page(transfer: Mapping[str, Any]) -> Page:
    """The page of ``Transfer.to_dict()``, to which ``command`` may be added."""
    result = TransferResult.of(transfer)
    view = _View(result)
    facts = [f"{name} {value}" for name, value in result.facts.items()]
    return Page(
        title=result.title,
        headline=with_whole_rates(result.sentence),
        facts=[*facts, f"{count(result.cost.trials, 'trial')} in {duration(result.cost.seconds)}"],
        lead=f"The plan: {result.plan}.",
        blocks=list(_sections(result, view)),
        series=view.names,
        legend="Sizes",
    )


def _sections(result: TransferResult, view: _View) -> Iterator[Section]:
    first, *others = result.decays
    notes = Notes([Text(line) for line in result.lines[1:]])
    yield Section("", [*view.charts(first, 0), notes], "glance", listed=False)
    yield Section(view.title("Losses", first), [view.losses(first)], "losses", MEANING)
    if result.coordinates is not None:
        yield Section("Coordinate check", list(_check(result.coordinates)), "coordinate_check")
    if others:
        blocks = []
        for place, sweep in enumerate(others, start=1):
            inside = [*view.charts(sweep, place), view.losses(sweep)]
            blocks.append(Details(f"With {sweep.label}: {sweep.verdict}", inside))
        yield Section("Other weight decays", blocks, "other_weight_decays")
    if result.command:
        yield Section("How it was made", [Code(result.command)], "how")


class _View:
    """The tables and charts of trials. If the setup gives every size a rate of its own, rates are shown as
    multiples of it.
    """

    def __init__(self, result: TransferResult) -> None:
        self.result = result
        self.has_multiples = result.scales_itself
        self.rate_title = "rate, times the setup's own" if self.has_multiples else "learning rate"
        self.names = [self.name(size) for size in result.sizes]

    def name(self, size: int) -> str:
        return f"{self.result.axis} {size}"

    def title(self, title: str, sweep: SweepResult) -> str:
        """The title, with the weight decay if there are several."""
        return f"{title}, with {sweep.label}" if len(self.result.decays) > 1 else title

    def in_words(self, rate: float | None) -> str:
        if rate is None:
            return "–"
        return f"{rate:.2g}x" if self.has_multiples else short_rate(rate)

    def rate(self, point: RateResult | FittedPoint) -> float:
        return point.multiple if self.has_multiples else point.rate

    def estimate(self, best: BestRate) -> Estimate:
        """A best rate with its interval."""
        return best.multiple if self.has_multiples else best.rate

    # ------------------------------------------------------------------------------------------------ tables
    def losses(self, sweep: SweepResult) -> PageTable:
        """A row per rate, a column per size: the mean loss over seeds; the first row has the best rates."""
        by_size = [{self.rate(at_rate): at_rate for at_rate in size.rates} for size in sweep.sizes]
        rows = [[Cell("best rate", "with its 95% interval"), *map(self._best_cell, sweep.sizes)]]
        for rate in sorted({rate for by_rate in by_size for rate in by_rate}):
            cells = [self._loss_cell(by_rate.get(rate)) for by_rate in by_size]
            rows.append([Cell(self.in_words(rate)), *cells])
        return PageTable([self.rate_title, *self.names], rows)

    def _best_cell(self, size: SizeResult) -> Cell:
        best = self.estimate(size.best)
        if best.value is None:
            return Cell("–", "not known", tone="faint", title=size.why)
        interval = f"{self.in_words(best.low)} to {self.in_words(best.high)}"
        return Cell(self.in_words(best.value), interval, tone="best")

    def _loss_cell(self, at_rate: RateResult | None) -> Cell:
        if at_rate is None:
            return Cell("–", tone="faint", title="not tried")
        if at_rate.stopped:
            return Cell("stopped", at_rate.stopped, tone="alarm")
        losses, seeds = at_rate.known, self.result.seeds
        mean = f"{fmean(losses):.3f}"
        if len(losses) >= seeds:
            return Cell(mean)
        return Cell(mean, f"{len(losses)} of {seeds} seeds" if len(losses) > 1 else "one seed", tone="faint")

    # ------------------------------------------------------------------------------------------------ charts
    def charts(self, sweep: SweepResult, place: int) -> list[Block]:
        """The losses by rate, and the best rates by size if there are any; ``place`` is that of the sweep."""
        if not any(size.rates for size in sweep.sizes):
            return []
        charts = [self._losses_by_rate(sweep, place)]
        if len(self._optima(sweep)) > 1:
            charts.append(self._best_by_size(sweep, place))
        return [Columns(charts)]

    def _losses_by_rate(self, sweep: SweepResult, place: int) -> Chart:
        points = [self._point(size.size, at_rate) for size in sweep.sizes for at_rate in size.rates]

        def draw(_: int) -> Drawn:
            import polars as pl

            from normlab.report.charts.rates import loss_by_rate_and_size

            fits = [
                (self.name(size.size), self.rate(point), point.loss)
                for size in sweep.sizes
                for point in size.curve
            ]
            # a column without any loss would have no type
            schema = dict.fromkeys(("rate", "loss", "low", "high"), pl.Float64)
            references = [size.reference for size in sweep.sizes if isfinite(size.reference)]
            return loss_by_rate_and_size(
                pl.DataFrame(_frame_rows(points), schema_overrides=schema, infer_schema_length=None),
                pl.DataFrame(fits, [SERIES, "rate", "loss"], orient="row"),
                _frame_of_optima(self._optima(sweep)),
                self.names,
                today=1.0 if self.has_multiples else self.result.current_rate,
                reference=max(references, default=0.0),
                title=self.rate_title,
            )

        rows = [
            {
                "size": point.series,
                self.rate_title: self.in_words(point.rate),
                "mean loss": point.loss,
                "lowest": point.low,
                "highest": point.high,
                "seeds": point.seeds,
                "ended early": point.ended,
            }
            for point in points
        ]
        return Chart(f"rates-{place}", self.title("Loss by rate", sweep), "", draw, rows, MARKS)

    def _point(self, size: int, at_rate: RateResult) -> _Point:
        """The losses of a size at a rate over its seeds; none if no seed's trial reached its end."""
        losses = at_rate.known
        return _Point(
            series=self.name(size),
            rate=self.rate(at_rate),
            shared=at_rate.loss is not None,
            ended=at_rate.stopped,
            loss=fmean(losses) if losses else None,
            low=min(losses, default=None),
            high=max(losses, default=None),
            seeds=len(losses),
        )

    def _optima(self, sweep: SweepResult) -> list[_Optimum]:
        """The best rate of each size where it is known, with its interval and its loss."""
        optima = []
        for size in sweep.sizes:
            best = self.estimate(size.best)
            if best.value is not None:
                loss = min(point.loss for point in size.curve)
                name = self.name(size.size)
                optima.append(_Optimum(name, best.value, best.low, best.high, loss, size.size))
        return optima

    def _best_by_size(self, sweep: SweepResult, place: int) -> Chart:
        """The best rate by size, and the line through the best rates, which may reach to the target."""
        axis, optima = self.result.axis, self._optima(sweep)
        line = {size: self.estimate(best) for size, best in sweep.line.items()}
        target = self.result.target
        beyond = target if sweep.at_target and target not in self.result.sizes else None

        def draw(_: int) -> Drawn:
            import polars as pl

            from normlab.report.charts.rates import best_by_size

            schema = {"size": pl.Int64, **dict.fromkeys(("rate", "low", "high"), pl.Float64)}
            points = [(size, rate.value, rate.low, rate.high) for size, rate in line.items()]
            return best_by_size(
                _frame_of_optima(optima),
                pl.DataFrame(points, schema, orient="row"),
                self.names,
                beyond,
                axis=axis,
                title=f"best {self.rate_title}",
            )

        best = {optimum.size: Estimate(optimum.rate, optimum.low, optimum.high) for optimum in optima}
        rows = [
            {
                "size": self.name(size),
                "best rate": self._with_interval(best.get(size)),
                "on the line": self._with_interval(line.get(size)),
            }
            for size in sorted({*best, *line})
        ]
        title, caption = self.title(f"Best rate by {axis}", sweep), self._caption_of_line(sweep, beyond)
        return Chart(f"path-{place}", title, caption, draw, rows)

    def _caption_of_line(self, sweep: SweepResult, beyond: int | None) -> str:
        caption = "Bars: 95% intervals."
        if sweep.slope:
            factor = f"{_number(sweep.slope.value)}x ({_interval(sweep.slope.low, sweep.slope.high)}x)"
            caption += f" Line: {factor} with each doubling of the {self.result.axis}, with its 95% band."
        if beyond and sweep.at_target:
            rate = self.in_words(self.estimate(sweep.at_target).value)
            caption += f" Circle: {rate} for {self.name(beyond)}."
        return caption

    def _with_interval(self, rate: Estimate | None) -> str:
        """A rate with its interval: ``3.6e-3 (3.1e-3 to 4.2e-3)``."""
        if rate is None:
            return "–"
        return f"{self.in_words(rate.value)} ({self.in_words(rate.low)} to {self.in_words(rate.high)})"


@dataclass(frozen=True)
class _Point:
    """A row of the chart of losses by rate."""

    series: str
    """The name of the size."""
    rate: float
    shared: bool
    """Whether the trials of all seeds reached their end."""
    ended: str
    """Why one ended early; empty if none did."""
    loss: float | None
    low: float | None
    high: float | None
    seeds: int


@dataclass(frozen=True)
class _Optimum:
    """The best rate of a size, with its interval and its loss: a row of a chart."""

    series: str
    """The name of the size."""
    rate: float
    low: float | None
    high: float | None
    loss: float
    size: int


def _frame_of_optima(optima: Sequence[_Optimum]) -> pl.DataFrame:
    import polars as pl

    numbers = dict.fromkeys(("rate", "low", "high", "loss"), pl.Float64)
    return pl.DataFrame(_frame_rows(optima), {SERIES: pl.String, **numbers, "size": pl.Int64})


def _frame_rows(points: Sequence[_Point | _Optimum]) -> list[dict[str, Any]]:
    """The points as rows of a frame, whose column of series has a name of its own."""
    rows = []
    for point in points:
        columns = dict(vars(point))
        rows.append({SERIES: columns.pop("series"), **columns})
    return rows


def _interval(low: float | None, high: float | None) -> str:
    return f"{_number(low)} to {_number(high)}"


def _number(x: float | None) -> str:
    """A number with two digits; never a negative zero."""
    if x is None:
        return "–"
    return f"{round(x, 2) + 0.0:.2f}"


# -------------------------------------------------------------------------------------- the coordinate check
HEADER: Final = ("module", "quantity", "step", "slope", "expected", "")


def _check(check: CoordinateCheck) -> Iterator[Block]:
    """The sentence with what to do, then what is wrong, with the fault first and marked; what is right is
    shown on request. For each quantity at each place the first wrong step is shown, else the last step.
    """
    yield Text(f"{capital(check.sentence)}.", "alarm" if check.fault else "")
    yield Text(_how_slopes_are_read(check), "note")
    rows = _rows_at_their_steps(check)
    wrong = [_row(row) for row in rows if row.right is False]
    right = [_row(row) for row in rows if row.right]
    if wrong:
        yield PageTable(HEADER, wrong, text_columns=2)
    if right:
        yield Details(f"Right: {count(len(right), 'slope')}", [PageTable(HEADER, right, text_columns=2)])
    yield from _by_role(check)
    if check.notes:
        yield Notes([Text(f"{capital(note)}.") for note in check.notes])


def _how_slopes_are_read(check: CoordinateCheck) -> str:
    steps, seeds = count(check.steps, "step"), count(len(check.seeds), "seed")
    parametrisation = check.parametrisation or "a rate that carries"
    after = " What is wrong after the first may follow from it." if check.fault else ""
    return (
        f"A slope says how the logarithm of a quantity grows with that of the {check.axis}, in the first "
        f"{steps}, with a 95% interval over {seeds}. It is right if an exponent in "
        f"the interval is nearest to one that {parametrisation} asks for."
        f"{after} The check alone decides "
        "nothing about the best rate."
    )


def _rows_at_their_steps(check: CoordinateCheck) -> list[CoordinateRow]:
    """The judged rows, one of the steps for each quantity at each place: the first that is wrong, else the
    last. The fault comes first, then what is wrong, then what is right.
    """
    judged = sorted((row for row in check.rows if row.right is not None), key=_most_telling_first)
    chosen = dict[tuple[str, str, str], CoordinateRow]()
    for row in judged:
        quantity_at_place = (row.role, row.parameter or row.module, row.quantity)
        # keeps the first of its rows, and with it the order of those that are kept
        chosen.setdefault(quantity_at_place, row)
    return list(chosen.values())


def _most_telling_first(row: CoordinateRow) -> tuple[bool, bool, int]:
    """A key that sorts the fault first, then wrong rows from the first step on, then right ones from the last
    step back.
    """
    if row.right:
        return not row.is_fault, True, -row.step
    return not row.is_fault, False, row.step


def _by_role(check: CoordinateCheck) -> Iterator[Block]:
    """The slopes of each role over all layers, after the last step, on request."""
    # a later step replaces an earlier one
    last = {(row.role, row.quantity): row for row in check.rows if row.module == ALL}
    rows = [
        [Cell(row.role or "no matrix"), Cell(row.quantity), _step(row), _slope(row)]
        for row in last.values()
        if row.slope is not None
    ]
    if rows:
        table = PageTable(("role", "quantity", "step", "slope"), rows, text_columns=2)
        yield Details("By role, over all layers", [table])


def _step(row: CoordinateRow) -> Cell:
    return Cell(str(row.step or "start"))


def _slope(row: CoordinateRow) -> Cell:
    return Cell(_number(row.slope), "" if row.low is None else _interval(row.low, row.high))


def _row(row: CoordinateRow) -> list[Cell]:
    """A row of the table; if it is the fault, all of it has the tone of an alarm."""
    cells = [
        Cell(breakable(row.module or "the model"), row.role, title=row.parameter),
        Cell(row.quantity),
        _step(row),
        _slope(row),
        Cell(_expected(row)),
        Cell("right") if row.right else Cell("wrong", tone="alarm"),
    ]
    return [replace(cell, tone="alarm") for cell in cells] if row.is_fault else cells


def _expected(row: CoordinateRow) -> str:
    """The exponents that are right."""
    if row.expected_low == row.expected:
        return _number(row.expected)
    if row.expected_low is None:
        return f"at most {_number(row.expected)}"
    return _interval(row.expected_low, row.expected)

"""The page of a transfer: losses by rate and size, the path of the best rate, and the coordinate check.

What draws is imported when a chart is drawn: it needs packages that are optional.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from normlab.base.units import count, duration, short_rate
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
    Row,
    Section,
    Text,
    breakable,
    capital,
    with_whole_rates,
)
from normlab.scaling import ALL

if TYPE_CHECKING:
    import polars as pl

    from normlab.report.charts.drawing import Drawn


def transfer_page(transfer: Mapping[str, Any]) -> Page:
    """The page of ``Transfer.to_dict()``, to which ``command`` may be added."""
    cost, view = transfer["cost"], _View(transfer)
    facts = [f"{name} {value}" for name, value in transfer["facts"].items()]
    return Page(
        title=str(transfer["title"]),
        headline=with_whole_rates(transfer["sentence"]),
        facts=[*facts, f"{count(cost['trials'], 'trial')} in {duration(cost['seconds'])}"],
        lead=f"The plan: {transfer['plan']}.",
        blocks=list(_sections(transfer, view)),
        recipes=view.names,
        legend="Sizes",
    )


def _sections(transfer: Mapping[str, Any], view: _View) -> Iterator[Section]:
    (first, *others), notes = transfer["decays"], [Text(line) for line in transfer["lines"][1:]]
    yield Section("", [*view.charts(first, 0), Notes(notes)], "glance", listed=False)
    yield Section(view.title("Losses", first), [view.losses(first)], "losses", _LOSSES)
    if (transfer["coordinates"] or {}).get("rows"):
        yield Section("Coordinate check", list(_check(transfer["coordinates"])), "coordinate_check")
    if others:
        blocks = [
            Details(
                f"With {sweep['label']}: {sweep['verdict']}", [*view.charts(sweep, i), view.losses(sweep)]
            )
            for i, sweep in enumerate(others, start=1)
        ]
        yield Section("Other weight decays", blocks, "other_weight_decays")
    if transfer.get("command"):
        yield Section("How it was made", [Code(str(transfer["command"]))], "how")


_LOSSES: Final = (
    "Means over seeds at the end of the trials. Paler: some seeds were not tried, because the best rate was "
    "seen to lie elsewhere, or because the trials were cut short. A dash: no seed was tried."
)


class _View:
    """The tables and charts of trials. If the setup gives every size a rate of its own, rates are shown as
    multiples of it.
    """

    def __init__(self, transfer: Mapping[str, Any]) -> None:
        self.transfer = transfer
        self.multiples = len({model["rate"] for model in transfer["models"]}) > 1
        self.kind = "multiple" if self.multiples else "rate"
        self.rate = "rate, times the setup's own" if self.multiples else "learning rate"
        self.names = [self.name(size) for size in transfer["sizes"]]

    def name(self, size: int) -> str:
        return f"{self.transfer['axis']} {size}"

    def title(self, title: str, sweep: Mapping[str, Any]) -> str:
        """The title, with the weight decay if there are several."""
        return f"{title}, with {sweep['label']}" if len(self.transfer["decays"]) > 1 else title

    def shown(self, rate: float) -> str:
        return f"{rate:.2g}x" if self.multiples else short_rate(rate)

    def best(self, one: Mapping[str, Any]) -> Mapping[str, Any]:
        """The best rate of a size with its interval."""
        return one["multiple"] if self.multiples else one["optimum"]

    def on_line(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """A rate on the line through the best ones, with its interval."""
        return found["multiple"] if self.multiples else found

    # ------------------------------------------------------------------------------------------------ tables
    def losses(self, sweep: Mapping[str, Any]) -> PageTable:
        """A row per rate, a column per size: the mean loss over seeds; the first row has the best rates."""
        by_size = [{t[self.kind]: t for t in one["rates"]} for one in sweep["sizes"]]
        rows = [[Cell("best rate", "with its 95% interval"), *map(self._between, sweep["sizes"])]]
        for rate in sorted({rate for trials in by_size for rate in trials}):
            rows.append([Cell(self.shown(rate)), *(self._loss(trials.get(rate)) for trials in by_size)])
        return PageTable([self.rate, *self.names], rows)

    def _between(self, one: Mapping[str, Any]) -> Cell:
        found = self.best(one)
        if found["value"] is None:
            return Cell("–", "not known", tone="faint", title=one["optimum"]["why"])
        value, low, high = (self.shown(found[end]) for end in ENDS)
        return Cell(value, f"{low} to {high}", tone="best")

    def _loss(self, trial: Mapping[str, Any] | None) -> Cell:
        if trial is None:
            return Cell("–", tone="faint", title="not tried")
        if trial["stopped"]:
            return Cell("stopped", trial["stopped"], tone="alarm")
        losses, asked = list(trial["losses"].values()), self.transfer["seeds"]
        few = len(losses) < asked
        small = f"{len(losses)} of {asked} seeds" if len(losses) > 1 else "one seed"
        return Cell(f"{fmean(losses):.3f}", small * few, tone="faint" * few)

    # ------------------------------------------------------------------------------------------------ charts
    def charts(self, sweep: Mapping[str, Any], i: int) -> list[Block]:
        """The losses by rate, and the best rates by size if there are any."""
        if not any(one["rates"] for one in sweep["sizes"]):
            return []
        charts = [self._losses_by_rate(sweep, i)]
        if len(self._optima(sweep)) > 1:
            charts.append(self._path(sweep, i))
        return [Columns(charts)]

    def _losses_by_rate(self, sweep: Mapping[str, Any], i: int) -> Chart:
        tried = [self._trial(one["size"], trial) for one in sweep["sizes"] for trial in one["rates"]]

        def draw(_: int) -> Drawn:
            import polars as pl

            from normlab.report.charts.rates import loss_by_rate_and_size

            fits = [
                (self.name(one["size"]), point[self.kind], point["loss"])
                for one in sweep["sizes"]
                for point in one["curve"]
            ]
            references = [float(one["reference"]) for one in sweep["sizes"]]
            # a column without any loss would have no type
            schema = dict.fromkeys(("rate", "loss", "low", "high"), pl.Float64)
            return loss_by_rate_and_size(
                pl.DataFrame(tried, schema_overrides=schema, infer_schema_length=None),
                pl.DataFrame(fits, ["recipe", "rate", "loss"], orient="row"),
                _frame_of_best(self._optima(sweep)),
                self.names,
                today=1.0 if self.multiples else self.transfer["current_rate"],
                reference=max(filter(isfinite, references), default=0.0),
                title=self.rate,
            )

        rows = [
            {
                "size": trial["recipe"],
                self.rate: self.shown(trial["rate"]),
                "mean loss": trial["loss"],
                "lowest": trial["low"],
                "highest": trial["high"],
                "seeds": trial["seeds"],
                "ended early": trial["ended"],
            }
            for trial in tried
        ]
        return Chart(f"rates-{i}", self.title("Loss by rate", sweep), "", draw, rows, _MARKS)

    def _trial(self, size: int, trial: Mapping[str, Any]) -> Row:
        """The losses of a size at a rate over its seeds, of which none may have an end."""
        losses = [loss for loss in trial["losses"].values() if loss is not None]
        return {
            "recipe": self.name(size),
            "rate": trial[self.kind],
            "shared": trial["loss"] is not None,
            "ended": trial["stopped"],
            "loss": fmean(losses) if losses else None,
            "low": min(losses, default=None),
            "high": max(losses, default=None),
            "seeds": len(losses),
        }

    def _optima(self, sweep: Mapping[str, Any]) -> list[Row]:
        """The best rate of each size where it is known, with its interval and its loss."""
        return [
            {
                "recipe": self.name(one["size"]),
                **dict(zip(_RATE, (best[end] for end in ENDS), strict=True)),
                "loss": min(point["loss"] for point in one["curve"]),
                "size": one["size"],
            }
            for one in sweep["sizes"]
            if (best := self.best(one))["value"] is not None
        ]

    def _path(self, sweep: Mapping[str, Any], i: int) -> Chart:
        axis, target, slope = self.transfer["axis"], self.transfer["target"], sweep["slope"]
        beyond = None if target in self.transfer["sizes"] or not sweep["at_target"] else target
        optima = self._optima(sweep)
        line = {point["size"]: [self.on_line(point)[end] for end in ENDS] for point in sweep["line"]}

        def draw(_: int) -> Drawn:
            import polars as pl

            from normlab.report.charts.rates import best_by_size

            schema = {"size": pl.Int64, **dict.fromkeys(_RATE, pl.Float64)}
            points = [(size, *ends) for size, ends in line.items()]
            return best_by_size(
                _frame_of_best(optima),
                pl.DataFrame(points, schema, orient="row"),
                self.names,
                beyond,
                axis=axis,
                title=f"best {self.rate}",
            )

        caption = "Bars: 95% intervals."
        if slope:
            each = f"{slope['value']:.2f}x ({_span(slope, 'x')}) with each doubling of the {axis}"
            caption += f" Line: {each}, with its 95% band."
        if beyond:
            rate = self.on_line(sweep["at_target"])["value"]
            caption += f" Circle: {self.shown(rate)} for {self.name(target)}."
        best = {row["size"]: [row[end] for end in _RATE] for row in optima}
        rows = [
            {
                "size": self.name(size),
                "best rate": self._ends(best.get(size)),
                "on the line": self._ends(line.get(size)),
            }
            for size in sorted({*best, *line})
        ]
        return Chart(f"path-{i}", self.title(f"Best rate by {axis}", sweep), caption, draw, rows)

    def _ends(self, ends: Sequence[float] | None) -> str:
        """A rate with its interval: ``3.6e-3 (3.1e-3 to 4.2e-3)``."""
        if ends is None:
            return "–"
        value, low, high = (self.shown(end) for end in ends)
        return f"{value} ({low} to {high})"


def _frame_of_best(optima: Sequence[Row]) -> pl.DataFrame:
    import polars as pl

    numbers = dict.fromkeys((*_RATE, "loss"), pl.Float64)
    return pl.DataFrame(optima, {"recipe": pl.String, **numbers, "size": pl.Int64})


_MARKS: Final = (
    "Dots: means over seeds, with their range; hollow: over some seeds only. Thick lines: the fitted "
    "curves; diamonds: their best rates with 95% intervals. A loss above that of a model that has learnt "
    "nothing is drawn at the upper edge. Cross: ended early, as the table says."
)
ENDS: Final = ("value", "low", "high")
_RATE: Final = ("rate", "low", "high")


def _span(ends: Mapping[str, float], unit: str = "") -> str:
    return f"{_number(ends['low'])} to {_number(ends['high'])}{unit}"


def _number(x: float) -> str:
    return f"{round(x, 2) + 0.0:.2f}"


# -------------------------------------------------------------------------------------- the coordinate check
def _check(check: Mapping[str, Any]) -> Iterator[Block]:
    """The sentence with what to do, then what is wrong, with the fault first and marked; what is right is
    shown on request. For each quantity at each place the first wrong step is shown, else the last step.
    """
    fault = check["fault"]
    yield Text(f"{capital(check['sentence'])}.", "alarm" if fault else "")
    seeds, asks = count(len(check["seeds"]), "seed"), check["parametrisation"] or "a rate that carries"
    yield Text(
        f"A slope says how the logarithm of a quantity grows with that of the {check['axis']}, in the first "
        f"{count(check['steps'], 'step')}, with a 95% interval over {seeds}. It is right if an exponent in "
        f"the interval is nearest to one that {asks} asks for."
        f"{' What is wrong after the first may follow from it.' if fault else ''} The check alone decides "
        "nothing about the best rate.",
        "note",
    )

    def order(row: Mapping[str, Any]) -> tuple[bool, bool, int]:
        return not _same(row, fault), row["right"], -row["step"] if row["right"] else row["step"]

    chosen = dict[tuple[str, ...], Mapping[str, Any]]()
    for row in sorted((row for row in check["rows"] if row["right"] is not None), key=order):
        chosen.setdefault((row["role"], row["parameter"] or row["module"], row["quantity"]), row)
    wrong, right = ([_row(row, fault) for row in chosen.values() if row["right"] is r] for r in (False, True))
    if wrong:
        yield PageTable(_HEADER, wrong, text_columns=2)
    if right:
        yield Details(f"Right: {count(len(right), 'slope')}", [PageTable(_HEADER, right, text_columns=2)])
    together = {(row["role"], row["quantity"]): row for row in check["rows"] if row["module"] == ALL}
    by_role = [
        [Cell(row["role"] or "no matrix"), Cell(row["quantity"]), _step(row), _slope(row)]
        for row in together.values()
        if row["slope"] is not None
    ]
    if by_role:
        table = PageTable(("role", "quantity", "step", "slope"), by_role, text_columns=2)
        yield Details("By role, over all layers", [table])
    if check["notes"]:
        yield Notes([Text(f"{capital(note)}.") for note in check["notes"]])


_HEADER: Final = ("module", "quantity", "step", "slope", "expected", "")


def _same(row: Mapping[str, Any], fault: Mapping[str, Any] | None) -> bool:
    """Whether a row is the fault, which names a module of the largest model."""
    return {**row, "module": row["path"]} == fault


def _step(row: Mapping[str, Any]) -> Cell:
    return Cell(str(row["step"] or "start"))


def _slope(row: Mapping[str, Any]) -> Cell:
    return Cell(_number(row["slope"]), "" if row["low"] is None else _span(row))


def _row(row: Mapping[str, Any], fault: Mapping[str, Any] | None) -> list[Cell]:
    """A row of the table; if it is the fault, it has the tone of an alarm."""
    wanted, least = _number(row["expected"]), row.get("expected_low", row["expected"])
    if least != row["expected"]:
        wanted = f"at most {wanted}" if least is None else f"{_number(least)} to {wanted}"
    cells = [
        Cell(breakable(row["module"] or "the model"), row["role"], title=row["parameter"]),
        Cell(row["quantity"]),
        _step(row),
        _slope(row),
        Cell(wanted),
        Cell("right") if row["right"] else Cell("wrong", tone="alarm"),
    ]
    return [replace(cell, tone="alarm") for cell in cells] if _same(row, fault) else cells

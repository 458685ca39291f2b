"""The page of a transfer: losses by rate and size, the path of the best rate, and the coordinate check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isfinite
from statistics import fmean
from typing import Any, Final

import polars as pl

from normlab.base.units import count, duration, short_rate
from normlab.report.charts.rates import best_by_size, loss_by_rate_and_size
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
    whole,
)
from normlab.scaling import ALL


def transfer_page(transfer: Mapping[str, Any]) -> Page:
    """The page of ``Transfer.to_dict()``, to which ``command`` may be added."""
    cost, view = transfer["cost"], _View(transfer)
    facts = [f"{name} {value}" for name, value in transfer["facts"].items()]
    return Page(
        title=str(transfer["title"]),
        headline=whole(transfer["sentence"]),
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
        of = [(self.name(one["size"]), one) for one in sweep["sizes"]]
        tried = [
            (name, t[self.kind], list(t["losses"].values()), t["loss"] is not None, t["stopped"])
            for name, one in of
            for t in one["rates"]
        ]
        if not tried:
            return []
        fits = [(name, p[self.kind], p["loss"]) for name, one in of for p in one["curve"]]
        best = [
            (name, *(own[end] for end in ENDS), min(p["loss"] for p in one["curve"]), one["size"])
            for name, one in of
            if (own := self.best(one))["value"] is not None
        ]
        losses = pl.DataFrame(tried, _TRIED, orient="row").select(
            pl.exclude("losses"),
            loss=pl.col("losses").list.mean(),
            low=pl.col("losses").list.min(),
            high=pl.col("losses").list.max(),
            seeds=pl.col("losses").list.drop_nulls().list.len(),
        )
        optima = pl.DataFrame(best, _BEST, orient="row")
        drawn = loss_by_rate_and_size(
            losses,
            pl.DataFrame(fits, ["recipe", "rate", "loss"], orient="row"),
            optima,
            self.names,
            today=1.0 if self.multiples else self.transfer["today"],
            reference=max((x for _, one in of if isfinite(x := float(one["reference"]))), default=0.0),
            title=self.rate,
        )
        charts = [Chart(f"rates-{i}", self.title("Loss by rate", sweep), _RATES, drawn, losses)]
        return [Columns([*charts, self._path(sweep, optima, i)] if len(best) > 1 else charts)]

    def _path(self, sweep: Mapping[str, Any], best: pl.DataFrame, i: int) -> Chart:
        axis, target, slope = self.transfer["axis"], self.transfer["target"], sweep["slope"]
        points = [(p["size"], *(self.on_line(p)[end] for end in ENDS)) for p in sweep["line"]]
        line = pl.DataFrame(points, {name: _BEST[name] for name in ("size", *_RATE)}, orient="row")
        beyond = None if target in self.transfer["sizes"] or not sweep["at_target"] else target
        drawn = best_by_size(best, line, self.names, beyond, axis=axis, title=f"best {self.rate}")
        caption = "Bars: 95% intervals."
        if slope:
            each = f"{slope['value']:.2f}x ({_span(slope, 'x')}) with each doubling of the {axis}"
            caption += f" Line: {each}, with its 95% band."
        if beyond:
            rate = self.on_line(sweep["at_target"])["value"]
            caption += f" Circle: {self.shown(rate)} for {self.name(target)}."
        return Chart(f"path-{i}", self.title(f"Best rate by {axis}", sweep), caption, drawn, best)


_RATES: Final = (
    "Dots: means over seeds, with their range; hollow: over some seeds only. Thick lines: the fitted "
    "curves; diamonds: their best rates with 95% intervals. A loss above that of a model that has learnt "
    "nothing is drawn at the upper edge. Cross: ended early, as the table says."
)
ENDS: Final = ("value", "low", "high")
_RATE: Final = ("rate", "low", "high")
_LIST: Final = {"losses": pl.List(pl.Float64), "shared": pl.Boolean, "ended": pl.String}
_TRIED: Final = {"recipe": pl.String, "rate": pl.Float64, **_LIST}
_BEST: Final = {"recipe": pl.String, **dict.fromkeys((*_RATE, "loss"), pl.Float64), "size": pl.Int64}


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

"""The page of a transfer: losses by rate and size, the path of the best rate, and the coordinate check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import polars as pl

from normlab.config.io import validated
from normlab.config.units import count, duration, short_rate
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
    require_parts,
    whole,
    write_page,
)

PARTS: Final = (
    "title axis sizes sentence lines plan decays cost steps facts models seeds target today coordinates"
)


@validated
def write_transfer_page(transfer: Mapping[str, Any], path: Path) -> Path:
    """Write the page of ``Transfer.to_dict()``, to which ``command`` may be added.

    Raises UserError if a part is missing.
    """
    return write_page(path, transfer_page(transfer).html())


def transfer_page(transfer: Mapping[str, Any]) -> Page:
    """The page of what ``write_transfer_page`` receives."""
    require_parts(transfer, PARTS, "Transfer.to_dict()")
    cost, view = transfer["cost"], _View(transfer)
    facts = [f"{name} {value}" for name, value in transfer["facts"].items()]
    return Page(
        title=str(transfer["title"]),
        headline=whole(transfer["sentence"]),
        facts=[*facts, f"{count(cost['trials'], 'trial')} in {duration(cost['seconds'])}"],
        lead=f"Before it began: {transfer['plan']}.",
        blocks=list(_sections(transfer, view)),
        recipes=view.names,
        legend="Sizes",
    )


def _sections(transfer: Mapping[str, Any], view: _View) -> Iterator[Section]:
    (first, *others), notes = transfer["decays"], [Text(line) for line in transfer["lines"][1:]]
    yield Section("", [*view.charts(first, 0), Notes(notes)], "glance", listed=False)
    yield Section(view.title("Losses", first), [view.losses(first)], "losses", _LOSSES)
    if transfer["coordinates"]:
        yield Section("Coordinate check", list(_check(transfer["coordinates"])), "coordinate_check")
    if others:
        blocks: list[Block] = [view.decays(transfer["decays"])]
        for i, sweep in enumerate(others, start=1):
            inside = [Text(f"{sweep['sentence']}."), *view.charts(sweep, i), view.losses(sweep)]
            blocks.append(Details(f"With {sweep['label']}", inside))
        yield Section("Other weight decays", blocks, "other_weight_decays")
    if transfer.get("command"):
        yield Section("How it was made", [Code(str(transfer["command"]))], "how")


_LOSSES: Final = (
    "Means over seeds at the end of the trials. Paler: some seeds were not tried, since the best rate was "
    "seen to lie elsewhere, or the trials were cut short. A dash: no seed was."
)


@dataclass(frozen=True)
class _View:
    """The tables and charts of trials. Where the setup gives every size a rate of its own, rates are shown as
    multiples of that.
    """

    transfer: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return [self.name(size) for size in self.transfer["sizes"]]

    def name(self, size: int) -> str:
        return f"{self.transfer['axis']} {size}"

    def title(self, title: str, sweep: Mapping[str, Any]) -> str:
        """With the weight decay, where there are several."""
        return f"{title}, with {sweep['label']}" if len(self.transfer["decays"]) > 1 else title

    @property
    def multiples(self) -> bool:
        return len({model["rate"] for model in self.transfer["models"]}) > 1

    @property
    def unit(self) -> float:
        return float(self.transfer["today"]) if self.multiples else 1.0

    @property
    def rate(self) -> str:
        return "rate, times the setup's own" if self.multiples else "learning rate"

    def shown(self, rate: float) -> str:
        return f"{rate / self.unit:.2g}x" if self.multiples else short_rate(rate)

    def between(self, found: Mapping[str, Any] | None) -> Cell:
        """A rate with its interval."""
        if found is None or found["value"] is None:
            return Cell("–", "not known", tone="faint", title=found["why"] if found else "")
        value, low, high = (self.shown(found[end]) for end in ("value", "low", "high"))
        return Cell(value, f"{low} to {high}", tone="best")

    # ------------------------------------------------------------------------------------------------ tables
    def losses(self, sweep: Mapping[str, Any]) -> PageTable:
        """Rates down, sizes across: the mean loss over seeds; above them the best rate."""
        by_size = {one["size"]: {t["rate"]: t for t in one["rates"]} for one in sweep["sizes"]}
        rates = sorted({rate for trials in by_size.values() for rate in trials})
        best = [self.between(one["optimum"]) for one in sweep["sizes"]]
        rows = [[Cell("best rate", "with its 95% interval"), *best]]
        rows += [
            [Cell(self.shown(rate)), *(self._loss(trials.get(rate)) for trials in by_size.values())]
            for rate in rates
        ]
        return PageTable([self.rate, *map(self.name, by_size)], rows)

    def _loss(self, trial: Mapping[str, Any] | None) -> Cell:
        if trial is None:
            return Cell("–", tone="faint", title="not tried")
        if trial["stopped"]:
            return Cell("stopped", trial["stopped"], tone="alarm")
        losses, asked = list(trial["losses"].values()), self.transfer["seeds"]
        few = len(losses) < asked
        small = f"{len(losses)} of {asked} seeds" if len(losses) > 1 else "one seed"
        return Cell(f"{fmean(losses):.3f}", small * few, tone="faint" * few)

    def decays(self, sweeps: Sequence[Mapping[str, Any]]) -> PageTable:
        """Weight decays down: the answer, the slope and the best rates."""
        axis, target = self.transfer["axis"], self.transfer["target"]
        header = ["decay", "answer", f"each doubling of the {axis}", f"rate for {axis} {target}"]
        rows = []
        for sweep in sweeps:
            slope, best = sweep["slope"], map(self.between, (one["optimum"] for one in sweep["sizes"]))
            moves = Cell(f"{slope['value']:.2f}x", _span(slope, "x")) if slope else Cell("–", tone="faint")
            take = self.between(sweep["at_target"])
            rows.append([Cell(sweep["label"]), Cell(sweep["verdict"]), moves, take, *best])
        header += [f"best at {self.name(size)}" for size in self.transfer["sizes"]]
        return PageTable(header, rows, text_columns=2)

    # ------------------------------------------------------------------------------------------------ charts
    def charts(self, sweep: Mapping[str, Any], i: int) -> list[Block]:
        """The losses by rate, and the best rates by size, where there are any."""
        trials = pl.DataFrame(list(self._trials(sweep)), _TRIALS)
        if trials.is_empty():
            return []
        best = pl.DataFrame(list(self._best(sweep)), _BEST)
        fits = [
            {"recipe": self.name(one["size"]), "rate": p["rate"] / self.unit, "loss": p["loss"]}
            for one in sweep["sizes"]
            for p in one["curve"]
        ]
        curves = loss_by_rate_and_size(
            trials,
            pl.DataFrame(fits, {name: _BEST[name] for name in ("recipe", "rate", "loss")}),
            best,
            self.names,
            today=self.transfer["today"] / self.unit,
            reference=max(one["reference"] for one in sweep["sizes"]),
            title=self.rate,
        )
        charts = [Chart(f"rates-{i}", self.title("Loss by rate", sweep), _RATES, curves, trials)]
        if len(best) > 1:
            charts.append(self._path(sweep, best, i))
        return [Columns(charts)]

    def _path(self, sweep: Mapping[str, Any], best: pl.DataFrame, i: int) -> Chart:
        axis, target, slope = self.transfer["axis"], self.transfer["target"], sweep["slope"]
        ends = ("value", "low", "high")
        line = [{"size": p["size"], **{end: p[end] / self.unit for end in ends}} for p in sweep["line"]]
        table = pl.DataFrame(line, {"size": pl.Int64, **dict.fromkeys(ends, pl.Float64)})
        beyond = None if target in self.transfer["sizes"] else target
        drawn = best_by_size(
            best, table.rename({"value": "rate"}), self.names, beyond, axis=axis, title=f"best {self.rate}"
        )
        caption = "Bars: 95% intervals."
        if slope:
            each = f"{slope['value']:.2f}x ({_span(slope, 'x')}) with each doubling of the {axis}"
            caption += f" Line: {each}, with its 95% band."
        if slope and beyond:
            caption += f" Circle: {self.shown(sweep['at_target']['value'])} for {self.name(target)}."
        return Chart(f"path-{i}", self.title(f"Best rate by {axis}", sweep), caption, drawn, best)

    def _trials(self, sweep: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for one in sweep["sizes"]:
            for t in one["rates"]:
                losses = [loss for loss in t["losses"].values() if loss is not None]
                yield {
                    "recipe": self.name(one["size"]),
                    "rate": t["rate"] / self.unit,
                    "loss": fmean(losses) if losses else None,
                    "low": min(losses, default=None),
                    "high": max(losses, default=None),
                    "seeds": len(losses),
                    "shared": t["loss"] is not None,
                    "ended": t["stopped"],
                }

    def _best(self, sweep: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for one in sweep["sizes"]:
            if (own := one["optimum"])["value"] is not None:
                yield {
                    "recipe": self.name(one["size"]),
                    "size": one["size"],
                    **{n: own[end] / self.unit for n, end in zip(("rate", "low", "high"), own, strict=False)},
                    "loss": min(p["loss"] for p in one["curve"]),
                }


_RATES: Final = (
    "Dots: means over seeds, with their range; hollow: of some seeds alone. Thick lines: the fitted "
    "curves; diamonds: their best rates with 95% intervals. A loss above that of a model which has learnt "
    "nothing stands at the upper edge. Cross: ended early, as the table says."
)
_NUMBERS: Final = dict.fromkeys(("rate", "loss", "low", "high"), pl.Float64)
_TRIALS: Final = {
    "recipe": pl.String,
    **_NUMBERS,
    "seeds": pl.Int64,
    "shared": pl.Boolean,
    "ended": pl.String,
}
_BEST: Final = {"recipe": pl.String, "size": pl.Int64, **_NUMBERS}


def _span(ends: Mapping[str, float], unit: str = "") -> str:
    return f"{_number(ends['low'])} to {_number(ends['high'])}{unit}"


def _number(x: float) -> str:
    return f"{round(x, 2) + 0.0:.2f}"


# -------------------------------------------------------------------------------------- the coordinate check
def _check(check: Mapping[str, Any]) -> Iterator[Block]:
    """The sentence with what to do, what is wrong with the first fault marked, and the rest on request."""
    fault, axis = check["fault"], check["axis"]
    yield Text(f"{capital(check['sentence'])}.", "alarm" if fault else "")
    seeds, asks = count(len(check["seeds"]), "seed"), check["parametrisation"] or "a rate that carries"
    yield Text(
        f"A slope is that of the logarithm of a quantity over that of the {axis}, in the first "
        f"{count(check['steps'], 'step')}, with a 95% interval over {seeds}. It is right if an exponent in "
        f"the interval is nearest to one that {asks} asks for."
        f"{' What is wrong after the first may follow from it.' if fault else ''} The check alone decides "
        "nothing about the best rate.",
        "note",
    )
    chosen = _chosen(check["rows"])
    wrong = [row for row in chosen if row["right"] is False]
    wrong.sort(key=lambda row: (not _same(row, fault), row["step"]))
    if wrong:
        yield PageTable(_HEADER, [_row(row, marked=_same(row, fault)) for row in wrong], text_columns=2)
    for words, right in (("Right", True), ("Not judged", None)):
        if rest := [_row(row) for row in chosen if row["right"] is right]:
            table = PageTable(_HEADER, rest, text_columns=2)
            yield Details(f"{words}: {count(len(rest), 'slope')}", [table])
    if check["notes"]:
        yield Notes([Text(f"{capital(note)}.") for note in check["notes"]])


_HEADER: Final = ("module", "quantity", "step", "slope", "expected", "")


def _chosen(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each quantity at each place one step: the first that is wrong, else the last that is judged, else
    the last.
    """
    chosen = dict[tuple[str, ...], Mapping[str, Any]]()
    for row in rows:
        key = (row["role"], row["parameter"] or row["module"], row["quantity"])
        before = chosen[key]["right"] if key in chosen else None
        if before is None or (before and row["right"] is not None):
            chosen[key] = row
    return list(chosen.values())


def _same(row: Mapping[str, Any], fault: Mapping[str, Any] | None) -> bool:
    """Whether a row is the fault, which names a module of the largest model."""
    return fault is not None and {**row, "module": row["path"]} == fault


def _row(row: Mapping[str, Any], *, marked: bool = False) -> list[Cell]:
    """A row of the table, in the tone of an alarm where it is the fault."""
    place = f"every {row['role']}" if row["module"] == "*" else row["module"] or "the model"
    expected, least = row["expected"], row.get("expected_low", row["expected"])
    wanted = "–"
    if expected is not None:
        up_to = "at most " if least is None else f"{_number(least)} to " if least != expected else ""
        wanted = f"{up_to}{_number(expected)}"
    slope = Cell("–", tone="faint")
    if row["slope"] is not None:
        interval = row["low"] is not None and row["low"] != row["high"]
        slope = Cell(_number(row["slope"]), _span(row) if interval else "")
    answer = {True: "right", False: "wrong", None: "–"}[row["right"]]
    tone = "alarm" if marked else ""
    cells = [
        Cell(breakable(place), row["role"], title=row["parameter"]),
        Cell(row["quantity"]),
        Cell(str(row["step"] or "start")),
        slope,
    ]
    cells += [Cell(wanted), Cell(answer, tone="alarm" if row["right"] is False else "")]
    return [replace(cell, tone=tone or cell.tone) for cell in cells]

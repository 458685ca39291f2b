"""The page of trials: which rates train, the losses of each trial, and the same with one change.

What draws is imported when a chart is drawn: it needs packages that are optional.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from normlab.base.units import count, duration, rate, short_rate
from normlab.report.charts.theme import ENDED_EARLY
from normlab.report.page import (
    Cell,
    Chart,
    Code,
    Columns,
    Notes,
    Page,
    PageTable,
    Section,
    Text,
    capital,
    with_whole_rates,
)

if TYPE_CHECKING:
    from normlab.report.charts.drawing import Drawn

SMOOTH: Final = 8
"""Steps over which the losses of a curve are averaged, because batches differ by more than rates."""


def trial_page(trials: Mapping[str, Any]) -> Page:
    """The page of ``Trials.to_dict()``, to which ``title`` and ``command`` may be added."""
    every = [trials, *trials["variants"]]
    rates = [short_rate(rate) for rate in _rates(every)]
    facts = [f"{name} {value}" for name, value in trials["facts"].items()]
    number = sum(len(one["trials"]) for one in every)
    headline, _, rest = trials["sentence"].partition("; ")
    return Page(
        title=str(trials.get("title") or f"Learning rates of {trials['model']}"),
        headline=with_whole_rates(headline),
        facts=[*facts, f"{count(number, 'trial')} in {duration(trials['seconds'])}"],
        lead=f"{capital(rest)}." if rest else "",
        blocks=list(_sections(trials, every, rates)),
        recipes=rates,
    )


def _sections(
    trials: Mapping[str, Any], every: Sequence[Mapping[str, Any]], rates: Sequence[str]
) -> Iterator[Section]:
    ended = [t for t in _own(trials) if t["stopped"]]
    notes = [
        *trials["lines"][1:],
        *([f"The plan: {trials['plan']}."] if trials["plan"] else []),
        *(f"{short_rate(t['rate'])} ended early: {t['stopped']}." for t in ended),
    ]
    charts = [chart for i, one in enumerate(every) for chart in (_by_rate(one, i), _by_step(one, i, rates))]
    yield Section("", [Columns(charts), Notes([Text(note) for note in notes])], "glance", listed=False)
    yield Section("Each trial", [_table(every)], "trials", _MEANING)
    if trials.get("command"):
        yield Section("How it was made", [Code(str(trials["command"]))], "how")


_MEANING: Final = (
    "Every trial trains a copy from the same start, on the same batches and random numbers. The loss is the "
    "mean of the last tenth of the steps. These do not tell where a long training would end."
)


def _own(trials: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The trials that the answer is about, by rate."""
    return [t for t in trials["trials"] if t["steps"] == trials["steps"]]


def _rates(every: Sequence[Mapping[str, Any]]) -> list[float]:
    """The rates of the trials that the answers are about."""
    return sorted({t["rate"] for one in every for t in _own(one)})


def _by_rate(trials: Mapping[str, Any], i: int) -> Chart:
    tried = _own(trials)
    inside = [t["rate"] for t in tried if t["usable"] and t["rate"] <= trials["usable"][1]]
    reference = float(trials["reference"])
    has_entropy = trials["unigram"] is not None and trials["unigram"] <= trials["reference"]
    words = "unigram entropy" if has_entropy else "loss at the start"

    def draw(_: int) -> Drawn:
        import polars as pl

        from normlab.report.charts.rates import loss_by_rate

        schema = {"rate": pl.Float64, "loss": pl.Float64, "ended": pl.String}
        points = [(t["rate"], t["loss"], t["stopped"]) for t in tried]
        return loss_by_rate(
            pl.DataFrame(points, schema=schema, orient="row"),
            today=trials["current_rate"],
            usable=(min(inside), max(inside)) if inside else None,
            reference=reference,
            words=words,
        )

    marks = (
        "Band: within 5% of the best here, up to the highest such rate; a long training may use lower ones. "
        "Cross: ended early."
    )
    rows = [
        {"learning rate": short_rate(t["rate"]), "loss": t["loss"], "ended early": t["stopped"]}
        for t in tried
    ]
    if isfinite(reference):
        rows.append({"learning rate": words, "loss": reference, "ended early": ""})
    return Chart(f"rates-{i}", _titled("Loss by rate", trials), "", draw, rows, marks)


def _by_step(trials: Mapping[str, Any], i: int, rates: Sequence[str]) -> Chart:
    tried = _own(trials)
    curves = [_smooth([float(x) for x in t["losses"]]) for t in tried]
    entropy = trials["unigram"]

    def draw(points: int) -> Drawn:
        import polars as pl

        from normlab.report.charts.comparison import CurveAxis, curve

        points_of_curves: list[tuple[Any, ...]] = []
        for t, losses in zip(tried, curves, strict=True):
            name, outcome = short_rate(t["rate"]), ENDED_EARLY if t["stopped"] else "trained"
            points_of_curves += [(name, name, outcome, 0, step, x) for step, x in enumerate(losses, start=1)]
        words = dict.fromkeys(("recipe", "run", "outcome"), pl.String)
        schema = {**words, "seed": pl.Int64, "step": pl.Int64, "loss": pl.Float64}
        table = pl.DataFrame(points_of_curves, schema=schema, orient="row")
        title = "loss" if entropy is None else "nats a target"
        axis = CurveAxis("loss", title, number=".3f", height=260)
        return curve(table, rates, axis, entropy_nats=entropy, points=points)

    caption = f"Means of {SMOOTH} steps."
    marks = "A cross ends the line of a trial that ended early."
    names = _distinct([t["rate"] for t in tried])
    rows = [
        {"step": step, **dict(zip(names, losses, strict=True))}
        for step, losses in enumerate(zip_longest(*curves), start=1)
    ]
    return Chart(f"steps-{i}", _titled("Loss by step", trials), caption, draw, rows, marks)


def _distinct(rates: Sequence[float]) -> list[str]:
    """The rates in two digits, or in more where two would be equal."""
    short = [short_rate(value) for value in rates]
    return short if len(set(short)) == len(short) else [rate(value) for value in rates]


def _smooth(losses: Sequence[float]) -> list[float]:
    return [fmean(losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(losses))]


def _table(every: Sequence[Mapping[str, Any]]) -> PageTable:
    """A row per rate; for each setup its loss, and how far that is behind the best."""
    rows = [
        [
            Cell(short_rate(value), "today" if value == every[0]["current_rate"] else ""),
            *(_cell(one, value) for one in every),
        ]
        for value in _rates(every)
    ]
    header = ["learning rate", *(f"with {one['change']}" if one["change"] else "loss" for one in every)]
    return PageTable(header, rows)


def _cell(trials: Mapping[str, Any], value: float) -> Cell:
    found = next((t for t in _own(trials) if t["rate"] == value), None)
    if found is None:
        return Cell("–", "not tried", tone="faint")
    if found["stopped"]:
        return Cell("–", found["stopped"], tone="alarm")
    best = value == trials["best"]
    behind = found["loss"] - min(t["loss"] for t in _own(trials) if t["loss"] is not None)
    small = "best" if best else f"+{behind:.3f}" + ("" if found["usable"] else ", worse than 5%")
    return Cell(f"{found['loss']:.3f}", small, tone="best" if best else "" if found["usable"] else "faint")


def _titled(title: str, trials: Mapping[str, Any]) -> str:
    return f"{title}, with {trials['change']}" if trials["change"] else title

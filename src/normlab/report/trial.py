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
from normlab.report.charts.theme import ENDED_EARLY, SERIES
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
from normlab.report.results.trial import TrialsResult

if TYPE_CHECKING:
    from normlab.report.charts.drawing import Drawn

SMOOTH: Final = 8
"""Steps over which the losses of a curve are averaged, because batches differ by more than rates."""
MEANING: Final = (
    "Every trial trains a copy from the same start, on the same batches and random numbers. The loss is the "
    "mean of the last tenth of the steps. These do not tell where a long training would end."
)


def trial_page(trials: Mapping[str, Any]) -> Page:
    """The page of ``Trials.to_dict()``, to which ``title`` and ``command`` may be added."""
    result = TrialsResult.of(trials)
    facts = [f"{name} {value}" for name, value in result.facts.items()]
    headline, _, rest = result.sentence.partition("; ")
    return Page(
        title=result.title or f"Learning rates of {result.model}",
        headline=with_whole_rates(headline),
        facts=[*facts, f"{count(result.number, 'trial')} in {duration(result.seconds)}"],
        lead=f"{capital(rest)}." if rest else "",
        blocks=list(_sections(result)),
        series=_names(result),
    )


def _names(result: TrialsResult) -> list[str]:
    """The names of the rates, which have a colour each."""
    return [short_rate(value) for value in result.rates]


def _sections(result: TrialsResult) -> Iterator[Section]:
    charts = []
    for place, setup in enumerate(result.setups):
        charts.append(_chart_by_rate(setup, place))
        charts.append(_chart_by_step(setup, place, _names(result)))
    notes = Notes([Text(note) for note in _notes(result)])
    yield Section("", [Columns(charts), notes], "glance", listed=False)
    yield Section("Each trial", [_table(result)], "trials", MEANING)
    if result.command:
        yield Section("How it was made", [Code(result.command)], "how")


def _notes(result: TrialsResult) -> Iterator[str]:
    yield from result.lines[1:]
    if result.plan:
        yield f"The plan: {result.plan}."
    for trial in result.counted:
        if trial.stopped:
            yield f"{short_rate(trial.rate)} ended early: {trial.stopped}."


# ------------------------------------------------------------------------------------------------- charts


def _chart_by_rate(setup: TrialsResult, place: int) -> Chart:
    """The loss at the end against the rate; ``place`` is that of the setup among all."""
    trials, usable = setup.counted, _usable_rates(setup)
    has_entropy = setup.unigram is not None and setup.unigram <= setup.reference
    reference_words = "unigram entropy" if has_entropy else "loss at the start"

    def draw(_: int) -> Drawn:
        import polars as pl

        from normlab.report.charts.rates import loss_by_rate

        schema = {"rate": pl.Float64, "loss": pl.Float64, "ended": pl.String}
        points = [(trial.rate, trial.loss, trial.stopped) for trial in trials]
        return loss_by_rate(
            pl.DataFrame(points, schema=schema, orient="row"),
            today=setup.current_rate,
            usable=(min(usable), max(usable)) if usable else None,
            reference=setup.reference,
            words=reference_words,
        )

    marks = (
        "Band: worse than the best by at most 5% of what it learnt, up to the highest such rate; a long "
        "training may use lower ones. Cross: ended early."
    )
    rows = [
        {"learning rate": short_rate(trial.rate), "loss": trial.loss, "ended early": trial.stopped}
        for trial in trials
    ]
    if isfinite(setup.reference):
        rows.append({"learning rate": reference_words, "loss": setup.reference, "ended early": ""})
    return Chart(f"rates-{place}", _titled("Loss by rate", setup), "", draw, rows, marks)


def _usable_rates(setup: TrialsResult) -> list[float]:
    """The usable rates, without those above a rate that is not usable."""
    if setup.usable is None:
        return []
    highest = setup.usable[1]
    return [trial.rate for trial in setup.counted if trial.usable and trial.rate <= highest]


def _chart_by_step(setup: TrialsResult, place: int, names: Sequence[str]) -> Chart:
    """The losses of each trial, smoothed; ``names`` are those of all rates in the order of their colours."""
    trials, entropy = setup.counted, setup.unigram
    curves = [_smooth(trial.losses) for trial in trials]

    def draw(points: int) -> Drawn:
        import polars as pl

        from normlab.report.charts.curves import CurveAxis, mean_curves

        rows: list[tuple[Any, ...]] = []
        for trial, losses in zip(trials, curves, strict=True):
            name = short_rate(trial.rate)
            outcome = ENDED_EARLY if trial.stopped else "trained"
            rows += [(name, name, outcome, 0, step, loss) for step, loss in enumerate(losses, start=1)]
        texts = dict.fromkeys((SERIES, "run", "outcome"), pl.String)
        schema = {**texts, "seed": pl.Int64, "step": pl.Int64, "loss": pl.Float64}
        frame = pl.DataFrame(rows, schema=schema, orient="row")
        title = "loss" if entropy is None else "nats a target"
        axis = CurveAxis("loss", title, number=".3f", height=260)
        return mean_curves(frame, names, axis, entropy_nats=entropy, points=points)

    caption = f"Means of {SMOOTH} steps."
    marks = "A cross ends the line of a trial that ended early."
    headings = _distinct([trial.rate for trial in trials])
    rows = [
        {"step": step, **dict(zip(headings, losses, strict=True))}
        for step, losses in enumerate(zip_longest(*curves), start=1)  # a trial that ended early has fewer
    ]
    return Chart(f"steps-{place}", _titled("Loss by step", setup), caption, draw, rows, marks)


def _distinct(rates: Sequence[float]) -> list[str]:
    """The rates in two digits, or in more where two would be equal."""
    short = [short_rate(value) for value in rates]
    return short if len(set(short)) == len(short) else [rate(value) for value in rates]


def _smooth(losses: Sequence[float]) -> list[float]:
    return [fmean(losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(losses))]


def _titled(title: str, setup: TrialsResult) -> str:
    return f"{title}, with {setup.change}" if setup.change else title


# -------------------------------------------------------------------------------------------------- table


def _table(result: TrialsResult) -> PageTable:
    """A row per rate; for each setup its loss, and how far that is behind the best."""
    header = ["learning rate"]
    header += [f"with {setup.change}" if setup.change else "loss" for setup in result.setups]
    rows = []
    for value in result.rates:
        name = Cell(short_rate(value), "today" if value == result.current_rate else "")
        rows.append([name, *(_loss_cell(setup, value) for setup in result.setups)])
    return PageTable(header, rows)


def _loss_cell(setup: TrialsResult, value: float) -> Cell:
    """The cell of a setup's loss at a rate."""
    trial = setup.at(value)
    if trial is None:
        return Cell("–", "not tried", tone="faint")
    if trial.loss is None:
        return Cell("–", trial.stopped, tone="alarm")
    if trial.rate == setup.best:
        return Cell(f"{trial.loss:.3f}", "best", tone="best")
    least = min(other.loss for other in setup.counted if other.loss is not None)
    behind = f"+{trial.loss - least:.3f}"
    if trial.usable:
        return Cell(f"{trial.loss:.3f}", behind)
    return Cell(f"{trial.loss:.3f}", f"{behind}, more than 5% of what the best learnt", tone="faint")

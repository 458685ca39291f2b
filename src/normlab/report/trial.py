"""The page of trials: which rates train, each trial's losses, and the same with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import altair as alt
import polars as pl

from normlab.config.io import validated
from normlab.config.units import count, duration, short_rate
from normlab.report.charts.curves import CurveAxis, curve
from normlab.report.charts.theme import Drawn, finish, log_or_linear, nothing, rows
from normlab.report.page import (
    Block,
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
    require_parts,
    write_page,
)

PARTS: Final = "model trials sentence lines plan today usable unigram reference facts"
SMOOTH: Final = 8
"""Steps over which the losses of a curve are averaged: batches differ by more than rates do."""


@validated
def write_trial_page(trials: Mapping[str, Any], path: Path) -> Path:
    """Write the page of ``Trials.to_dict()``, to which ``title`` and ``command`` may be added.

    Raises UserError if a part is missing.
    """
    return write_page(path, trial_page(trials))


def trial_page(trials: Mapping[str, Any]) -> str:
    """Draw what ``write_trial_page`` receives as one self-contained HTML page."""
    require_parts(trials, PARTS, "Trials.to_dict()")
    every = [trials, *trials["beside"]]
    rates = sorted({t["rate"] for one in every for t in one["trials"]})
    facts = [f"{name} {value}" for name, value in trials["facts"].items()]
    number = sum(len(one["trials"]) for one in every)
    headline, _, rest = trials["sentence"].partition("; ")
    return Page(
        title=str(trials.get("title") or f"Learning rates of {trials['model']}"),
        headline=headline,
        facts=[*facts, f"{count(number, 'trial')} in {duration(trials['seconds'])}"],
        lead=f"{capital(rest)}." if rest else "",
        blocks=list(_sections(trials, every, list(map(short_rate, rates)))),
        recipes=list(map(short_rate, rates)),
    ).html()


def _sections(
    trials: Mapping[str, Any], every: Sequence[Mapping[str, Any]], rates: Sequence[str]
) -> Iterator[Section]:
    notes = [Text(line) for line in trials["lines"][1:]]
    notes += [Text(f"Before it began: {trials['plan']}.")] if trials["plan"] else []
    notes += [
        Text(f"{short_rate(t['rate'])} ended early: {t['stopped']}.") for t in _own(trials) if t["stopped"]
    ]
    charts: list[Block] = [
        chart for i, one in enumerate(every) for chart in (_by_rate(one, i), _by_step(one, i, rates))
    ]
    blocks: list[Block] = [Columns(charts), Notes(notes)]
    yield Section("", blocks, "glance", listed=False)
    yield Section("Each trial", [_table(every)], "trials", _MEANING)
    if trials.get("command"):
        yield Section("How it was made", [Code(str(trials["command"]))], "how")


_MEANING: Final = (
    "Every trial trains a copy from the same start, on the same batches and random numbers. The loss is the "
    "mean of the last tenth of the steps. What a long training ends at is not known from these."
)


def _own(trials: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The trials of which the answer is, by rate."""
    return [t for t in trials["trials"] if t["steps"] == trials["steps"]]


def _by_rate(trials: Mapping[str, Any], i: int) -> Chart:
    rows = [{"rate": t["rate"], "loss": t["loss"], "ended": t["stopped"]} for t in _own(trials)]
    schema = {"rate": pl.Float64, "loss": pl.Float64, "ended": pl.String}
    table = pl.DataFrame(rows, schema=schema)
    inside = [t["rate"] for t in _own(trials) if t["usable"] and t["rate"] <= trials["usable"][1]]
    entropy = trials["unigram"] is not None and trials["unigram"] <= trials["reference"]
    words = "unigram entropy" if entropy else "loss at the start"
    picture = loss_by_rate(
        table,
        today=trials["today"],
        usable=(min(inside), max(inside)) if inside else None,
        reference=trials["reference"],
        words=words,
    )
    caption = (
        "Band: within 5% of the best here, to the highest such rate; a long training may use lower ones. "
        "Cross: ended early."
    )
    return Chart(f"rates-{i}", _titled("Loss by rate", trials), caption, picture, table)


def _by_step(trials: Mapping[str, Any], i: int, rates: Sequence[str]) -> Chart:
    rows = [
        {"recipe": name, "run": name, "seed": 0, "outcome": outcome, "step": step, "loss": loss}
        for t in _own(trials)
        for name, outcome in [(short_rate(t["rate"]), "diverged" if t["stopped"] else "trained")]
        for step, loss in enumerate(_smooth([float(x) for x in t["losses"]]), start=1)
    ]
    table = pl.DataFrame(rows, schema=_CURVES)
    axis = CurveAxis(
        "loss", "nats a target" if trials["unigram"] is not None else "loss", number=".3f", height=260
    )
    caption = f"Means of {SMOOTH} steps. A line that ends in a cross ended early."
    entropy = trials["unigram"]
    return Chart(
        f"steps-{i}",
        _titled("Loss by step", trials),
        caption,
        lambda points: curve(table, rates, axis, entropy_nats=entropy, points=points),
        table.select("recipe", "step", "loss"),
    )


_CURVES: Final = {
    **dict.fromkeys(("recipe", "run", "outcome"), pl.String),
    "seed": pl.Int64,
    "step": pl.Int64,
    "loss": pl.Float64,
}


def _smooth(losses: Sequence[float]) -> list[float]:
    return [fmean(losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(losses))]


def _table(every: Sequence[Mapping[str, Any]]) -> PageTable:
    """Rates down, and for each setup its loss and what it is behind the best."""
    rates = sorted({t["rate"] for one in every for t in _own(one)})
    rows = [
        [
            Cell(short_rate(value), "today" if value == every[0]["today"] else ""),
            *(_cell(one, value) for one in every),
        ]
        for value in rates
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


HEIGHT = 260


def loss_by_rate(
    trials: pl.DataFrame, *, today: float, usable: tuple[float, float] | None, reference: float, words: str
) -> Drawn:
    """Draw ``loss`` against ``rate``; a trial that ended early, without a loss, is a cross at the top.

    ``trials`` has ``rate``, ``loss`` (null: it ended early) and ``ended``. The band is the range that trains,
    the dashed line today's rate; the dotted one is ``reference``, by its ``words``.
    """
    if trials.is_empty():
        return nothing(HEIGHT)
    whole = trials.filter(pl.col("loss").is_finite())
    low = min([reference, *whole["loss"].to_list()])
    top = max([reference, *whole["loss"].to_list()])
    edge = max(top - low, 1e-9) * 0.08
    scale, axis = log_or_linear([*trials["rate"].to_list(), today], log=True)
    x = alt.X("rate:Q", scale=scale, axis=axis, title="learning rate")
    domain = alt.Scale(domain=[low - edge, top + 2 * edge], nice=False, zero=False)
    y = alt.Y("loss:Q", scale=domain, title="loss at the end", axis=alt.Axis(tickCount=5))
    shown = trials.with_columns(loss=pl.col("loss").fill_null(top + edge))
    tips = [alt.Tooltip("rate:Q", format=".2~e"), alt.Tooltip("loss:Q", format=".3f"), "ended:N"]
    layers: list[Any] = []
    if usable is not None:
        band = alt.Chart(alt.InlineData(values=[{"rate": usable[0], "end": usable[1]}]))
        layers.append(band.mark_rect(opacity=0.12, style="ink").encode(x=x, x2="end:Q"))
    level = alt.Chart(alt.InlineData(values=[{"loss": reference, "words": words}]))
    layers.append(level.mark_rule(strokeDash=[2, 3], style="faint").encode(y=y))
    text = level.mark_text(align="right", baseline="top", dx=-4, dy=4, style="faint")
    layers.append(text.encode(y=y, x=alt.value("width"), text="words:N"))
    now = alt.Chart(alt.InlineData(values=[{"rate": today, "words": "today"}]))
    layers.append(now.mark_rule(strokeDash=[6, 4], style="ink").encode(x=x))
    name = now.mark_text(align="left", baseline="bottom", dx=4, dy=-4, style="ink", fontSize=11)
    layers.append(name.encode(x=x, y=alt.value("height"), text="words:N"))
    if len(whole):
        line = alt.Chart(rows(whole)).encode(x=x, y=y, tooltip=tips)
        layers.append(line.mark_line(point=alt.OverlayMarkDef(size=50, filled=True)))
    if len(early := shown.filter(pl.col("ended") != "")):
        cross = alt.Chart(rows(early)).mark_point(shape="cross", angle=45, size=60, style="alarm")
        layers.append(cross.encode(x=x, y=y, tooltip=[tips[0], tips[2]]))
    return finish(layers, HEIGHT)

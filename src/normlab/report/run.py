"""The pages of one run, and of a training that was watched elsewhere: outcome, curves, probes, the reports of
the flight recorder, scores and configuration.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import altair as alt
import polars as pl
from markupsafe import Markup

from normlab.base.files import read_json, write_output
from normlab.base.metric import IGNORES_SOURCE, NLL
from normlab.base.units import count, duration, rate
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.runs.folder import RunFolder, Status, read_scores
from normlab.report.charts.comparison import CurveAxis
from normlab.report.charts.theme import POINTS, Drawn, downsample, finish, has_place, layer, log_or_linear
from normlab.report.comparison_charts import LOSS, NORM, SPIKY_POINTS, curves, dev_axis
from normlab.report.page import (
    Block,
    Cell,
    Chart,
    Columns,
    Notes,
    Page,
    PageTable,
    Section,
    Text,
    anchor,
    capital,
    labelled,
)
from normlab.report.runs import RunView, marks, run_details, run_frame, seed_of, view
from normlab.watching import NOTES

SIDES: Final = ("training", "dev", "dev, sources exchanged")


def run_page(folder: Path) -> str:
    """Return the run in ``folder`` as one self-contained HTML page, even while it is still running.

    Raises:
        UserError: the folder holds no readable run.
    """
    folder = folder.resolve()
    run = view(folder.parent, folder.name)
    if run.config is None or run.status is None:
        raise UserError(f"{folder} holds no readable run ({run.problem}); `normlab run list` lists the runs")
    details, kept = run_details(run, {}), RunFolder(folder)
    return Page(
        title=f"{run.config.recipe}, run {run.id}",
        headline=_headline(run, run.config, run.status),
        facts=_facts(run, run.config, run.status),
        lead=run.status.outcome.evidence if run.status.outcome else "",
        blocks=[
            Section("", [_pictures(run)], "pictures", listed=False),
            *flown(kept.flights()),
            *watched(kept.probes()),
            *_test(run, read_scores(kept.best_scores)),
            Section("The run, exactly", details.blocks, f"run-{run.id}"),
        ],
        recipes=_sides(run),
    ).html()


def _headline(run: RunView, config: Config, status: Status) -> Markup:
    name = Markup('{} at <span class="whole">{}</span>').format(config.recipe, rate(config.optim.lr))
    score = f": {run.best} on dev" if run.best else ""
    if run.outcome in ("trained", IGNORES_SOURCE):
        return Markup("{} {}{}").format(name, run.outcome, score)
    if run.outcome in ("stuck", "diverged"):
        verb = "was stuck" if run.outcome == "stuck" else "diverged"
        return Markup("{} {} at step {}").format(name, verb, f"{status.step:,}")
    state = {"new": "has not begun", "running": "is running", "interrupted": "was interrupted"}
    said = state.get(run.outcome, "ended in an error" if run.outcome == "failed" else run.outcome)
    return Markup("{} {} (step {}){}").format(name, said, f"{status.step:,}", score)


def _facts(run: RunView, config: Config, status: Status) -> list[str]:
    facts = [*marks(run), f"seed {seed_of(run)}", f"{status.step:,} of {config.train.steps:,} steps"]
    facts.append(f"{duration(status.train_seconds)} of training")
    ends = run_frame(run, "train", ("tokens", "seconds"), {}).tail(1).to_dicts()
    if ends and ends[0]["tokens"] and ends[0]["seconds"]:
        facts.append(f"{ends[0]['tokens'] / ends[0]['seconds']:,.0f} target tokens a second")
    return [*facts, status.hardware] if status.hardware else facts


def _pictures(run: RunView) -> Columns:
    train = _named(run, "train", SIDES[0], ("nll", "grad_norm_l2", "lr"))
    dev = _named(run, "dev", SIDES[1], ("nll",))
    both = pl.concat([train.drop("grad_norm_l2", "lr"), dev, _exchanged(run)])
    loss = replace(LOSS, extremes=True, height=260)
    rates = CurveAxis("lr", "learning rate", zero=True, number=".3g")
    nll = "Negative log-likelihood (NLL), without label smoothing."
    if len(_sides(run)) > 2:
        nll += " The model reads its source if exchanging the sources raises the loss."
    norm = "Before clipping, log scale; the band shows single spikes."
    charts = [
        curves("loss", "Loss", nll, both, SIDES, loss),
        *_dev_charts(run),
        curves("grad-norm", "Gradient norm", norm, train, SIDES, NORM, most=SPIKY_POINTS),
        curves("lr", "Learning rate", "", train, SIDES, rates),
    ]
    return Columns(charts)


def _exchanged(run: RunView) -> pl.DataFrame:
    """Return the dev loss with sources exchanged; no row for a run that has not measured it."""
    return _named(run, "dev", SIDES[2], ("nll_exchanged",)).rename({"nll_exchanged": "nll"}).drop_nulls("nll")


def _sides(run: RunView) -> tuple[str, ...]:
    """Return the names of the lines, in the order of their colours."""
    return SIDES if len(_exchanged(run)) else SIDES[:2]


def _dev_charts(run: RunView) -> list[Chart]:
    """Return a chart for each dev metric of the task; none before the first validation."""
    dev = _named(run, "dev", SIDES[1], [m.name for m in run.task_metrics])
    return [
        curves(f"dev-{m.name}", f"Dev {m.label}", "", dev, SIDES, replace(dev_axis(m), height=260))
        for m in run.task_metrics
        if m != NLL and not dev[m.name].is_null().all()
    ]


def _test(run: RunView, beside: Mapping[str, Any]) -> list[Section]:
    columns = [run.scores, beside] if beside else [run.scores]
    rows = [
        [Cell(metric.title), *(Cell(metric.shown(scores[metric.name])) for scores in columns)]
        for metric in run.task_metrics
        if all(metric.name in scores for scores in columns)
    ]
    if not rows:
        return []
    header = ("score", *["average of the last checkpoints"] * bool(beside), "best checkpoint")
    return [Section("On the test text", [PageTable(header, rows)], "test")]


def _named(run: RunView, kind: str, side: str, columns: Sequence[str]) -> pl.DataFrame:
    constants = {"recipe": side, "run": f"{run.id} {side}", "seed": seed_of(run), "outcome": run.outcome}
    return run_frame(run, kind, columns, constants)


CURVES: Final = {
    ("after", "rms"): ("Stream", "rms", "After each sublayer."),
    ("branch", "rms"): ("Branches", "rms", "The output of each branch, before it is added."),
    ("grad_after", "rms"): ("Gradient in the stream", "rms", "The gradient of the loss after each sublayer."),
    ("grad", "l2"): ("Gradient norm", "L2 norm", "All parameters of a sublayer."),
    ("weight", "l2"): ("Weight norm", "L2 norm", "All parameters of a sublayer."),
    ("update", "ratio"): ("Update", "relative to the weights", "One step of a sublayer's parameters."),
    ("after", "max_abs"): ("Largest entry of the stream", "absolute value", "After each sublayer."),
}
"""Title, axis and caption of a signal and its statistic."""

MODULES: Final = 100
"""A chart of modules outside sublayers shows at most so many of them."""

KEY: Final = ("step", "module", "signal", "statistic", "value")
POINT: Final = ("step", "module", "depth", "value")


def watched(rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Draw the probes of sublayers over the steps, one chart per stack; nothing if there are none."""
    found = [row for row in rows if row.get("stack") and row.get("index") is not None]
    if not found:
        return []
    labels = _labels(str(row["stack"]) for row in found)
    frame = pl.DataFrame([_point(row, row["index"], labels[row["stack"]]) for row in found])
    charts: list[Block] = []
    for (signal, statistic), (title, axis, caption) in CURVES.items():
        for label in labels.values():
            one = frame.filter(signal=signal, statistic=statistic, label=label).select(*POINT)
            if len(one):
                chart = Chart(f"{signal}-{statistic}", title, caption, curves_by_depth(one, axis), one)
                charts.append(labelled(chart, label))
    intro = "A line per sublayer: light is the first, dark the last; point at a line for its name."
    return [Section("Inside the model", [Columns(charts)], "probes", intro)] if charts else []


def _point(row: Mapping[str, Any], depth: int, label: str) -> dict[str, Any]:
    words = {name: str(row[name]) for name in ("module", "signal", "statistic")}
    if row.get("role"):
        words["module"] = f"{row['module']} ({row['role'].replace('_', '-')} of layer {row['layer']})"
    return {**words, "step": int(row["step"]), "depth": depth, "label": label, "value": float(row["value"])}


def _labels(stacks: Iterable[str]) -> dict[str, str]:
    """Name each stack by its container's path, without the last name unless that tells stacks apart."""
    distinct = list(dict.fromkeys(stacks))
    short = {stack: stack.rpartition(".")[0] for stack in distinct}
    shared = Counter(short.values())
    plain = {s for s in distinct if short[s] and shared[short[s]] == 1 and not short[s][-1].isdigit()}
    return {stack: short[stack] if stack in plain else stack for stack in distinct}


def write_probes_page(file: Path, page: Path) -> Path:
    """Draw the rows that a trainer wrote to ``file`` as JSON lines, with the recorder's reports beside it;
    return the path of the page.

    Raises UserError for a file that does not hold such rows, and FileNotFoundError if there is none.
    """
    rows = list(_rows(file))
    flight = file.with_suffix(".flight.json")
    beside = read_json(flight) if flight.exists() else {}
    notes = [Text(note) for note in beside.get("notes", ())]
    sections = [
        *flown(beside.get("reports", ())),
        *([Section("Not watched", [Notes(notes)], "notes")] if notes else []),
        *watched(rows),
        *_others(rows),
    ]
    if not sections:
        raise UserError(f"{file} holds no rows of probes; a trainer writes them after each measured step")
    steps = sorted({int(row["step"]) for row in rows})
    facts = [
        f"steps {steps[0]:,} to {steps[-1]:,}",
        count(len(steps), "measured step"),
        count(len({row["module"] for row in rows}), "module"),
        count(len(rows), "row"),
    ]
    title = f"Training of {file.name}"
    write_output(page, Page(title, _what_went_wrong(beside), facts, "", sections).html())
    return page


def _what_went_wrong(beside: Mapping[str, Any]) -> Markup:
    """State what went wrong first, else the first thing to note, else that nothing went wrong."""
    reports = [dict(report.get("trigger") or {}) for report in beside.get("reports", ())]
    ended = [trigger for trigger in reports if trigger.get("kind") not in NOTES]
    if not reports and beside.get("losses") == 0:
        return Markup("No loss was recorded; no gradient or update went wrong in the steps watched")
    if not reports:
        return Markup("Nothing went wrong in the steps watched")
    words = str((ended or reports)[0].get("words", "")) or "the training went wrong"
    return Markup.escape(capital(words))


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file, without a last line that was cut off."""
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise UserError(f"line {number} of {file} is not JSON: {error}") from error
        missing = [name for name in KEY if not isinstance(row, dict) or name not in row]
        if missing:
            raise UserError(
                f"line {number} of {file} has no {' and no '.join(missing)}; rows of probes have "
                f"{', '.join(KEY)}"
            )
        yield row


def _others(rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Draw the probes of modules outside sublayers, one chart per signal and statistic."""
    found = [row for row in rows if row.get("index") is None]
    charts: list[Block] = []
    for signal, statistic in Counter((str(row["signal"]), str(row["statistic"])) for row in found):
        here = [r for r in found if (r["signal"], r["statistic"]) == (signal, statistic)]
        order = {module: i for i, module in enumerate(dict.fromkeys(str(r["module"]) for r in here))}
        if len(order) > MODULES:
            continue
        frame = pl.DataFrame([_point(r, order[str(r["module"])], "") for r in here]).select(*POINT)
        loss = signal == "loss"
        title, axis = ("loss", "loss") if loss else (f"{signal}, {statistic}".replace("_", " "), statistic)
        drawn = curves_by_depth(frame, axis, log=not loss)
        charts.append(Chart(f"modules-{anchor(signal)}-{statistic}", capital(title), "", drawn, frame))
    intro = "A line per module, from light to dark in the order of measurement."
    return [Section("Modules", [Columns(charts)], "modules", intro)] if charts else []


def flown(reports: Sequence[Mapping[str, Any]]) -> list[Section]:
    """The reports of the recorder: each verdict with its evidence."""
    blocks = [block for report in reports for block in _report(report)]
    how = (
        "by repeating the steps with every module watched"
        if any(r.get("replay") for r in reports)
        else "in the loop, and in the norms of every parameter's gradient and update over the last steps"
    )
    intro = f"What went wrong first, found {how}."
    return [Section("Flight recorder", blocks, "flight", intro)] if blocks else []


def _report(report: Mapping[str, Any]) -> list[Block]:
    trigger, verdict, replay = (dict(report.get(key) or {}) for key in ("trigger", "verdict", "replay"))
    begun = f"the checkpoint of step {replay.get('from_step')}" if replay.get("checkpoint") else "the start"
    words = {True: ", every known loss as before", False: ", not as before", None: ""}
    why = f"written in step {report.get('step')}: {trigger.get('words', '')}"
    repeated = [f"repeated from {begun}{words[replay.get('agrees')]}"] if replay else []
    evidence = [why, *verdict.get("evidence", ()), *repeated]
    said = str(verdict.get("sentence", "no verdict"))
    return [
        Text(f"{capital(said)}.", "alarm" if verdict.get("module") else ""),
        Notes([Text(str(line)) for line in evidence]),
    ]


POINTS_A_CHART: Final = 12_000
"""Points over all lines, so that the page of a deep model does not become too large."""
HEIGHT: Final = 240


def curves_by_depth(frame: pl.DataFrame, title: str, *, log: bool = True) -> Drawn:
    """Draw a line of ``value`` over ``step`` per ``module``, shaded by ``depth`` from 0, dark if alone.

    A line has at most 400 points, each the mean of a bin. Values that are not finite are left out, and on a
    log axis those that are not above 0.
    """
    shown = frame.filter(has_place("value", log=log))
    lines = shown["module"].n_unique()
    points = max(20, min(POINTS, POINTS_A_CHART // max(1, lines)))
    few = downsample(shown, "step", "value", ["module", "depth"], points).drop("low", "high")
    zero = "datum.value === 0 ? '0' : datum.label"
    x = alt.X("step:Q", title="step", axis=alt.Axis(format="~s", tickCount=5, grid=False, labelExpr=zero))
    scale, axis = log_or_linear(few["mean"].to_list(), log=log)
    y = alt.Y("mean:Q", title=title, scale=scale, axis=axis)
    shades = [min(0, lines - 2), lines - 1]
    colour = alt.Color("depth:Q", title="sublayer", scale=alt.Scale(range="ramp", domain=shades), legend=None)
    own = partial(layer, few, x=x, y=y, color=colour, detail="module:N")
    value = alt.Tooltip("mean:Q", title=title, format=".3g")
    told = [alt.Tooltip("module:N"), alt.Tooltip("step:Q", format=",.4~r"), value]
    line = own("line", {"strokeWidth": 1.5, "clip": True})
    return finish(line + own("point", {"size": 50, "opacity": 0}, tooltip=told), HEIGHT)

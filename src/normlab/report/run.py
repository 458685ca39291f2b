"""The page of one run: outcome, curves, probes, the reports of the flight recorder, scores, configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import polars as pl
from markupsafe import Markup

from normlab.base.metric import IGNORES_SOURCE, NLL
from normlab.base.rows import require_probes
from normlab.base.units import duration, rate
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.runs.folder import RunFolder, Status, read_scores
from normlab.report.charts.curves import CurveAxis
from normlab.report.curve_charts import LOSS, NLL_CAPTION, NORM, SPIKY_POINTS, curve_chart, dev_axis
from normlab.report.page import Cell, Chart, Columns, Page, PageTable, Section
from normlab.report.runs import (
    CurveLabels,
    RunView,
    curve_frame,
    marks,
    run_details,
    run_frame,
    seed_of,
    view,
)
from normlab.report.watch import flight_sections, sublayer_sections

TRAINING, DEV, EXCHANGED = "training", "dev", "dev, sources exchanged"
SIDES: Final = (TRAINING, DEV, EXCHANGED)
"""The lines of the page's charts, in the order of their colours."""
STATES: Final = {
    "new": "has not begun",
    "running": "is running",
    "interrupted": "was interrupted",
    "failed": "ended in an error",
}
"""What is said of a run that has no outcome."""


def run_page(folder: Path) -> str:
    """Return the run in ``folder`` as one self-contained HTML page, even while it is still running.

    Raises:
        UserError: the folder holds no readable run.
    """
    folder = folder.resolve()
    run = view(folder.parent, folder.name)
    if run.config is None or run.status is None:
        raise UserError(f"{folder} holds no readable run ({run.problem}); `normlab run list` lists the runs")
    files = RunFolder(folder)
    probes = files.probes()
    require_probes(probes, folder / "probes.jsonl")
    return Page(
        title=f"{run.config.recipe}, run {run.id}",
        headline=_headline(run, run.config, run.status),
        facts=_facts(run, run.config, run.status),
        lead=run.status.outcome.evidence if run.status.outcome else "",
        blocks=[
            Section("", [_charts(run)], "pictures", listed=False),
            *flight_sections(files.flights()),
            *sublayer_sections(probes),
            *_test(run, read_scores(files.best_scores)),
            Section("The run, exactly", run_details(run, {}).blocks, "settings"),
        ],
        series=_sides(run),
    ).html()


def _headline(run: RunView, config: Config, status: Status) -> Markup:
    name = Markup('{} at <span class="whole">{}</span>').format(config.recipe, rate(config.optim.lr))
    score = f": {run.best} on dev" if run.best else ""
    if run.outcome in ("trained", IGNORES_SOURCE):
        return Markup("{} {}{}").format(name, run.outcome, score)
    if run.outcome in ("stuck", "diverged"):
        verb = "was stuck" if run.outcome == "stuck" else "diverged"
        return Markup("{} {} at step {}").format(name, verb, f"{status.step:,}")
    state = STATES.get(run.outcome, run.outcome)
    return Markup("{} {} (step {}){}").format(name, state, f"{status.step:,}", score)


def _facts(run: RunView, config: Config, status: Status) -> list[str]:
    facts = [*marks(run), f"seed {seed_of(run)}", f"{status.step:,} of {config.train.steps:,} steps"]
    facts.append(f"{duration(status.train_seconds)} of training")
    last_row = run_frame(run, "train", ("tokens", "seconds")).tail(1)
    for tokens, seconds in last_row.select("tokens", "seconds").iter_rows():
        if tokens and seconds:
            facts.append(f"{tokens / seconds:,.0f} target tokens a second")
    if status.hardware:
        facts.append(status.hardware)
    return facts


def _charts(run: RunView) -> Columns:
    """Return the curves of the run: losses, dev scores, norms of the gradient and learning rates."""
    train = _side(run, "train", TRAINING, ("nll", "grad_norm_l2", "lr"))
    dev = _side(run, "dev", DEV, ("nll",))
    losses = pl.concat([train.drop("grad_norm_l2", "lr"), dev, _exchanged(run)])
    loss_axis = replace(LOSS, extremes=True, height=260)
    rate_axis = CurveAxis("lr", "learning rate", zero=True, number=".3g")
    nll = NLL_CAPTION
    if EXCHANGED in _sides(run):
        nll += " The model reads its source if exchanging the sources raises the loss."
    norm = "Before clipping, log scale; the band shows single spikes."
    charts = [
        curve_chart("loss", "Loss", nll, losses, SIDES, loss_axis),
        *_dev_charts(run),
        curve_chart("grad-norm", "Gradient norm", norm, train, SIDES, NORM, most=SPIKY_POINTS),
        curve_chart("lr", "Learning rate", "", train, SIDES, rate_axis),
    ]
    return Columns(charts)


def _exchanged(run: RunView) -> pl.DataFrame:
    """Return the dev loss with sources exchanged; no row for a run that has not measured it."""
    frame = _side(run, "dev", EXCHANGED, ("nll_exchanged",))
    return frame.rename({"nll_exchanged": "nll"}).drop_nulls("nll")


def _sides(run: RunView) -> tuple[str, ...]:
    """Return the names of the lines, in the order of their colours."""
    return SIDES if len(_exchanged(run)) else (TRAINING, DEV)


def _dev_charts(run: RunView) -> list[Chart]:
    """Return a chart for each dev metric of the task; none before the first validation."""
    dev = _side(run, "dev", DEV, [metric.name for metric in run.task_metrics])
    charts = []
    for metric in run.task_metrics:
        if metric != NLL and not dev[metric.name].is_null().all():
            axis = replace(dev_axis(metric), height=260)
            charts.append(curve_chart(f"dev-{metric.name}", f"Dev {metric.label}", "", dev, SIDES, axis))
    return charts


def _test(run: RunView, best_scores: Mapping[str, Any]) -> list[Section]:
    """Return the table of test scores; ``best_scores`` are those of the best checkpoint if the run's own are
    those of an average.
    """
    columns = {"best checkpoint": run.scores}
    if best_scores:
        columns = {"average of the last checkpoints": run.scores, "best checkpoint": best_scores}
    rows = [
        [Cell(metric.title), *(Cell(metric.shown(scores[metric.name])) for scores in columns.values())]
        for metric in run.task_metrics
        if all(metric.name in scores for scores in columns.values())
    ]
    if not rows:
        return []
    return [Section("On the test text", [PageTable(("score", *columns), rows)], "test")]


def _side(run: RunView, kind: str, side: str, columns: Sequence[str]) -> pl.DataFrame:
    """Return the rows of one kind as the curves of one line of the charts."""
    return curve_frame(run, kind, columns, CurveLabels(side, f"{run.id} {side}", seed_of(run), run.outcome))

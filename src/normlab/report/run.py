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
from normlab.report.charts.comparison import CurveAxis
from normlab.report.comparison_charts import LOSS, NORM, SPIKY_POINTS, curves, dev_axis
from normlab.report.page import Cell, Chart, Columns, Page, PageTable, Section
from normlab.report.runs import RunView, marks, run_details, run_frame, seed_of, view
from normlab.report.watch import flown, watched

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
    probes = kept.probes()
    require_probes(probes, folder / "probes.jsonl")
    return Page(
        title=f"{run.config.recipe}, run {run.id}",
        headline=_headline(run, run.config, run.status),
        facts=_facts(run, run.config, run.status),
        lead=run.status.outcome.evidence if run.status.outcome else "",
        blocks=[
            Section("", [_pictures(run)], "pictures", listed=False),
            *flown(kept.flights()),
            *watched(probes),
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

"""The charts of a comparison's page: results at a glance, curves, the sweep, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import polars as pl

from normlab.comparison.result import Comparison
from normlab.config.metric import NLL, Metric
from normlab.report import tables
from normlab.report.charts.curves import Axis, curve
from normlab.report.charts.downsample import POINTS
from normlab.report.charts.scores import score_dots, sensitivity, time_bars
from normlab.report.page import Chart, Grid, Notes, Section, Text
from normlab.report.runs import RunView
from normlab.report.words import rate

SPIKY_POINTS: Final = 60
"""Of a curve that is mostly noise: few points make its mean readable, the band keeps every spike."""

LOSS: Final = Axis("nll", NLL.title)
NORM: Final = Axis("grad_norm_l2", "L2 norm", log=True, extremes=True, number=".3g")


def dev_axis(metric: Metric) -> Axis:
    """Return the axis of a dev score; it begins at zero if higher is better."""
    zero = metric.higher_is_better
    return Axis(metric.name, f"dev {metric.title}", zero=zero, number=f".{metric.digits}f")


def curves(
    name: str, title: str, caption: str, frame: pl.DataFrame, lines: Sequence[str], axis: Axis, **how: Any
) -> Chart:
    """Return the chart of a frame's curves, drawn by ``figures.curves``, with the frame as its table."""
    most = how.pop("points", POINTS)
    return Chart(
        name, title, caption, lambda points: curve(frame, lines, axis, points=min(points, most), **how), frame
    )


def pictures(comparison: Comparison, views: Mapping[str, RunView], known: Sequence[Text]) -> list[Section]:
    """Return the sections of charts, the most important first; ``known`` stands below the first two."""
    recipes = [r.name for r in comparison.recipes]
    result, seeds = tables.results(comparison), tables.seed_scores(comparison)
    headline, decides = comparison.headline, comparison.rate_metric
    far = "below half" if headline.higher_is_better else "above twice"
    first = [
        Chart(
            f"test-{headline.name}",
            f"Test {headline.label}",
            "Ticks: single seeds, crosses those that did not train. Dot: mean over the seeds that "
            f"trained; bar: its 95% interval, where other seeds would put the mean. A recipe {far} the "
            "best score and beyond the axis is written at the left edge.",
            score_dots(result, seeds, recipes, headline),
            result,
        )
    ]
    if len(comparison.lrs) > 1:
        sweep = tables.trials(comparison)
        first.append(
            Chart(
                "learning-rate",
                "Sensitivity to the learning rate",
                "Ring: chosen. Hollow square: stuck; hollow cross: diverged; hollow diamond: ignores its "
                "source; at the bad end of the axis without a score. Points at one learning rate stand "
                "slightly apart so that all can be seen.",
                sensitivity(sweep, recipes, sorted(comparison.lrs), decides),
                sweep,
            )
        )
    return [
        Section("", [Grid(first), Notes(known)], "glance", listed=False),
        Section("While training", [_seed_grid(comparison, views)], "training", _CURVES),
        *_sweep_section(comparison, views),
        _time_section(comparison, views),
    ]


_CURVES: Final = (
    "At each recipe's chosen learning rate. Line: mean over the seeds that trained; band: from the lowest "
    "to the highest of them. A run that was stuck, diverged or ignores its source has a thin line of its "
    "own, which ends in a square, a cross or a diamond where the run ended or left the chart."
)


def _seed_grid(comparison: Comparison, views: Mapping[str, RunView]) -> Grid:
    recipes = [r.name for r in comparison.recipes]
    train = tables.seed_curves(comparison, views, "train", tables.TRAIN)
    dev = tables.seed_curves(comparison, views, "dev", [m.name for m in comparison.validated])
    nats = comparison.unigram_entropy_nats
    nll = "Negative log-likelihood (NLL), without label smoothing."
    norm = "Before clipping, log scale. Here the band shows single spikes, too."
    charts = [
        curves(f"dev-{m.name}", f"Dev {m.label}", "At each validation.", dev, recipes, dev_axis(m))
        for m in comparison.validated
    ]
    loss = curves("train-nll", "Training loss", nll, train, recipes, LOSS, entropy_nats=nats)
    return Grid(
        [*charts, loss, curves("grad-norm", "Gradient norm", norm, train, recipes, NORM, points=SPIKY_POINTS)]
    )


def _sweep_section(comparison: Comparison, views: Mapping[str, RunView]) -> list[Section]:
    if len(comparison.lrs) < 2:
        return []
    recipes = [r.name for r in comparison.recipes]
    axis = replace(LOSS, height=190)
    entropy = comparison.unigram_entropy_nats
    charts = []
    for lr in sorted(comparison.lrs):
        frame, name = tables.trial_curves(comparison, views, lr), f"train-nll-lr-{rate(lr)}"
        title = f"Learning rate {rate(lr)}"
        charts.append(curves(name, title, "", frame, recipes, axis, entropy_nats=entropy))
    intro = f"Training loss of every recipe at every learning rate, seed {comparison.sweep_seed}."
    return [Section("The sweep, run by run", [Grid(charts, wide=310)], "sweep", intro)]


def _time_section(comparison: Comparison, views: Mapping[str, RunView]) -> Section:
    recipes = [r.name for r in comparison.recipes]
    result = tables.results(comparison)
    metric = comparison.dev_metric
    dev = tables.by_minutes(tables.seed_curves(comparison, views, "dev", (metric.name, "seconds")))
    dev = tables.by_tokens(dev, tables.seed_curves(comparison, views, "train", tables.TRAIN))
    bars = Chart(
        "time",
        "Training time of a run",
        "Median over the seeds. Stuck and diverged runs are stopped early.",
        time_bars(result, recipes),
        result.select("recipe", "minutes", "total_minutes", "note"),
    )
    axis = replace(dev_axis(metric), height=260)
    minutes = replace(axis, x="minutes", x_title="training time, minutes", x_number="~g")
    seen = replace(axis, x="seen", x_title="training tokens")
    name, title = f"dev-{metric.name}", f"Dev {metric.label} against"
    pace = "At each recipe's mean speed over its seeds."
    by_time = curves(f"{name}-by-time", f"{title} time", pace, dev, recipes, minutes)
    told = "Tokens that were predicted in training."
    by_tokens = curves(f"{name}-by-tokens", f"{title} tokens", told, dev, recipes, seen)
    return Section("Cost", [Grid([by_time, by_tokens, bars])], "cost")

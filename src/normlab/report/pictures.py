"""The picture sections of a comparison's page: results at a glance, curves, the sweep, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from normlab.figures.curves import Axis, curve
from normlab.figures.downsample import POINTS
from normlab.figures.scores import bleu_dots, sensitivity, time_bars
from normlab.report import tables
from normlab.report.page import Chart, Grid, Notes, Section, Text
from normlab.report.runs import RunView
from normlab.report.words import rate
from normlab.spec.comparison import Comparison

POINTS_A_PAGE: Final = 60_000
"""Over all lines of a page, about 50 bytes each: with Vega's 0.9 MB it stays well below 5 MB."""

SPIKY_POINTS: Final = 60
"""Of a curve that is mostly noise: few points make its mean readable, the band keeps every spike."""

AXES: Final = {
    "dev-bleu": Axis("bleu", "dev BLEU", zero=True, number=".1f"),
    "dev-bleu-by-time": Axis(
        "bleu", "dev BLEU", zero=True, number=".1f", height=260, x="minutes", x_title="training time, minutes"
    ),
    "dev-nll": Axis("nll", "nats per token"),
    "train-nll": Axis("nll", "nats per token"),
    "grad-norm": Axis("grad_norm_l2", "L2 norm", log=True, extremes=True, number=".3g"),
}


def pictures(comparison: Comparison, views: Mapping[str, RunView], known: Sequence[Text]) -> list[Section]:
    """Sections of charts, the most telling first; ``known`` stands right below the first two."""
    recipes = [r.name for r in comparison.recipes]
    result, seeds, sweep = (
        tables.results(comparison),
        tables.seed_scores(comparison, views),
        tables.trials(comparison),
    )
    ticks = " Ticks: single seeds." if len(seeds) else ""
    first = [
        Chart(
            "test-bleu",
            "Test BLEU",
            f"Dot: mean over seeds; bar: 95% interval over sentences and seeds.{ticks} "
            "A recipe below half the best score is written at the left edge.",
            bleu_dots(result, seeds, recipes),
            result,
        )
    ]
    if len(comparison.lrs) > 1:
        first.append(
            Chart(
                "learning-rate",
                "Who is sensitive to the learning rate?",
                "Ring: chosen. Hollow square: stuck; hollow cross: diverged; at zero if it has no score. "
                "Points at one learning rate stand slightly apart so that all can be seen.",
                sensitivity(sweep, recipes, sorted(comparison.lrs)),
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
    "to the highest of them. A run that was stuck or diverged has a thin line of its own, ending in a square "
    "or a cross where it was stopped or left the picture."
)


def _seed_grid(comparison: Comparison, views: Mapping[str, RunView]) -> Grid:
    recipes = [r.name for r in comparison.recipes]
    train = tables.seed_curves(comparison, views, "train", tables.TRAIN)
    dev = tables.seed_curves(comparison, views, "dev", tables.DEV)
    entropy, points = comparison.unigram_entropy_nats, _points(comparison)
    charts = [
        Chart(
            "dev-bleu",
            "Dev BLEU",
            "Greedy decoding, at each validation.",
            curve(dev, recipes, AXES["dev-bleu"]),
            dev,
        ),
        Chart(
            "dev-nll",
            "Dev loss",
            "Negative log-likelihood of a dev token.",
            curve(dev, recipes, AXES["dev-nll"]),
            dev,
        ),
        Chart(
            "train-nll",
            "Training loss",
            "Negative log-likelihood, without label smoothing.",
            curve(train, recipes, AXES["train-nll"], entropy_nats=entropy, points=points),
            train,
        ),
        Chart(
            "grad-norm",
            "Gradient norm",
            "Before clipping, log scale. Here the band shows single spikes, too.",
            curve(train, recipes, AXES["grad-norm"], points=min(points, SPIKY_POINTS)),
            train,
        ),
    ]
    return Grid(charts)


def _sweep_section(comparison: Comparison, views: Mapping[str, RunView]) -> list[Section]:
    if len(comparison.lrs) < 2:
        return []
    recipes = [r.name for r in comparison.recipes]
    axis = Axis("nll", "nats per token", height=190)
    entropy, points = comparison.unigram_entropy_nats, _points(comparison)
    charts = []
    for lr in sorted(comparison.lrs):
        frame = tables.trial_curves(comparison, views, lr)
        drawn = curve(frame, recipes, axis, entropy_nats=entropy, points=points)
        charts.append(Chart(f"train-nll-lr-{rate(lr)}", f"Learning rate {rate(lr)}", "", drawn, frame))
    intro = "Training loss of every recipe at every learning rate, first seed: where each one stops learning."
    return [Section("The sweep, run by run", [Grid(charts, wide=310)], "sweep", intro)]


def _time_section(comparison: Comparison, views: Mapping[str, RunView]) -> Section:
    recipes = [r.name for r in comparison.recipes]
    result = tables.results(comparison)
    dev = tables.by_minutes(tables.seed_curves(comparison, views, "dev", ("bleu", "seconds")))
    bars = Chart(
        "time",
        "Training time of a run",
        "Median over the seeds. A run that was stopped early is cheap for a bad reason.",
        time_bars(result, recipes),
        result.select("recipe", "minutes", "total_minutes", "note"),
    )
    bought = Chart(
        "dev-bleu-by-time",
        "What a minute buys",
        "Dev BLEU against training time, at each recipe's mean speed over its seeds.",
        curve(dev, recipes, AXES["dev-bleu-by-time"]),
        dev,
    )
    return Section("Cost in time", [Grid([bars, bought])], "time")


def _points(comparison: Comparison) -> int:
    """Points a line so that the page keeps its size whatever the number of runs."""
    lines = sum(2 * (1 + len(r.runs)) + len(r.trials) for r in comparison.recipes)
    return max(60, min(POINTS, POINTS_A_PAGE // max(1, lines)))

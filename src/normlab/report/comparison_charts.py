"""The charts of a comparison's page, the most important first: scores, curves, the sweep, the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import polars as pl

from normlab.base.metric import Metric
from normlab.base.units import rate
from normlab.lab.comparison.result import Comparison
from normlab.report.charts.comparison import far_in_words, score_dots, sensitivity, time_bars
from normlab.report.comparison_frames import (
    TRAIN,
    against_cost,
    recipe_results,
    seed_curves,
    seed_scores,
    sweep_scores,
    trial_curves,
)
from normlab.report.comparison_words import words
from normlab.report.curve_charts import LOSS, NLL_CAPTION, NORM, SPIKY_POINTS, curve_chart, dev_axis
from normlab.report.page import Chart, Columns, Notes, Section, Text
from normlab.report.runs import RunView


def chart_sections(
    comparison: Comparison, views: Mapping[str, RunView], notes: Sequence[Text]
) -> list[Section]:
    """Return the sections of charts; the notes stand below the first chart, or the first two."""
    results = recipe_results(comparison)
    is_swept = len(comparison.lrs) > 1
    at_a_glance = [_scores_chart(comparison, results)]
    if is_swept:
        at_a_glance.append(_rates_chart(comparison))
    sections = [
        Section("", [Columns(at_a_glance), Notes(notes)], "glance", listed=False),
        _training_section(comparison, views),
    ]
    if is_swept:
        sections.append(_sweep_section(comparison, views))
    sections.append(_cost_section(comparison, views, results))
    return sections


def _names(comparison: Comparison) -> list[str]:
    return [recipe.name for recipe in comparison.recipes]


def _scores_chart(comparison: Comparison, results: pl.DataFrame) -> Chart:
    metric = comparison.headline
    seeds = seed_scores(comparison)
    return Chart(
        f"test-{metric.name}",
        f"Test {metric.label}",
        words(comparison.noun)["scores"].format(far=far_in_words(metric)),
        lambda _: score_dots(results, seeds, _names(comparison), metric),
        csv=results.write_csv,
    )


def _rates_chart(comparison: Comparison) -> Chart:
    sweep = sweep_scores(comparison)
    rates = sorted(comparison.lrs)
    return Chart(
        "learning-rate",
        "Sensitivity to the learning rate",
        words(comparison.noun)["sweep"],
        lambda _: sensitivity(sweep, _names(comparison), rates, comparison.rate_metric),
        csv=sweep.write_csv,
    )


def _training_section(comparison: Comparison, views: Mapping[str, RunView]) -> Section:
    """Return the curves of the reported seeds; without norms of the gradient there is no chart of them."""
    recipes = _names(comparison)
    train = seed_curves(comparison, views, "train", TRAIN)
    dev = seed_curves(comparison, views, "dev", [metric.name for metric in comparison.validated])
    charts = [
        curve_chart(
            f"dev-{metric.name}", f"Dev {metric.label}", "At each validation.", dev, recipes, dev_axis(metric)
        )
        for metric in comparison.validated
    ]
    entropy = comparison.unigram_entropy_nats
    charts.append(
        curve_chart("train-nll", "Training loss", NLL_CAPTION, train, recipes, LOSS, entropy_nats=entropy)
    )
    if train[NORM.column].count():
        caption = "Before clipping, log scale. Here the band shows single spikes, too."
        charts.append(
            curve_chart("grad-norm", "Gradient norm", caption, train, recipes, NORM, most=SPIKY_POINTS)
        )
    intro = words(comparison.noun)["training"]
    return Section("While training", [Columns(charts)], "training", intro)


def _sweep_section(comparison: Comparison, views: Mapping[str, RunView]) -> Section:
    """Return the training curves at every learning rate."""
    recipes = _names(comparison)
    entropy = comparison.unigram_entropy_nats
    axis = replace(LOSS, height=190)
    charts = []
    for lr in sorted(comparison.lrs):
        frame = trial_curves(comparison, views, lr)
        name, title = f"train-nll-lr-{rate(lr)}", f"Learning rate {rate(lr)}"
        charts.append(curve_chart(name, title, "", frame, recipes, axis, entropy_nats=entropy))
    intro = f"Training loss of every {comparison.noun} at every learning rate, seed {comparison.sweep_seed}."
    return Section("The sweep, run by run", [Columns(charts, wide=310)], "sweep", intro)


class _Cost(NamedTuple):
    """A cost of training against which a dev score is drawn."""

    noun: str
    """What the chart's title calls it."""
    caption: str
    column: str
    """Its column in the frame of ``against_cost``."""
    axis_title: str
    tick_format: str
    """A format of d3."""


TOKENS: Final = _Cost("tokens", "Tokens that were predicted in training.", "seen", "training tokens", "~s")
FLOPS: Final = _Cost(
    "FLOPs", "Of matrix products in the forward and backward passes.", "flops", "training FLOPs", "~e"
)


def _time_of(noun: str) -> _Cost:
    caption = f"At each {noun}'s mean speed over its seeds."
    return _Cost("time", caption, "minutes", "training time, minutes", "~r")


def _cost_section(comparison: Comparison, views: Mapping[str, RunView], results: pl.DataFrame) -> Section:
    """Return the dev score against time, tokens and FLOPs where they are known, and the time of a run."""
    recipes = _names(comparison)
    metric = comparison.dev_metric
    scores = seed_curves(comparison, views, "dev", (metric.name, "seconds"))
    dev = against_cost(scores, seed_curves(comparison, views, "train", TRAIN), comparison)
    # the time is always known, tokens and FLOPs are not
    costs = [_time_of(comparison.noun)]
    costs += [cost for cost in (TOKENS, FLOPS) if (dev[cost.column] > 0).any()]
    charts = [_chart_against(cost, dev, metric, recipes) for cost in costs]
    charts.append(
        Chart(
            "time",
            "Training time of a run",
            "Median over the seeds. Stuck and diverged runs are stopped early.",
            lambda _: time_bars(results, recipes),
            csv=results.select("recipe", "minutes", "total_minutes", "note").write_csv,
        )
    )
    return Section("Cost", [Columns(charts)], "cost")


def _chart_against(cost: _Cost, dev: pl.DataFrame, metric: Metric, recipes: Sequence[str]) -> Chart:
    """Return the curves of a dev score over a cost instead of the steps."""
    axis = replace(
        dev_axis(metric), height=260, x=cost.column, x_title=cost.axis_title, x_number=cost.tick_format
    )
    name = f"dev-{metric.name}-by-{cost.noun.lower()}"
    return curve_chart(name, f"Dev {metric.label} against {cost.noun}", cost.caption, dev, recipes, axis)

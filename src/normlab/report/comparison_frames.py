"""A comparison as polars frames, which its charts draw and which lie as CSV files beside its page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import polars as pl

from normlab.base.metric import NLL
from normlab.base.units import duration
from normlab.lab.comparison.result import Comparison
from normlab.report.runs import CurveLabels, RunView, curve_frame

TRAIN = ("nll", "grad_norm_l2", "tokens")
"""Columns of the rows of training that the page needs."""


def all_runs(comparison: Comparison) -> list[str]:
    """Return every run id once: by recipe, the sweep first, then the other seeds, then failed runs."""
    ids: list[str] = []
    for recipe in comparison.recipes:
        ids += [trial.run for trial in recipe.trials]
        ids += recipe.runs
    ids += comparison.failed_runs
    return [run for run in dict.fromkeys(ids) if run]


# --------------------------------------------------------------------------------------- curves over steps


def seed_curves(
    comparison: Comparison, views: Mapping[str, RunView], kind: str, columns: Sequence[str]
) -> pl.DataFrame:
    """Return the curves of each recipe at its chosen learning rate, one row per step and run."""
    labels = [
        CurveLabels(recipe.name, run, str(seed), outcome)
        for recipe in comparison.recipes
        for run, seed, outcome in zip(recipe.runs, comparison.seeds, recipe.outcomes, strict=False)
    ]
    return _frame_of_curves(labels, views, kind, columns)


def trial_curves(comparison: Comparison, views: Mapping[str, RunView], lr: float) -> pl.DataFrame:
    """Return the training curves of every recipe at one learning rate, with the seed of the sweep."""
    seed = str(comparison.sweep_seed)
    labels = [
        CurveLabels(recipe.name, trial.run, seed, trial.outcome)
        for recipe in comparison.recipes
        for trial in recipe.trials
        if trial.lr == lr
    ]
    return _frame_of_curves(labels, views, "train", ("nll",))


def _frame_of_curves(
    labels: Iterable[CurveLabels], views: Mapping[str, RunView], kind: str, columns: Sequence[str]
) -> pl.DataFrame:
    """Return the curves of those runs that have a view, below each other; each has its own labels."""
    # an empty frame comes first, so that there are columns even if no run has a view
    frames = [curve_frame(RunView(""), kind, columns, CurveLabels("", "", "", ""))]
    for curve in labels:
        if curve.run in views:
            frames.append(curve_frame(views[curve.run], kind, columns, curve))
    return pl.concat(frames)


def against_cost(dev: pl.DataFrame, train: pl.DataFrame, comparison: Comparison) -> pl.DataFrame:
    """Add to the rows of dev scores what training up to their step took: ``minutes``, ``seen`` (the tokens
    that were predicted) and ``flops``, which is null if the recipe's FLOPs are not known.

    All seeds of a recipe are given its mean pace. At a pace of its own, each seed would reach a step at
    another cost, and their curves could not be averaged.

    ``tokens`` and ``seconds`` of a run's rows count from the start of the run, so that each row tells the
    mean pace up to its step. Their sum over all rows, divided by the sum of the steps, is the mean of these
    paces, weighted by the step: a row far into a run, which averages over more, counts more.
    """
    flops = {
        recipe.name: recipe.cost.flops_per_token if recipe.cost else None for recipe in comparison.recipes
    }
    # here the column ``tokens`` holds tokens per step
    pace = train.group_by("recipe").agg(tokens=pl.col("tokens").sum() / pl.col("step").sum())
    tokens_per_step = pl.col("tokens")
    seconds_per_step = (pl.col("seconds").sum() / pl.col("step").sum()).over("recipe")
    seen = pl.col("step") * tokens_per_step
    return dev.join(pace, on="recipe", how="left").with_columns(
        minutes=pl.col("step") * seconds_per_step / 60,
        seen=seen,
        flops=seen * pl.col("recipe").replace_strict(flops, return_dtype=pl.Float64),
    )


# ------------------------------------------------------------------------------------------------ scores


def sweep_scores(comparison: Comparison) -> pl.DataFrame:
    """Return the sweep, one row per recipe and learning rate; ``dev`` is the score that decides."""
    rows = [
        {
            "recipe": recipe.name,
            "lr": trial.lr,
            "run": trial.run,
            "dev": trial.dev.get(comparison.rate_by),
            "dev_nll": trial.dev.get(NLL.name),
            "outcome": trial.outcome,
            "chosen": trial.lr == recipe.lr,
        }
        for recipe in comparison.recipes
        for trial in recipe.trials
    ]
    schema = {
        "recipe": pl.String,
        "lr": pl.Float64,
        "run": pl.String,
        "dev": pl.Float64,
        "dev_nll": pl.Float64,
        "outcome": pl.String,
        "chosen": pl.Boolean,
    }
    return pl.DataFrame(rows, schema=schema)


def recipe_results(comparison: Comparison) -> pl.DataFrame:
    """Return one row per recipe: the headline test score (``value``) with the ends of its interval, the other
    test scores by name, how many seeds trained, the chosen learning rate and the time.
    """
    headline = comparison.headline
    others = [metric for metric in comparison.tested if metric != headline]
    rows = []
    for recipe in comparison.recipes:
        interval = recipe.means.get(headline.name)
        rows.append(
            {
                "recipe": recipe.name,
                "value": recipe.value(headline),
                "low": interval.low if interval else None,
                "high": interval.high if interval else None,
                **{metric.name: recipe.value(metric) for metric in others},
                "trained": recipe.trained,
                "seeds": recipe.ended,
                "lr": recipe.lr,
                "note": recipe.states if recipe.trained < len(recipe.outcomes) else "",
                "minutes": recipe.train_seconds / 60,
                "total_minutes": recipe.total_seconds / 60,
                "words": duration(recipe.train_seconds),
            }
        )
    schema = {
        "recipe": pl.String,
        **dict.fromkeys(("value", "low", "high"), pl.Float64),
        **dict.fromkeys((metric.name for metric in others), pl.Float64),
        **dict.fromkeys(("trained", "seeds", "lr"), pl.Float64),
        "note": pl.String,
        **dict.fromkeys(("minutes", "total_minutes"), pl.Float64),
        "words": pl.String,
    }
    return pl.DataFrame(rows, schema=schema)


def seed_scores(comparison: Comparison) -> pl.DataFrame:
    """Return the headline test score of each seed's run, if it has one."""
    headline = comparison.headline.name
    rows: list[tuple[str | float, ...]] = []
    for recipe in comparison.recipes:
        scores = recipe.scores.get(headline, ())
        runs = zip(comparison.seeds, recipe.runs, recipe.outcomes, scores, strict=False)
        rows += [
            (recipe.name, str(seed), run, outcome, float(score))
            for seed, run, outcome, score in runs
            if score is not None
        ]
    schema = {**dict.fromkeys(("recipe", "seed", "run", "outcome"), pl.String), "value": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")

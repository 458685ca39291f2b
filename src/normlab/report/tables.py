"""The comparison and its runs as polars frames, for the figures and the CSV files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import polars as pl

from normlab.comparison.result import Comparison
from normlab.config.metric import NLL
from normlab.config.units import duration
from normlab.report.runs import RunView, metrics_frame

TRAIN = ("nll", "grad_norm_l2", "tokens")
WHO = {"recipe": pl.String, "run": pl.String, "seed": pl.String, "outcome": pl.String}


def all_runs(comparison: Comparison) -> list[str]:
    """Return every run id once: by recipe, the sweep first, then the other seeds, then failed runs."""
    ids = [run for r in comparison.recipes for run in (*(t.run for t in r.trials), *r.runs)]
    ids += [entry.partition(":")[0].strip() for entry in comparison.failed]
    return [run for run in dict.fromkeys(ids) if run]


def seed_curves(
    comparison: Comparison, views: Mapping[str, RunView], kind: str, columns: Sequence[str]
) -> pl.DataFrame:
    """Return the curves of each recipe at its chosen learning rate, one row per step and run."""
    entries = [
        (recipe.name, run, str(seed), outcome)
        for recipe in comparison.recipes
        for run, seed, outcome in zip(recipe.runs, comparison.seeds, recipe.outcomes, strict=False)
    ]
    return _curves(entries, views, kind, columns)


def trial_curves(comparison: Comparison, views: Mapping[str, RunView], lr: float) -> pl.DataFrame:
    """Return the training curves of every recipe at one learning rate, with the seed of the sweep."""
    seed = str(comparison.sweep_seed)
    entries = [(r.name, t.run, seed, t.outcome) for r in comparison.recipes for t in r.trials if t.lr == lr]
    return _curves(entries, views, "train", ("nll",))


def by_minutes(curves: pl.DataFrame) -> pl.DataFrame:
    """Add ``minutes`` of training: steps times the recipe's mean time per step; its seeds stay aligned."""
    pace = (pl.col("seconds").sum() / pl.col("step").sum()).over("recipe")
    return curves.with_columns(minutes=pl.col("step") * pace / 60)


def by_tokens(curves: pl.DataFrame, train: pl.DataFrame) -> pl.DataFrame:
    """Add ``seen``, the number of training tokens predicted up to a step, from the training rows."""
    pace = train.group_by("recipe").agg(pace=pl.col("tokens").sum() / pl.col("step").sum())
    return curves.join(pace, on="recipe", how="left").with_columns(seen=pl.col("step") * pl.col("pace"))


def trials(comparison: Comparison) -> pl.DataFrame:
    """Return the sweep, one row per recipe and learning rate; ``dev`` is the score that decides."""
    rows = [
        (r.name, t.lr, t.run, t.dev.get(comparison.rate_by), t.dev.get(NLL.name), t.outcome, t.lr == r.lr)
        for r in comparison.recipes
        for t in r.trials
    ]
    schema = {"recipe": pl.String, "lr": pl.Float64, "run": pl.String, "dev": pl.Float64}
    schema |= {"dev_nll": pl.Float64, "outcome": pl.String, "chosen": pl.Boolean}
    return pl.DataFrame(rows, schema=schema, orient="row")


def results(comparison: Comparison) -> pl.DataFrame:
    """Return one row per recipe: the headline test score (``value``) with the ends of its interval, the other
    test scores by name, how many seeds trained, the chosen learning rate and the time.
    """
    headline = comparison.headline
    rows = [
        {
            "recipe": r.name,
            "value": r.value(headline),
            "low": found.low if found else None,
            "high": found.high if found else None,
            **{m.name: r.value(m) for m in comparison.tested if m != headline},
            "trained": r.trained,
            "seeds": r.ended,
            "lr": r.lr,
            "note": r.states if r.trained < len(r.outcomes) else "",
            "minutes": r.train_seconds / 60,
            "total_minutes": r.total_seconds / 60,
            "words": duration(r.train_seconds),
        }
        for r in comparison.recipes
        for found in [r.means.get(headline.name)]
    ]
    texts = ("recipe", "note", "words")
    schema = {name: pl.String if name in texts else pl.Float64 for name in (rows[0] if rows else texts)}
    return pl.DataFrame(rows, schema=schema)


def seed_scores(comparison: Comparison) -> pl.DataFrame:
    """Return the headline test score of each seed's run, if it has one."""
    rows = [
        (recipe.name, str(seed), run, outcome, float(value))
        for recipe in comparison.recipes
        for seed, run, outcome, value in zip(
            comparison.seeds,
            recipe.runs,
            recipe.outcomes,
            recipe.scores.get(comparison.headline.name, (None,) * len(recipe.runs)),
            strict=False,
        )
        if value is not None
    ]
    schema = {
        "recipe": pl.String,
        "seed": pl.String,
        "run": pl.String,
        "outcome": pl.String,
        "value": pl.Float64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _curves(
    runs: Iterable[tuple[str, str, str, str]], views: Mapping[str, RunView], kind: str, columns: Sequence[str]
) -> pl.DataFrame:
    parts = [pl.DataFrame(schema=WHO | {"step": pl.Int64} | dict.fromkeys(columns, pl.Float64))]
    for who in runs:
        if who[1] in views:
            constants = [pl.lit(value).alias(name) for name, value in zip(WHO, who, strict=True)]
            frame = metrics_frame(views[who[1]], kind, columns)
            parts.append(frame.select(*constants, "step", *columns))
    return pl.concat(parts)

"""The comparison and its runs as polars frames: what the figures draw and what the CSV files hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import polars as pl

from normlab.report.runs import RunView, metrics_frame
from normlab.spec.comparison import Comparison, RecipeResult, Trial
from normlab.spec.units import duration

TRAIN = ("nll", "grad_norm_l2")
DEV = ("nll", "bleu")
WHO = {"recipe": pl.String, "run": pl.String, "seed": pl.String, "outcome": pl.String}


def all_runs(comparison: Comparison) -> list[str]:
    """Every run id once: by recipe, the sweep first, then the further seeds, then those that failed."""
    ids = [run for r in comparison.recipes for run in (*(t.run for t in r.trials), *r.runs)]
    ids += [entry.partition(":")[0].strip() for entry in comparison.failed]
    return [run for run in dict.fromkeys(ids) if run]


def seed_curves(
    comparison: Comparison, views: Mapping[str, RunView], kind: str, columns: Sequence[str]
) -> pl.DataFrame:
    """The runs of each recipe at its chosen learning rate: a row a step and run."""
    entries = [
        (recipe.name, run, str(seed), outcome)
        for recipe in comparison.recipes
        for run, seed, outcome in zip(recipe.runs, comparison.seeds, recipe.outcomes, strict=False)
    ]
    return _curves(entries, views, kind, columns)


def trial_curves(comparison: Comparison, views: Mapping[str, RunView], lr: float) -> pl.DataFrame:
    """Training curves of every recipe at one learning rate, first seed."""
    seed = str(comparison.seeds[0]) if comparison.seeds else ""
    entries = [(r.name, t.run, seed, t.outcome) for r in comparison.recipes for t in r.trials if t.lr == lr]
    return _curves(entries, views, "train", ("nll",))


def by_minutes(curves: pl.DataFrame) -> pl.DataFrame:
    """Adds ``minutes`` of training: steps at the recipe's mean time a step; its seeds stay aligned."""
    pace = (pl.col("seconds").sum() / pl.col("step").sum()).over("recipe")
    return curves.with_columns(minutes=pl.col("step") * pace / 60)


def trials(comparison: Comparison) -> pl.DataFrame:
    """The sweep: a row a recipe and learning rate."""
    rows = [
        (r.name, t.lr, t.run, t.dev_bleu, t.dev_nll, t.outcome, t.lr == r.lr)
        for r in comparison.recipes
        for t in r.trials
    ]
    schema = {"recipe": pl.String, "lr": pl.Float64, "run": pl.String, "dev_bleu": pl.Float64}
    schema |= {"dev_nll": pl.Float64, "outcome": pl.String, "chosen": pl.Boolean}
    return pl.DataFrame(rows, schema=schema, orient="row")


def results(comparison: Comparison) -> pl.DataFrame:
    """A row a recipe: test scores with the interval's ends, the chosen learning rate, time."""
    rows = [
        {
            "recipe": r.name,
            "bleu": r.bleu.value if r.bleu else None,
            "low": r.bleu.low if r.bleu else None,
            "high": r.bleu.high if r.bleu else None,
            "chrf": r.chrf,
            "bleu_tokenised": r.bleu_tokenised,
            "dev_bleu": r.dev_bleu,
            "lr": r.lr,
            "note": outcome_note(r.outcomes),
            "minutes": r.train_seconds / 60,
            "total_minutes": r.total_seconds / 60,
            "words": duration(r.train_seconds),
        }
        for r in comparison.recipes
    ]
    texts = ("recipe", "note", "words")
    schema = {name: pl.String if name in texts else pl.Float64 for name in (rows[0] if rows else texts)}
    return pl.DataFrame(rows, schema=schema)


def seed_scores(comparison: Comparison, views: Mapping[str, RunView]) -> pl.DataFrame:
    """Test BLEU of each seed's own run, where the run has been scored."""
    rows = [
        (recipe.name, str(seed), run, views[run].test_bleu)
        for recipe in comparison.recipes
        for run, seed in zip(recipe.runs, comparison.seeds, strict=False)
        if run in views and views[run].test_bleu is not None
    ]
    schema = {"recipe": pl.String, "seed": pl.String, "run": pl.String, "bleu": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def outcome_note(outcomes: Sequence[str]) -> str:
    """Empty if every run trained; else ``stuck`` if all share that, or ``1 of 3 seeds stuck``."""
    astray = [o for o in outcomes if o != "trained"]
    if not astray:
        return ""
    kinds = list(dict.fromkeys(astray))
    if len(astray) == len(outcomes):
        return " or ".join(kinds)
    return f"{len(astray)} of {len(outcomes)} seeds {' or '.join(kinds)}"


def best_trial(recipe: RecipeResult) -> Trial | None:
    """The trial whose learning rate was chosen."""
    return next((t for t in recipe.trials if t.lr == recipe.lr), None)


def _curves(
    entries: Iterable[tuple[str, str, str, str]],
    views: Mapping[str, RunView],
    kind: str,
    columns: Sequence[str],
) -> pl.DataFrame:
    parts = [pl.DataFrame(schema=WHO | {"step": pl.Int64} | dict.fromkeys(columns, pl.Float64))]
    for who in entries:
        if who[1] in views:
            constants = [pl.lit(value).alias(name) for name, value in zip(WHO, who, strict=True)]
            frame = metrics_frame(views[who[1]], kind, columns)
            parts.append(frame.select(*constants, "step", *columns))
    return pl.concat(parts)

import dataclasses
from pathlib import Path

import polars as pl
import pytest

from normlab.lab.comparison.result import Comparison
from normlab.report import comparison_frames as frames
from normlab.report.runs import view
from report import example


def test_every_run_once(comparison: Comparison) -> None:
    ids = frames.all_runs(example.without_runs(comparison))
    assert len(ids) == len(set(ids)) == 3 + 6 * 6 + 1
    assert len(frames.all_runs(comparison)) == 7 * 6


def test_curves_of_seeds_and_of_the_sweep(comparison: Comparison, root: Path) -> None:
    views = {run: view(root, run) for run in frames.all_runs(comparison)}
    dev = frames.seed_curves(comparison, views, "dev", ("nll", "bleu"))
    assert dev.columns == ["recipe", "run", "seed", "outcome", "step", "nll", "bleu"]
    assert set(dev.filter(pl.col("recipe") == "pre")["seed"]) == {"1", "2", "3"}
    sweep = frames.trial_curves(comparison, views, 2e-3)
    assert dict(sweep.select("recipe", "outcome").unique().iter_rows())["post"] == "diverged"
    assert set(sweep["seed"]) == {"0"}


def test_curves_of_missing_runs_are_empty(comparison: Comparison) -> None:
    frame = frames.seed_curves(comparison, {}, "train", frames.TRAIN)
    assert frame.is_empty()
    assert frame.schema["nll"] == pl.Float64


def test_minutes_keep_seeds_aligned_and_tokens_are_counted_from_the_rows_of_training(
    comparison: Comparison,
) -> None:
    train = pl.DataFrame({"recipe": ["a", "a"], "step": [10, 20], "tokens": [1e6, 2e6]})
    seconds = [10.0, 20.0, 20.0, 40.0]
    dev = pl.DataFrame({"recipe": ["a"] * 4, "step": [10, 20, 10, 20], "seconds": seconds})
    first, *_ = comparison.recipes
    one = dataclasses.replace(comparison, recipes=(dataclasses.replace(first, name="a"),))
    cost = frames.against_cost(dev, train, one)
    assert cost["minutes"].to_list() == pytest.approx([0.25, 0.5, 0.25, 0.5])
    assert cost["seen"].to_list() == pytest.approx([1e6, 2e6, 1e6, 2e6])
    assert cost["flops"].to_list() == [None] * 4


def test_results_and_scores(comparison: Comparison) -> None:
    result = frames.recipe_results(comparison)
    assert result["recipe"].to_list() == list(example.PLAN)
    assert result["note"].to_list() == ["", "", "", "", "", "", "stuck (3)"]
    seeds = frames.seed_scores(comparison)
    assert seeds["recipe"].n_unique() == 6
    assert seeds.height == 3 * 6
    sweep = frames.sweep_scores(comparison)
    assert sweep.filter("chosen").height == 7
    assert sweep["dev"].null_count() == 2

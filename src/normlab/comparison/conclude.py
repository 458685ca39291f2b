"""The tables of a comparison, computed from its finished runs without knowing any task or metric by name."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np

from normlab.comparison.grid import Grid
from normlab.comparison.significance import Array, differences, interval
from normlab.data.text import read_lines
from normlab.recipes.explain import explain
from normlab.recipes.grammar import describe
from normlab.spec.comparison import Comparison, Interval, RecipeResult, Sample
from normlab.spec.units import count
from normlab.store.examples import read_examples
from normlab.store.folder import RunFolder, read_json

SAMPLES = 8

Statistics = dict[str, dict[str, Array]]
"""Metric to recipe to the statistics of each test example, `[seeds, examples, k]`."""


def conclude(grid: Grid, recipes: Sequence[str], failed: Mapping[str, str]) -> Comparison:
    """Compare those recipes, whose runs have all ended."""
    request, task = grid.request, grid.task
    chosen = {recipe: grid.chosen_lr(recipe) for recipe in recipes}
    folders = {r: [grid.folder(r, chosen[r], seed) for seed in grid.seeds] for r in recipes}
    tested = {r: found for r, runs in folders.items() if (found := [f for f in runs if f.scores.exists()])}
    statistics = _statistics(tested)
    expected = task.test_examples(request.base, grid.corpus)
    outputs = {
        r: [read_lines(f.outputs) for f in runs]
        for r, runs in tested.items()
        if all(f.outputs.exists() for f in runs)
    }
    headline = task.metrics[0].name
    with np.errstate(all="ignore"):  # a run that diverged has scores that are not finite
        intervals = _intervals(grid, statistics)
        compared = differences(
            statistics.get(headline, {}), partial(task.combine, headline), resamples=request.resamples
        )
    return Comparison(
        title=request.title,
        command=request.command,
        date=datetime.date.today().isoformat(),
        machine=_hardware([f for runs in folders.values() for f in runs]),
        task=task.name,
        metrics=task.metrics,
        best_by=task.decides(request.base).name,
        data=grid.corpus.facts,
        seeds=grid.seeds,
        lrs=tuple(request.lrs),
        recipes=tuple(
            _result(
                grid,
                folders[recipe],
                name=recipe,
                lr=chosen[recipe],
                intervals=intervals.get(recipe, {}),
                repeated=_repeated(outputs.get(recipe, []), [right for _, right in expected])
                if task.has_source
                else (),
            )
            for recipe in recipes
        ),
        differences=compared,
        samples=_samples(expected, {recipe: runs[0] for recipe, runs in outputs.items()}),
        open_recipes=tuple(recipe for recipe in request.recipes if recipe not in recipes),
        failed=tuple(f"{run}: {reason}" for run, reason in failed.items()),
        test_is_dev=_test_is_dev(grid),
        overlap=getattr(grid.corpus, "overlap", {}),
        unigram_entropy_nats=grid.corpus.unigram_entropy_nats,
        signatures=next((_scores(f).get("signatures", {}) for runs in tested.values() for f in runs), {}),
        sample_labels=task.example_labels,
    )


def _statistics(tested: Mapping[str, Sequence[RunFolder]]) -> Statistics:
    """The statistics that every tested run of a recipe has kept."""
    found: Statistics = {}
    for recipe, runs in tested.items():
        kept = [read_examples(f.examples) if f.examples.exists() else {} for f in runs]
        for metric in kept[0]:
            if all(metric in examples for examples in kept):
                found.setdefault(metric, {})[recipe] = np.stack([examples[metric] for examples in kept])
    return found


def _intervals(grid: Grid, statistics: Statistics) -> dict[str, dict[str, Interval]]:
    """The mean over seeds with its interval, by recipe and metric."""
    found: dict[str, dict[str, Interval]] = {}
    for metric in grid.task.metrics:
        combine = partial(grid.task.combine, metric.name)
        for recipe, rows in statistics.get(metric.name, {}).items():
            mean = interval(rows, combine, metric, resamples=grid.request.resamples)
            found.setdefault(recipe, {})[metric.name] = mean
    return found


def _result(
    grid: Grid,
    folders: Sequence[RunFolder],
    *,
    name: str,
    lr: float,
    intervals: dict[str, Interval],
    repeated: tuple[float, ...],
) -> RecipeResult:
    statuses = [f.status() for f in folders]
    sweep = [grid.folder(name, other, grid.seeds[0]) for other in grid.request.lrs]
    every = {f.path: f for f in [*sweep, *folders]}.values()
    config = grid.base[name]
    return RecipeResult(
        name=name,
        resolves_to=describe(config),
        trials=tuple(grid.trial(name, rate) for rate in grid.request.lrs),
        lr=lr,
        runs=tuple(f.path.name for f in folders),
        outcomes=tuple(s.outcome.state if s.outcome else s.state for s in statuses),
        scores=_means(grid, [_scores(f) for f in folders if f.scores.exists()]),
        intervals=intervals,
        dev=_means(grid, [s.best_dev for s in statuses]),
        train_seconds=median(s.train_seconds for s in statuses),
        total_seconds=sum(f.status().train_seconds for f in every),
        forced=config.forced,
        explained=explain(config),
        repeated=repeated,
    )


def _scores(folder: RunFolder) -> dict[str, Any]:
    scores: dict[str, Any] = read_json(folder.scores)
    return scores


def _means(grid: Grid, scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each of the task's metrics over the runs that have it."""
    values = {m.name: [s[m.name] for s in scores if m.name in s] for m in grid.task.metrics}
    return {name: fmean(map(float, found)) for name, found in values.items() if found}


def _repeated(outputs: Sequence[Sequence[str]], references: Sequence[str]) -> tuple[float, ...]:
    """The share that the commonest output has, by seed; 0 where the references repeat one as often."""
    shares = [_commonest(lines) for lines in outputs]
    return tuple(share if share > _commonest(references) else 0.0 for share in shares)


def _commonest(lines: Sequence[str]) -> float:
    """The share that the commonest line has."""
    return max(Counter(lines).values()) / len(lines)


def _samples(expected: Sequence[tuple[str, str]], outputs: Mapping[str, Sequence[str]]) -> tuple[Sample, ...]:
    """Test examples on which the recipes disagree, evenly spread over the text."""
    if not outputs or not expected:
        return ()
    disputed = [i for i in range(len(expected)) if len({lines[i] for lines in outputs.values()}) > 1]
    rows = disputed or list(range(len(expected)))
    spread = rows[:: max(1, len(rows) // SAMPLES)][:SAMPLES]
    return tuple(Sample(*expected[i], {name: lines[i] for name, lines in outputs.items()}) for i in spread)


def _hardware(folders: Sequence[RunFolder]) -> str:
    """Return the hardware that the runs were trained on, with their number where it differs."""
    found = Counter(folder.status().hardware or "hardware not recorded" for folder in folders)
    each = [f"{words}: {count(runs, 'run')}" for words, runs in found.items()]
    return "; ".join(found if len(found) == 1 else each)


def _test_is_dev(grid: Grid) -> bool:
    """Whether all of the test text is dev text: it has the same sentences, or none was given for it."""
    if getattr(grid.corpus, "overlap", {}).get("test in dev") == 1:
        return True
    given = [name for name in grid.task.texts if getattr(grid.request.base.data, name)]
    return any(n.startswith("train_") for n in given) and not any(n.startswith("test_") for n in given)

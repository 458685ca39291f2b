"""``normlab compare``: tune a learning rate for each recipe, train the reported seeds, and compare them."""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from normlab.base.io import to_json, validated
from normlab.base.metric import Metric, ratio
from normlab.base.units import count
from normlab.judging import statistics
from normlab.judging.answers import answer_of, mean_of, noise_of, training_of
from normlab.judging.difference import Interval
from normlab.judging.sentences import findings, of_difference
from normlab.lab.comparison.grid import Grid, grid_of
from normlab.lab.comparison.result import (
    CompareRequest,
    Comparison,
    RecipeDifference,
    RecipeResult,
    SweepRun,
    has_trained,
)
from normlab.lab.config import Config
from normlab.lab.data.text import read_lines
from normlab.lab.runs.examples import read_examples
from normlab.lab.runs.folder import RunFolder, read_json, read_scores, write_text_atomic
from normlab.lab.tasks import TASKS
from normlab.lab.training.jobs import Queue, Watch

Publish = Callable[[Comparison], None]


@validated
def compare(
    request: CompareRequest,
    watch: Watch = lambda folders: None,
    publish: Publish = lambda comparison: None,
    *,
    setups: Mapping[str, Any] | None = None,
) -> Comparison:
    """Train every recipe at every learning rate, then the reported seeds at its best rate, and compare these
    on the test text.

    Each recipe's learning rate is chosen by dev loss with a seed of its own, which is not reported; if there
    is just one rate, there is no sweep. A run that diverges, is stuck or fails is a result and stops nothing;
    finished runs are not repeated. After each recipe's last run ``comparison.json`` is written into
    ``request.out`` and ``publish`` is called; until all recipes are finished, the comparison names those that
    are not. ``setups`` are compared instead of recipes: each name has a file, or a function that returns a
    ``normlab.Setup`` and is given ``seed`` if it takes one; functions run in this process.

    >>> request = normlab.CompareRequest(recipes=("post", "pre"), lrs=(5e-3,), seeds=2, base=config, jobs=1)
    >>> comparison = normlab.compare(request)
    >>> [recipe.name for recipe in comparison.recipes], comparison.page("runs/comparison.html").name
    (['post', 'pre'], 'comparison.html')
    """
    grid = grid_of(request, setups)
    request = grid.request
    list(map(grid.recipe, request.recipes))  # find what cannot be counted before the first training
    work = Queue(request.out, grid.request.jobs, watch, grid.start)
    left = {recipe: {(lr, request.sweep_seed) for lr in grid.sweep(recipe)} for recipe in request.recipes}
    reported: set[str] = set()

    def finished(recipe: str) -> bool:
        return recipe in reported and not left[recipe]

    def written() -> Comparison:
        comparison = _conclude(grid, list(filter(finished, request.recipes)), work.failed)
        write_text_atomic(request.out / "comparison.json", to_json(comparison))
        publish(comparison)
        return comparison

    def report(recipe: str) -> None:
        reported.add(recipe)
        left[recipe] = {(grid.chosen_lr(recipe), seed) for seed in grid.seeds}
        for lr, seed in sorted(left[recipe]):
            work.add(grid.config(recipe, lr, seed))

    def after(config: Config) -> None:
        recipe = config.recipe
        left[recipe].discard((config.optim.lr, config.seeds.init))
        if not left[recipe] and recipe not in reported:
            report(recipe)
        elif finished(recipe) and not all(map(finished, request.recipes)):
            written()

    for recipe, lr in grid.sweeps():
        work.add(grid.config(recipe, lr, request.sweep_seed))
    list(map(report, [recipe for recipe in request.recipes if not left[recipe]]))
    work.run(after)
    return written()


def _conclude(grid: Grid, recipes: Sequence[str], failed: Mapping[str, str]) -> Comparison:
    """Compare these recipes, whose runs must all have ended."""
    request = grid.request
    lrs = {r: grid.chosen_lr(r) for r in recipes}
    folders = {r: [grid.folder(r, lr, seed) for seed in grid.seeds] for r, lr in lrs.items()}
    tested = {r: scored for r, runs in folders.items() if (scored := [f for f in runs if f.scores.exists()])}
    written = {r: [run.outputs for run in runs if run.outputs.exists()] for r, runs in tested.items()}
    outputs = {
        grid.label(r): read_lines(files[0]) for r, files in written.items() if len(files) == len(tested[r])
    }
    comparison = Comparison(
        title=request.title,
        command=request.command,
        date=datetime.date.today().isoformat(),
        machine=hardware([f for runs in folders.values() for f in runs]),
        metrics=grid.metrics,
        seeds=grid.seeds,
        lrs=tuple(sorted({lr for recipe in request.recipes for lr in grid.rates(recipe)})),
        recipes=tuple(
            RecipeResult(
                name=grid.label(r),
                trials=grid.trials(r),
                lr=lrs[r],
                runs=tuple(folder.path.name for folder in folders[r]),
                **grid.recipe(r),
            )
            for r in recipes
        ),
        samples=grid.samples(outputs),
        margin=request.margin or grid.metrics[0].margin,
        sweep_seed=request.sweep_seed if grid.sweeps() else None,
        rate_by=grid.rate_metric.name,
        sample_seed=grid.seeds[0],
        open_recipes=tuple(grid.label(recipe) for recipe in request.recipes if recipe not in recipes),
        failed=tuple(f"{run}: {reason}" for run, reason in failed.items()),
        **grid.known(),
    )
    return judge(comparison, request.out, exchanges=request.exchanges)


def hardware(folders: Sequence[RunFolder]) -> str:
    """Return the hardware that the runs were trained on, with the number of runs on each if it differs."""
    counts = Counter(folder.status().hardware or "hardware not recorded" for folder in folders)
    each = [f"{words}: {count(runs, 'run')}" for words, runs in counts.items()]
    return "; ".join(counts if len(counts) == 1 else each)


def judge(comparison: Comparison, root: Path, *, exchanges: int = 2000) -> Comparison:
    """Return the comparison, and compute again what follows from its runs, which are in ``root``.

    Its recipes need names, learning rates and run ids; outcomes, scores, means, differences, sentences and
    the signatures of scores are filled in.
    """
    judged = replace(
        comparison,
        recipes=tuple(_result(r, comparison, root) for r in comparison.recipes),
        signatures=_signatures(comparison, root),
    )
    noise = noise_of((_values(r, judged.headline) for r in judged.recipes), judged.headline)
    judged = replace(judged, differences=_differences(judged, root, exchanges), noise=noise)
    return replace(judged, sentences=findings(judged))


def _signatures(comparison: Comparison, root: Path) -> dict[str, str]:
    """The signature of each metric, or several if its runs were scored in different ways."""
    by_metric: dict[str, dict[str, None]] = {}
    for run in (run for recipe in comparison.recipes for run in recipe.runs):
        scores = RunFolder(root / run).scores
        for name, signature in (read_json(scores) if scores.exists() else {}).get("signatures", {}).items():
            by_metric.setdefault(name, {})[signature] = None
    return {name: " or ".join(signatures) for name, signatures in by_metric.items()}


def _result(recipe: RecipeResult, comparison: Comparison, root: Path) -> RecipeResult:
    every = dict.fromkeys([*(t.run for t in recipe.trials), *recipe.runs])
    status = {run: RunFolder(root / run).status() for run in every}
    result = replace(
        recipe,
        trials=tuple(SweepRun.of(t.run, t.lr, status[t.run]) for t in recipe.trials),
        outcomes=tuple(status[run].ended_as for run in recipe.runs),
        scores=_scores(comparison.metrics, [RunFolder(root / run) for run in recipe.runs]),
        train_seconds=median(status[run].train_seconds for run in recipe.runs),
        total_seconds=sum(each.train_seconds for each in status.values()),
    )
    return replace(
        result,
        trains=statistics.share(result.trained, result.ended) if result.ended else None,
        means={m.name: mean for m in comparison.metrics if (mean := _mean(result, m))},
    )


def _scores(metrics: Sequence[Metric], folders: Sequence[RunFolder]) -> dict[str, tuple[float | None, ...]]:
    """The test scores by metric, one for each run, for the metrics that at least one run has."""
    read = [read_scores(folder.scores) for folder in folders]
    scores = {m.name: tuple(of_run.get(m.name) for of_run in read) for m in metrics}
    return {name: values for name, values in scores.items() if any(value is not None for value in values)}


def _values(recipe: RecipeResult, metric: Metric) -> statistics.Array:
    """Scores on the metric's scale by seed; NaN if the run did not train or has no finite score."""
    scores = recipe.scores.get(metric.name, (None,) * len(recipe.runs))
    pairs = zip(scores, recipe.outcomes, strict=True)
    kept = np.array([s if s is not None and has_trained(o) else np.nan for s, o in pairs], dtype=np.float64)
    return statistics.MetricScale(metric).values(np.where(np.isfinite(kept), kept, np.nan))


def _mean(recipe: RecipeResult, metric: Metric) -> Interval | None:
    """The mean over the seeds that trained; None if none trained, or one of those has no score."""
    values = _values(recipe, metric)
    if np.isnan(values[[has_trained(outcome) for outcome in recipe.outcomes]]).any():
        return None
    return mean_of(values, metric)


def _differences(comparison: Comparison, root: Path, exchanges: int) -> tuple[RecipeDifference, ...]:
    recipes, metric = comparison.ranked, comparison.headline
    if len(recipes) < 2:
        return ()
    values = np.stack([_values(recipe, metric) for recipe in recipes])
    contrast, pairs = statistics.contrasts(values), list(itertools.combinations(range(len(recipes)), 2))
    examples = {recipe.name: _examples(recipe, metric, root) for recipe in recipes}
    judged = []
    for index, (i, j) in enumerate(pairs):
        a, b = recipes[i], recipes[j]
        difference = RecipeDifference(
            a=a.name,
            b=b.name,
            costs=_costs(a, b),
            **answer_of(comparison, contrast, index, values[[i, j]]),
            **training_of(a, b, len(pairs)),
            **_models(examples[a.name], examples[b.name], comparison, exchanges),
        )
        judged.append(replace(difference, sentence=of_difference(difference, comparison)))
    return tuple(judged)


def _costs(a: RecipeResult, b: RecipeResult) -> str:
    """Say how one recipe differs from another in parameters and FLOPs; empty if that is unknown."""
    if a.cost is None or b.cost is None:
        return ""
    parameters = ratio(a.cost.parameters, b.cost.parameters)
    flops = ratio(a.cost.flops, b.cost.flops)
    return f"{a.name} against {b.name}: parameters {parameters}, FLOPs {flops}"


def _examples(recipe: RecipeResult, metric: Metric, root: Path) -> Mapping[int, statistics.Array]:
    """The statistics of each test example under the headline metric, by the index of a seed that trained."""
    examples: dict[int, statistics.Array] = {}
    for index, (run, outcome) in enumerate(zip(recipe.runs, recipe.outcomes, strict=True)):
        kept = RunFolder(root / run).examples
        if has_trained(outcome) and kept.exists() and metric.name in (read := read_examples(kept)):
            examples[index] = read[metric.name]
    return examples


def _models(
    a: Mapping[int, statistics.Array],
    b: Mapping[int, statistics.Array],
    comparison: Comparison,
    exchanges: int,
) -> dict[str, Any]:
    """The difference between these very models, at the seeds at which both trained, and its p."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return {}
    first, second = (np.stack([rows[seed] for seed in seeds]) for rows in (a, b))
    combine = partial(TASKS[comparison.task].combine, comparison.headline.name)
    with np.errstate(all="ignore"):  # scores that are not finite
        delta = combine(first.sum(axis=1)).mean() - combine(second.sum(axis=1)).mean()
        p = statistics.paired_randomisation(first, second, combine, trials=exchanges)
    return {"models": float(delta), "p_models": p}

"""``normlab compare``: tune a learning rate for each recipe, train the reported seeds, and compare them."""

from __future__ import annotations

import datetime
import itertools
import math
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
    for recipe in request.recipes:
        grid.facts(recipe)  # find what cannot be counted before the first training
    schedule = _Schedule(grid)
    work = Queue(request.out, request.jobs, watch, grid.start)

    def conclude() -> Comparison:
        finished = [recipe for recipe in request.recipes if schedule.finished(recipe)]
        comparison = _conclude(grid, finished, work.failed)
        write_text_atomic(request.out / "comparison.json", to_json(comparison))
        publish(comparison)
        return comparison

    def after(config: Config) -> None:
        following = schedule.after(config)
        for next_config in following:
            work.add(next_config)
        if not following and schedule.finished(config.recipe) and not schedule.all_finished():
            conclude()

    for config in schedule.first():
        work.add(config)
    work.run(after)
    return conclude()


class _Schedule:
    """Which runs of a comparison are left: of each recipe its sweep, then the seeds at the chosen rate."""

    def __init__(self, grid: Grid) -> None:
        self._grid, self._recipes = grid, grid.request.recipes
        self._left: dict[str, set[tuple[float, int]]] = {}
        """The rates and seeds of the runs of a recipe that are under way."""
        for recipe in self._recipes:
            self._left[recipe] = {(lr, grid.request.sweep_seed) for lr in grid.sweep(recipe)}
        self._swept: set[str] = set()
        """The recipes whose rate is chosen."""

    def first(self) -> list[Config]:
        """Return the runs to begin with: all sweeps, and the seeds of recipes that have none."""
        configs = [
            self._grid.config(name, lr, self._grid.request.sweep_seed) for name, lr in self._grid.sweeps()
        ]
        for recipe in self._recipes:
            if not self._left[recipe]:
                configs += self._seeds(recipe)
        return configs

    def after(self, config: Config) -> list[Config]:
        """Return the runs that follow a finished one: the seeds of its recipe, once its sweep is complete."""
        recipe = config.recipe
        self._left[recipe].discard((config.optim.lr, config.seeds.init))
        if self._left[recipe] or recipe in self._swept:
            return []
        return self._seeds(recipe)

    def finished(self, recipe: str) -> bool:
        return recipe in self._swept and not self._left[recipe]

    def all_finished(self) -> bool:
        return all(map(self.finished, self._recipes))

    def _seeds(self, recipe: str) -> list[Config]:
        self._swept.add(recipe)
        lr = self._grid.chosen_lr(recipe)
        self._left[recipe] = {(lr, seed) for seed in self._grid.seeds}
        return [self._grid.config(recipe, lr, seed) for seed in sorted(self._grid.seeds)]


def _conclude(grid: Grid, recipes: Sequence[str], failed: Mapping[str, str]) -> Comparison:
    """Compare these recipes, whose runs must all have ended."""
    request = grid.request
    results: list[RecipeResult] = []
    folders: list[RunFolder] = []
    outputs: dict[str, dict[int, Path]] = {}
    for recipe in recipes:
        lr, label = grid.chosen_lr(recipe), grid.label(recipe)
        runs = [grid.folder(recipe, lr, seed) for seed in grid.seeds]
        folders += runs
        results.append(
            RecipeResult(
                name=label,
                trials=grid.trials(recipe),
                lr=lr,
                runs=tuple(folder.path.name for folder in runs),
                **vars(grid.facts(recipe)),
            )
        )
        outputs[label] = _outputs_by_seed(dict(zip(grid.seeds, runs, strict=True)))
    # of one seed, so that outputs differ by recipe and not by seed
    sample_seed = max(grid.seeds, key=lambda seed: sum(seed in by_seed for by_seed in outputs.values()))
    shown = {
        name: read_lines(by_seed[sample_seed]) for name, by_seed in outputs.items() if sample_seed in by_seed
    }
    comparison = Comparison(
        title=request.title,
        command=request.command,
        date=datetime.date.today().isoformat(),
        machine=hardware(folders),
        metrics=grid.metrics,
        seeds=grid.seeds,
        lrs=tuple(sorted({lr for recipe in request.recipes for lr in grid.rates(recipe)})),
        recipes=tuple(results),
        samples=grid.samples(shown),
        margin=request.margin or grid.metrics[0].margin,
        sweep_seed=request.sweep_seed if grid.sweeps() else None,
        rate_by=grid.rate_metric.name,
        sample_seed=sample_seed,
        open_recipes=tuple(grid.label(recipe) for recipe in request.recipes if recipe not in recipes),
        failed=tuple(f"{run}: {reason}" for run, reason in failed.items()),
        **vars(grid.background()),
    )
    return judge(comparison, request.out, exchanges=request.exchanges)


def _outputs_by_seed(runs: Mapping[int, RunFolder]) -> dict[int, Path]:
    """Return the files of a recipe's outputs, by seed; none unless every run with scores has some."""
    tested = {seed: run for seed, run in runs.items() if run.scores.exists()}
    if not all(run.outputs.exists() for run in tested.values()):
        return {}
    return {seed: run.outputs for seed, run in tested.items()}


def hardware(folders: Sequence[RunFolder]) -> str:
    """Return the hardware that the runs were trained on, with the number of runs on each if it differs."""
    counts = Counter(folder.status().hardware or "hardware not recorded" for folder in folders)
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{machine}: {count(runs, 'run')}" for machine, runs in counts.items())


def judge(comparison: Comparison, root: Path, *, exchanges: int = 2000) -> Comparison:
    """Return the comparison with all that follows from its runs, which are in ``root``, computed anew.

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
    by_metric: dict[str, list[str]] = {}
    for recipe in comparison.recipes:
        for run in recipe.runs:
            scores = RunFolder(root / run).scores
            if not scores.exists():
                continue
            for name, signature in read_json(scores).get("signatures", {}).items():
                signatures = by_metric.setdefault(name, [])
                if signature not in signatures:
                    signatures.append(signature)
    return {name: " or ".join(signatures) for name, signatures in by_metric.items()}


def _result(recipe: RecipeResult, comparison: Comparison, root: Path) -> RecipeResult:
    """Return a recipe with what its runs say."""
    all_runs = dict.fromkeys([*(trial.run for trial in recipe.trials), *recipe.runs])
    status = {run: RunFolder(root / run).status() for run in all_runs}
    result = replace(
        recipe,
        trials=tuple(SweepRun.of(trial.run, trial.lr, status[trial.run]) for trial in recipe.trials),
        outcomes=tuple(status[run].ended_as for run in recipe.runs),
        scores=_scores(comparison.metrics, [RunFolder(root / run) for run in recipe.runs]),
        train_seconds=median(status[run].train_seconds for run in recipe.runs),
        total_seconds=sum(run_status.train_seconds for run_status in status.values()),
    )
    means: dict[str, Interval] = {}
    for metric in comparison.metrics:
        mean = _mean(result, metric)
        if mean is not None:
            means[metric.name] = mean
    trains = statistics.share(result.trained, result.ended) if result.ended else None
    return replace(result, trains=trains, means=means)


def _scores(metrics: Sequence[Metric], folders: Sequence[RunFolder]) -> dict[str, tuple[float | None, ...]]:
    """The test scores by metric, one for each run, for the metrics that at least one run has."""
    of_runs = [read_scores(folder.scores) for folder in folders]
    scores: dict[str, tuple[float | None, ...]] = {}
    for metric in metrics:
        values = tuple(of_run.get(metric.name) for of_run in of_runs)
        if any(value is not None for value in values):
            scores[metric.name] = values
    return scores


def _values(recipe: RecipeResult, metric: Metric) -> statistics.Array:
    """Scores on the metric's scale by seed; NaN if the run did not train or has no finite score."""
    scores = recipe.scores.get(metric.name, (None,) * len(recipe.runs))
    values = np.full(len(scores), np.nan)
    for index, (score, outcome) in enumerate(zip(scores, recipe.outcomes, strict=True)):
        if score is not None and math.isfinite(score) and has_trained(outcome):
            values[index] = score
    return statistics.MetricScale(metric).values(values)


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
    contrast = statistics.contrasts(values)
    pairs = list(itertools.combinations(range(len(recipes)), 2))  # in the order of the contrasts
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
        file = RunFolder(root / run).examples
        if not has_trained(outcome) or not file.exists():
            continue
        by_metric = read_examples(file)
        if metric.name in by_metric:
            examples[index] = by_metric[metric.name]
    return examples


def _models(
    a: Mapping[int, statistics.Array],
    b: Mapping[int, statistics.Array],
    comparison: Comparison,
    exchanges: int,
) -> dict[str, Any]:
    """The difference between the trained models themselves, at the seeds at which both trained, and its p."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return {}
    first = np.stack([a[seed] for seed in seeds])
    second = np.stack([b[seed] for seed in seeds])
    combine = partial(TASKS[comparison.task].combine, comparison.headline.name)
    with np.errstate(all="ignore"):  # scores that are not finite
        delta = combine(first.sum(axis=1)).mean() - combine(second.sum(axis=1)).mean()
        p = statistics.paired_randomisation(first, second, combine, trials=exchanges)
    return {"models": float(delta), "p_models": p}

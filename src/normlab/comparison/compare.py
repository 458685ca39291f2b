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

from normlab.comparison import statistics
from normlab.comparison.plan import RunGrid
from normlab.comparison.result import (
    CompareRequest,
    Comparison,
    Interval,
    RecipeDifference,
    RecipeResult,
    Sample,
    SweepRun,
    has_trained,
)
from normlab.comparison.sentences import findings, of_difference, of_training
from normlab.config.config import Config
from normlab.config.io import to_json, validated
from normlab.config.metric import NLL, Metric, selection_metric
from normlab.config.units import count
from normlab.data.text import read_lines
from normlab.runs.files import read_examples
from normlab.runs.folder import RunFolder, read_json, write_text_atomic
from normlab.tasks import TASKS
from normlab.training.backends import backend
from normlab.training.jobs import Queue, Watch
from normlab.training.recipes.build import explain
from normlab.training.recipes.grammar import describe

Publish = Callable[[Comparison], None]

SAMPLES = 8
"""Test examples whose outputs are shown."""


@validated
def compare(
    request: CompareRequest, watch: Watch = lambda folders: None, publish: Publish = lambda comparison: None
) -> Comparison:
    """Train every recipe at every learning rate, the reported seeds at the best one, and compare these on the
    test text.

    Each recipe's learning rate is chosen by dev loss with a seed of its own, which is not reported; where
    there is one rate, there is no sweep. A run that diverges, is stuck or fails is a result and stops
    nothing; runs that are done are not done again. After each recipe's last run ``comparison.json`` is
    written into ``request.out`` and ``publish`` is called; until all recipes are finished the comparison
    names those that are not.

    >>> request = normlab.CompareRequest(recipes=("post", "pre"), lrs=(5e-3,), seeds=2, base=config, jobs=1)
    >>> comparison = normlab.compare(request)
    >>> [recipe.name for recipe in comparison.recipes], comparison.page("runs/comparison.html").name
    (['post', 'pre'], 'comparison.html')
    """
    grid = RunGrid(request)
    work = Queue(request.out, grid.request.jobs, watch, backend(request.on).start)
    left = {recipe: {(lr, request.sweep_seed) for lr in grid.swept} for recipe in request.recipes}
    reported: set[str] = set()

    def finished(recipe: str) -> bool:
        return recipe in reported and not left[recipe]

    def written() -> Comparison:
        comparison = conclude(grid, list(filter(finished, request.recipes)), work.failed)
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

    for lr, recipe in itertools.product(grid.swept, request.recipes):
        work.add(grid.config(recipe, lr, request.sweep_seed))
    if not grid.swept:
        list(map(report, request.recipes))
    work.run(after)
    return written()


def conclude(grid: RunGrid, recipes: Sequence[str], failed: Mapping[str, str]) -> Comparison:
    """Compare those recipes, whose runs have all ended."""
    request, task = grid.request, grid.task
    metrics = task.metrics_on(grid.corpus)
    lrs = {r: grid.chosen_lr(r) for r in recipes}
    folders = {r: [grid.folder(r, lr, seed) for seed in grid.seeds] for r, lr in lrs.items()}
    tested = {r: scored for r, runs in folders.items() if (scored := [f for f in runs if f.scores.exists()])}
    written = {r: [run.outputs for run in runs if run.outputs.exists()] for r, runs in tested.items()}
    outputs = {r: read_lines(files[0]) for r, files in written.items() if len(files) == len(tested[r])}
    comparison = Comparison(
        title=request.title,
        command=request.command,
        date=datetime.date.today().isoformat(),
        machine=hardware([f for runs in folders.values() for f in runs]),
        task=task.name,
        metrics=metrics,
        best_by=selection_metric(metrics, request.base.train.best_by).name,
        data=grid.corpus.facts,
        seeds=grid.seeds,
        lrs=tuple(request.lrs),
        recipes=tuple(_recipe(grid, r, lrs[r], folders[r]) for r in recipes),
        samples=_samples(task.test_examples(request.base, grid.corpus), outputs),
        margin=request.margin or metrics[0].margin,
        sweep_seed=request.sweep_seed if grid.swept else None,
        rate_by=NLL.name,
        sample_seed=grid.seeds[0],
        open_recipes=tuple(recipe for recipe in request.recipes if recipe not in recipes),
        failed=tuple(f"{run}: {reason}" for run, reason in failed.items()),
        test_is_dev=_test_is_dev(grid),
        overlap=getattr(grid.corpus, "overlap", {}),
        unigram_entropy_nats=grid.corpus.unigram_entropy_nats,
        sample_labels=task.example_labels,
    )
    return judge(comparison, request.out, exchanges=request.exchanges)


def _recipe(grid: RunGrid, name: str, lr: float, folders: Sequence[RunFolder]) -> RecipeResult:
    """A recipe as far as its runs do not say it."""
    config = grid.base[name]
    return RecipeResult(
        name=name,
        resolves_to=describe(config),
        trials=grid.trials(name),
        lr=lr,
        runs=tuple(f.path.name for f in folders),
        forced=config.forced,
        explained=explain(config),
    )


def _samples(expected: Sequence[tuple[str, str]], outputs: Mapping[str, Sequence[str]]) -> tuple[Sample, ...]:
    """Test examples on which the recipes disagree, evenly spread over the text."""
    if not outputs or not expected:
        return ()
    disputed = [i for i in range(len(expected)) if len({lines[i] for lines in outputs.values()}) > 1]
    rows = disputed or list(range(len(expected)))
    spread = rows[:: max(1, len(rows) // SAMPLES)][:SAMPLES]
    return tuple(Sample(*expected[i], {name: lines[i] for name, lines in outputs.items()}) for i in spread)


def hardware(folders: Sequence[RunFolder]) -> str:
    """Return the hardware that the runs were trained on, with their number where it differs."""
    counts = Counter(folder.status().hardware or "hardware not recorded" for folder in folders)
    each = [f"{words}: {count(runs, 'run')}" for words, runs in counts.items()]
    return "; ".join(counts if len(counts) == 1 else each)


def _test_is_dev(grid: RunGrid) -> bool:
    """Whether all of the test text is dev text: it has the same sentences, or none was given for it."""
    if getattr(grid.corpus, "overlap", {}).get("test in dev") == 1:
        return True
    given = [name for name in grid.task.texts if getattr(grid.request.base.data, name)]
    return any(n.startswith("train_") for n in given) and not any(n.startswith("test_") for n in given)


def judge(comparison: Comparison, root: Path, *, exchanges: int = 2000) -> Comparison:
    """Return the comparison with everything that follows from its runs, which lie in ``root``, computed anew.

    Its recipes need names, learning rates and run ids; outcomes, scores, means, differences, sentences and
    the signatures of scores are filled in.
    """
    judged = replace(
        comparison,
        recipes=tuple(_result(r, comparison, root) for r in comparison.recipes),
        signatures=_signatures(comparison, root),
    )
    judged = replace(judged, differences=_differences(judged, root, exchanges))
    return replace(judged, sentences=findings(judged))


def _signatures(comparison: Comparison, root: Path) -> dict[str, str]:
    """The signature of each metric; of runs that were scored otherwise, all of them."""
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
    """The test scores by metric, one for each run; of the metrics that some run has."""
    read = [read_json(folder.scores) if folder.scores.exists() else {} for folder in folders]
    scores = {m.name: tuple(of_run.get(m.name) for of_run in read) for m in metrics}
    return {name: values for name, values in scores.items() if any(value is not None for value in values)}


def _values(recipe: RecipeResult, metric: Metric) -> statistics.Array:
    """Scores on the metric's scale by seed; NaN where the run did not train or has no finite score."""
    scores = recipe.scores.get(metric.name, (None,) * len(recipe.runs))
    pairs = zip(scores, recipe.outcomes, strict=True)
    kept = np.array([s if s is not None and has_trained(o) else np.nan for s, o in pairs], dtype=np.float64)
    return statistics.MetricScale(metric).values(np.where(np.isfinite(kept), kept, np.nan))


def _mean(recipe: RecipeResult, metric: Metric) -> Interval | None:
    """The mean over the seeds that trained; None if there are none, or one of them has no score."""
    values = _values(recipe, metric)
    if np.isnan(values[[has_trained(outcome) for outcome in recipe.outcomes]]).any():
        return None
    mean, margin = map(float, statistics.mean_margin(values))
    if np.isnan(mean):
        return None
    value, *ends = (
        float(statistics.MetricScale(metric).scores(np.array(v)))
        for v in (mean, mean - margin, mean + margin)
    )
    return Interval(value) if np.isnan(margin) else Interval(value, *ends)


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
        difference = replace(
            _answer(comparison, contrast, index, values[[i, j]]),
            a=a.name,
            b=b.name,
            **_training(a, b, len(pairs)),
            **_models(examples[a.name], examples[b.name], comparison, exchanges),
        )
        judged.append(replace(difference, sentence=of_difference(difference, comparison)))
    return tuple(judged)


def _training(a: RecipeResult, b: RecipeResult, pairs: int) -> dict[str, Any]:
    """The p, corrected for the number of pairs, that both train equally often, and the answer in words."""
    if not a.ended or not b.ended:
        return {}
    counts = (a.trained, a.ended), (b.trained, b.ended)
    p = min(1.0, pairs * statistics.fisher(*counts))
    settles = statistics.seeds_for_shares(*counts, pairs) if p >= statistics.LEVEL else None
    return {"p_trains": p, "trains_sentence": of_training(a, b, p, settles)}


def _answer(
    comparison: Comparison, contrast: statistics.Contrasts, index: int, values: statistics.Array
) -> RecipeDifference:
    """The answer about one pair, of which ``values`` holds both recipes, without names and words."""
    common, delta, margin = (
        int(contrast.common[index]),
        float(contrast.delta[index]),
        float(contrast.margin[index]),
    )
    if not contrast.given[index]:
        return RecipeDifference("", "", common, "open")
    scale, both = statistics.MetricScale(comparison.headline), values[:, np.isfinite(values).all(axis=0)]

    def points(moved: float) -> float:
        return float(scale.difference(both.mean(), np.array(moved)))

    interval = Interval(points(delta), points(delta - margin), points(delta + margin))
    p = float(contrast.p[index])
    if p < statistics.LEVEL:
        return RecipeDifference("", "", common, "better", delta=interval, p=p)
    if interval.largest <= comparison.margin:
        return RecipeDifference("", "", common, "equal", delta=interval, p=p)
    effect = max(abs(interval.value), comparison.margin)
    wanted = abs(delta) if effect == abs(interval.value) else effect / abs(points(1e-3) / 1e-3)
    spread = float(contrast.spread[index])
    if common < 3:  # two differences say little of their spread, the recipes' own spreads a bit more
        spread = max(spread, float(np.sqrt(both.var(axis=1, ddof=1).sum())))
    enough = statistics.seeds_needed(
        len(comparison.recipes), wanted * 2**0.5 / spread, len(comparison.seeds) + 1
    )
    return RecipeDifference("", "", common, "open", delta=interval, p=p, effect=effect, seeds_needed=enough)


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
    """The difference between the very models of the seeds at which both trained, and its p."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return {}
    first, second = (np.stack([rows[seed] for seed in seeds]) for rows in (a, b))
    combine = partial(TASKS[comparison.task].combine, comparison.headline.name)
    with np.errstate(all="ignore"):  # scores that are not finite
        delta = combine(first.sum(axis=1)).mean() - combine(second.sum(axis=1)).mean()
        p = statistics.paired_randomisation(first, second, combine, trials=exchanges)
    return {"models": float(delta), "p_models": p}

"""The conclusions of a comparison, computed from its run folders; it knows no task or metric by name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from normlab.comparison.randomisation import paired_randomisation
from normlab.comparison.result import Comparison, Difference, Interval, RecipeResult, Trial, learnt
from normlab.comparison.scale import Array, Scale
from normlab.comparison.seeds import LEVEL, Contrasts, contrasts, mean_margin, seeds_needed
from normlab.comparison.sentences import findings, of_difference, of_training
from normlab.comparison.trains import fisher, seeds_for_shares, share
from normlab.config.metric import Metric
from normlab.runs.examples import Examples, read_examples
from normlab.runs.folder import RunFolder, Status, read_json
from normlab.tasks.registry import TASKS


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
    found: dict[str, dict[str, None]] = {}
    for run in (run for recipe in comparison.recipes for run in recipe.runs):
        scores = RunFolder(root / run).scores
        for name, signature in (read_json(scores) if scores.exists() else {}).get("signatures", {}).items():
            found.setdefault(name, {})[signature] = None
    return {name: " or ".join(signatures) for name, signatures in found.items()}


def trial(folder: RunFolder, lr: float) -> Trial:
    """Return the result of a run of the sweep."""
    return _trial(folder.path.name, lr, folder.status())


def _trial(run: str, lr: float, status: Status) -> Trial:
    return Trial(lr, run, status.best_dev, _outcome(status))


def _outcome(status: Status) -> str:
    return status.outcome.state if status.outcome else status.state


def _result(recipe: RecipeResult, comparison: Comparison, root: Path) -> RecipeResult:
    every = dict.fromkeys([*(t.run for t in recipe.trials), *recipe.runs])
    status = {run: RunFolder(root / run).status() for run in every}
    result = replace(
        recipe,
        trials=tuple(_trial(t.run, t.lr, status[t.run]) for t in recipe.trials),
        outcomes=tuple(_outcome(status[run]) for run in recipe.runs),
        scores=_scores(comparison.metrics, [RunFolder(root / run) for run in recipe.runs]),
        train_seconds=median(status[run].train_seconds for run in recipe.runs),
        total_seconds=sum(found.train_seconds for found in status.values()),
    )
    return replace(
        result,
        trains=share(result.trained, result.ended) if result.ended else None,
        means={m.name: mean for m in comparison.metrics if (mean := _mean(result, m))},
    )


def _scores(metrics: Sequence[Metric], folders: Sequence[RunFolder]) -> dict[str, tuple[float | None, ...]]:
    """The test scores by metric, one for each run; of the metrics that some run has."""
    read = [read_json(folder.scores) if folder.scores.exists() else {} for folder in folders]
    found = {m.name: tuple(scores.get(m.name) for scores in read) for m in metrics}
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _values(recipe: RecipeResult, metric: Metric) -> Array:
    """Scores on the metric's scale by seed; NaN where the run did not train or has no finite score."""
    scores = recipe.scores.get(metric.name, (None,) * len(recipe.runs))
    pairs = zip(scores, recipe.outcomes, strict=True)
    kept = np.array([s if s is not None and learnt(o) else np.nan for s, o in pairs], dtype=np.float64)
    return Scale(metric).values(np.where(np.isfinite(kept), kept, np.nan))


def _mean(recipe: RecipeResult, metric: Metric) -> Interval | None:
    """The mean over the seeds that trained; None if there are none, or one of them has no score."""
    values = _values(recipe, metric)
    if np.isnan(values[[learnt(outcome) for outcome in recipe.outcomes]]).any():
        return None
    mean, margin = map(float, mean_margin(values))
    if np.isnan(mean):
        return None
    value, *ends = (float(Scale(metric).scores(np.array(v))) for v in (mean, mean - margin, mean + margin))
    return Interval(value) if np.isnan(margin) else Interval(value, *ends)


def _differences(comparison: Comparison, root: Path, exchanges: int) -> tuple[Difference, ...]:
    recipes, metric = comparison.ranked, comparison.headline
    if len(recipes) < 2:
        return ()
    values = np.stack([_values(recipe, metric) for recipe in recipes])
    found, pairs = contrasts(values), list(itertools.combinations(range(len(recipes)), 2))
    examples = {recipe.name: _examples(recipe, metric, root) for recipe in recipes}
    judged = []
    for index, (i, j) in enumerate(pairs):
        a, b = recipes[i], recipes[j]
        answer = _answer(comparison, found, index, values[[i, j]])
        models, p_models = _models(examples[a.name], examples[b.name], comparison, exchanges)
        p_trains, trains_sentence = _training(a, b, len(pairs))
        difference = replace(
            answer,
            a=a.name,
            b=b.name,
            p_trains=p_trains,
            trains_sentence=trains_sentence,
            models=models,
            p_models=p_models,
        )
        judged.append(replace(difference, sentence=of_difference(difference, comparison)))
    return tuple(judged)


def _training(a: RecipeResult, b: RecipeResult, pairs: int) -> tuple[float | None, str]:
    """The p, corrected for the number of pairs, that both train equally often, and the answer in words."""
    if not a.ended or not b.ended:
        return None, ""
    counts = (a.trained, a.ended), (b.trained, b.ended)
    p = min(1.0, pairs * fisher(*counts))
    return p, of_training(a, b, p, seeds_for_shares(*counts, pairs) if p >= LEVEL else None)


def _answer(comparison: Comparison, found: Contrasts, index: int, values: Array) -> Difference:
    """The answer about one pair, of which ``values`` holds both recipes, without names and words."""
    common, delta, margin = int(found.common[index]), float(found.delta[index]), float(found.margin[index])
    if not found.given[index]:
        return Difference("", "", common, "open")
    scale, both = Scale(comparison.headline), values[:, np.isfinite(values).all(axis=0)]

    def points(moved: float) -> float:
        return float(scale.difference(both.mean(), np.array(moved)))

    interval = Interval(points(delta), points(delta - margin), points(delta + margin))
    p = float(found.p[index])
    if p < LEVEL:
        return Difference("", "", common, "better", delta=interval, p=p)
    if interval.largest <= comparison.margin:
        return Difference("", "", common, "equal", delta=interval, p=p)
    effect = max(abs(interval.value), comparison.margin)
    wanted = abs(delta) if effect == abs(interval.value) else effect / abs(points(1e-3) / 1e-3)
    spread = float(found.spread[index])
    if common < 3:  # two differences say little of their spread, the recipes' own spreads a bit more
        spread = max(spread, float(np.sqrt(both.var(axis=1, ddof=1).sum())))
    enough = seeds_needed(len(comparison.recipes), wanted * 2**0.5 / spread, len(comparison.seeds) + 1)
    return Difference("", "", common, "open", delta=interval, p=p, effect=effect, seeds_needed=enough)


def _examples(recipe: RecipeResult, metric: Metric, root: Path) -> Mapping[int, Array]:
    """The statistics of each test example under the headline metric, by the index of a seed that trained."""
    found: dict[int, Examples] = {}
    for index, (run, outcome) in enumerate(zip(recipe.runs, recipe.outcomes, strict=True)):
        kept = RunFolder(root / run).examples
        if learnt(outcome) and kept.exists():
            found[index] = read_examples(kept)
    return {index: examples[metric.name] for index, examples in found.items() if metric.name in examples}


def _models(
    a: Mapping[int, Array], b: Mapping[int, Array], comparison: Comparison, exchanges: int
) -> tuple[float, float] | tuple[None, None]:
    """The difference between the very models of the seeds at which both trained, and its p."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None, None
    first, second = (np.stack([rows[seed] for seed in seeds]) for rows in (a, b))
    combine = partial(TASKS[comparison.task].combine, comparison.headline.name)
    with np.errstate(all="ignore"):  # scores that are not finite
        delta = combine(first.sum(axis=1)).mean() - combine(second.sum(axis=1)).mean()
        p = paired_randomisation(first, second, combine, trials=exchanges)
    return float(delta), p

"""A comparison from its grid: what was compared, samples of the outputs, and the conclusions of ``judge``."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence

from normlab.comparison.grid import Grid
from normlab.comparison.judge import judge
from normlab.comparison.result import Comparison, RecipeResult, Sample
from normlab.config.metric import NLL
from normlab.config.units import count
from normlab.data.text import read_lines
from normlab.runs.folder import RunFolder
from normlab.training.recipes.explain import explain
from normlab.training.recipes.grammar import describe

SAMPLES = 8


def conclude(grid: Grid, recipes: Sequence[str], failed: Mapping[str, str]) -> Comparison:
    """Compare those recipes, whose runs have all ended."""
    request, task = grid.request, grid.task
    lrs = {r: grid.chosen_lr(r) for r in recipes}
    folders = {r: [grid.folder(r, lr, seed) for seed in grid.seeds] for r, lr in lrs.items()}
    tested = {r: found for r, runs in folders.items() if (found := [f for f in runs if f.scores.exists()])}
    expected = task.test_examples(request.base, grid.corpus)
    outputs = {
        r: [read_lines(f.outputs) for f in runs]
        for r, runs in tested.items()
        if all(f.outputs.exists() for f in runs)
    }
    comparison = Comparison(
        title=request.title,
        command=request.command,
        date=datetime.date.today().isoformat(),
        machine=hardware([f for runs in folders.values() for f in runs]),
        task=task.name,
        metrics=task.metrics,
        best_by=task.decides(request.base).name,
        data=grid.corpus.facts,
        seeds=grid.seeds,
        lrs=tuple(request.lrs),
        recipes=tuple(_recipe(grid, r, lrs[r], folders[r]) for r in recipes),
        samples=_samples(expected, {recipe: runs[0] for recipe, runs in outputs.items()}),
        margin=request.margin or task.metrics[0].margin,
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


def _recipe(grid: Grid, name: str, lr: float, folders: Sequence[RunFolder]) -> RecipeResult:
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
    found = Counter(folder.status().hardware or "hardware not recorded" for folder in folders)
    each = [f"{words}: {count(runs, 'run')}" for words, runs in found.items()]
    return "; ".join(found if len(found) == 1 else each)


def _test_is_dev(grid: Grid) -> bool:
    """Whether all of the test text is dev text: it has the same sentences, or none was given for it."""
    if getattr(grid.corpus, "overlap", {}).get("test in dev") == 1:
        return True
    given = [name for name in grid.task.texts if getattr(grid.request.base.data, name)]
    return any(n.startswith("train_") for n in given) and not any(n.startswith("test_") for n in given)

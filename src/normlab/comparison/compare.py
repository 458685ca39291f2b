"""``normlab compare``: tune a learning rate for each recipe, train the reported seeds, and compare them."""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from normlab.comparison.judge import judge
from normlab.comparison.plan import RunGrid
from normlab.comparison.result import CompareRequest, Comparison, RecipeResult, Sample
from normlab.config.config import Config
from normlab.config.io import to_json, validated
from normlab.config.metric import NLL
from normlab.config.units import count
from normlab.data.text import read_lines
from normlab.runs.folder import RunFolder, write_text_atomic
from normlab.training.jobs import Queue, Watch, backend
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
        metrics=task.metrics,
        best_by=task.selection_metric(request.base).name,
        data=grid.corpus.facts,
        seeds=grid.seeds,
        lrs=tuple(request.lrs),
        recipes=tuple(_recipe(grid, r, lrs[r], folders[r]) for r in recipes),
        samples=_samples(task.test_examples(request.base, grid.corpus), outputs),
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

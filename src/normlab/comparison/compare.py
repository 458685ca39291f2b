"""``normlab compare``: tune a learning rate for each recipe, train the reported seeds, and compare them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from normlab.comparison.conclude import conclude
from normlab.comparison.grid import Grid
from normlab.comparison.request import CompareRequest
from normlab.comparison.result import Comparison
from normlab.config.config import Config
from normlab.config.io import to_json, validated
from normlab.runs.folder import write_text_atomic
from normlab.training.jobs.place import place
from normlab.training.jobs.queue import Queue, Watch

Publish = Callable[[Comparison], None]


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
    """
    grid = Grid(request)
    work = Queue(request.out, grid.request.jobs, watch, place(request.on).start)
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

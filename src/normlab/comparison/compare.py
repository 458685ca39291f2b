"""``normlab compare``: tune a learning rate for each recipe, train further seeds, and compare them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from normlab.comparison.conclude import conclude
from normlab.comparison.grid import Grid
from normlab.jobs.queue import Queue, Watch
from normlab.recipes.grammar import describe
from normlab.spec.arguments import validate_arguments
from normlab.spec.comparison import Comparison
from normlab.spec.config import Config
from normlab.spec.request import CompareRequest
from normlab.spec.serialise import to_json
from normlab.store.folder import write_text_atomic
from normlab.training.measure import Seconds, measure

Publish = Callable[[Comparison], None]


@dataclass(frozen=True)
class PlannedRun:
    """One run that a comparison will train, or that is done already."""

    recipe: str
    lr: float
    seed: int
    run: str
    done: bool


@dataclass(frozen=True)
class ComparePlan:
    """The runs of a comparison and the time that they take on this machine."""

    sweep: tuple[PlannedRun, ...]
    """Every recipe at every learning rate, with the first seed."""
    seed_runs: int
    """The number of runs with other seeds, at learning rates that the sweep will choose."""
    resolves_to: dict[str, str]
    seconds: Seconds
    """The time of one run, measured on a few steps of the first recipe."""
    total_seconds: float
    """The time of all runs that are not done yet, in ``jobs`` processes; stuck runs that stop early make it
    shorter.
    """


@validate_arguments
def plan(request: CompareRequest) -> ComparePlan:
    """Return the runs that ``compare`` would train and the time they take, measured on a few steps."""
    grid = Grid(request)
    sweep = tuple(
        PlannedRun(recipe, lr, grid.seeds[0], folder.path.name, folder.status().state == "done")
        for recipe in request.recipes
        for lr in request.lrs
        for folder in [grid.folder(recipe, lr, grid.seeds[0])]
    )
    seed_runs = len(request.recipes) * (len(grid.seeds) - 1)
    seconds = measure(next(iter(grid.base.values())), grid.corpus)
    open_runs = sum(not p.done for p in sweep) + sum(map(grid.open_seed_runs, request.recipes))
    rounds = -(-open_runs // request.jobs)
    return ComparePlan(
        sweep=sweep,
        seed_runs=seed_runs,
        resolves_to={name: describe(config) for name, config in grid.base.items()},
        seconds=seconds,
        total_seconds=rounds * seconds.run,
    )


@validate_arguments
def compare(
    request: CompareRequest, watch: Watch = lambda folders: None, publish: Publish = lambda comparison: None
) -> Comparison:
    """Train every recipe at every learning rate, its other seeds at the best one, and compare them on the
    test text.

    Each recipe's learning rate is chosen on dev with the first seed. A run that diverges, is stuck or fails
    is a result and stops nothing; runs that are done are not done again. After each recipe's last run
    ``comparison.json`` is written into ``request.out`` and ``publish`` is called; until all recipes are
    finished the comparison names those that are not.
    """
    grid = Grid(request)
    work = Queue(request.out, request.jobs, watch)
    sweep = {recipe: {(lr, grid.seeds[0]) for lr in request.lrs} for recipe in request.recipes}
    others: dict[str, set[tuple[float, int]]] = {}

    def finished(recipe: str) -> bool:
        return recipe in others and not others[recipe]

    def written() -> Comparison:
        comparison = conclude(grid, list(filter(finished, request.recipes)), work.failed)
        write_text_atomic(request.out / "comparison.json", to_json(comparison))
        publish(comparison)
        return comparison

    def after(config: Config) -> None:
        recipe, run = config.recipe, (config.optim.lr, config.seeds.init)
        if recipe in others:
            others[recipe].discard(run)
        else:
            sweep[recipe].discard(run)
            if not sweep[recipe]:
                lr = grid.chosen_lr(recipe)
                others[recipe] = {(lr, seed) for seed in grid.seeds[1:]}
                for seed in grid.seeds[1:]:
                    work.add(grid.config(recipe, lr, seed))
        if finished(recipe) and not all(map(finished, request.recipes)):
            written()

    for lr in request.lrs:
        for recipe in request.recipes:
            work.add(grid.config(recipe, lr, grid.seeds[0]))
    work.run(after)
    return written()

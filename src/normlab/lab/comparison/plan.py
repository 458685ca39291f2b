"""``normlab compare --plan``: what so many seeds could tell, and what they cost, before any training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from normlab.base.io import validated
from normlab.base.metric import Metric
from normlab.base.units import count
from normlab.errors import UserError
from normlab.judging.statistics import MetricScale, detectable, pooled
from normlab.lab.comparison.grid import Grid, grid_of
from normlab.lab.comparison.result import CompareRequest, has_trained, noun_of
from normlab.lab.config import SeedConfig, run_id
from normlab.lab.runs.folder import RunFolder, read_scores
from normlab.lab.training.timing import Seconds

NUMBERS = (2, 3, 5, 10)
"""The numbers of seeds that a plan lists, besides the one asked for."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of the sweep, which a comparison will train unless it is done already."""

    recipe: str
    lr: float
    seed: int
    run: str
    done: bool


@dataclass(frozen=True)
class Spread:
    """How much a score differs between seeds of one recipe, in kept runs."""

    sd: float
    """On the metric's scale without edges."""
    centre: float
    """The centre of the scores on that scale."""
    recipes: int
    """The number of recipes, each with at least two seeds, over which it was pooled."""
    source: str

    def size(self, metric: Metric, deviations: float = 1.0) -> float:
        """A difference of so many standard deviations around ``centre``, as a score."""
        values = np.array(self.centre), np.array(deviations * self.sd)
        return abs(float(MetricScale(metric).difference(*values)))


@dataclass(frozen=True)
class Power:
    """What a number of seeds can tell, and what it costs."""

    seeds: int
    sd: float
    """The difference that is found with 80% probability, in standard deviations of a recipe over seeds."""
    difference: float | None
    """The same as a score; None if no kept runs show the spread."""
    runs: int
    """All runs, including the sweep and finished runs."""
    seconds: float
    """Their time in ``jobs`` processes."""


@dataclass(frozen=True)
class ComparePlan:
    """The runs of a comparison, what they can tell, and how long they take on this machine."""

    metric: Metric
    sweep: tuple[PlannedRun, ...]
    """Every recipe at every learning rate, with the seed of the sweep."""
    seed_runs: int
    """The number of runs with the reported seeds, at learning rates that the sweep will choose."""
    resolves_to: dict[str, str]
    seconds: Seconds
    """The time of one run, measured on each recipe's first steps and averaged over recipes."""
    total_seconds: float
    """The time of all unfinished runs, in ``jobs`` processes; it gets shorter if stuck runs stop early."""
    spread: Spread | None
    power: tuple[Power, ...]
    noun: str = "recipe"
    """What is compared, see ``noun_of``."""

    @property
    def basis(self) -> str:
        """What the sizes of detectable differences are based on, in a sentence."""
        if self.spread is None:
            return (
                f"No kept runs show how much {self.metric.label} differs between seeds, so sizes are in "
                f"standard deviations of a {self.noun} over seeds"
            )
        score = float(MetricScale(self.metric).scores(np.array(self.spread.centre)))
        sd = self.spread.size(self.metric)
        return (
            f"By {count(self.spread.recipes, self.noun)} with several seeds in {self.spread.source}, around "
            f"{self.metric.shown(score)} {self.metric.label}, where a {self.noun}'s seeds have a standard "
            f"deviation of {self.metric.amount(sd)}; other text or models may differ"
        )


@validated
def plan(request: CompareRequest, kept: Sequence[Path] = (Path("results"),)) -> ComparePlan:
    """Return the runs that ``compare`` would train, their time, measured on a few steps, and what they could
    tell. The latter follows from the spread over seeds of the runs in ``request.out`` or, if there are none,
    in the folders ``kept``.

    >>> request = normlab.CompareRequest(recipes=("post", "pre"), lrs=(5e-3,), seeds=2, base=config, jobs=1)
    >>> normlab.plan(request).seed_runs
    4
    """
    grid = grid_of(request)
    request = grid.request
    metric = grid.metrics[0]
    sweep: list[PlannedRun] = []
    for recipe in request.recipes:
        for lr, folder in grid.sweep(recipe).items():
            done = folder.status().state == "done"
            sweep.append(PlannedRun(recipe, lr, request.sweep_seed, folder.path.name, done))
    seconds = grid.seconds()
    open_runs = sum(not run.done for run in sweep) + sum(map(grid.open_seed_runs, request.recipes))
    rounds = -(-open_runs // request.jobs)
    task = grid.background().task
    spreads = (spread(folder, task, metric) for folder in (request.out, *kept))
    seen = next((known for known in spreads if known is not None), None)
    return ComparePlan(
        metric=metric,
        sweep=tuple(sweep),
        seed_runs=len(request.recipes) * len(grid.seeds),
        resolves_to={name: grid.facts(name).resolves_to for name in request.recipes},
        seconds=seconds,
        total_seconds=seconds.start + rounds * seconds.run if open_runs else 0.0,
        spread=seen,
        power=tuple(_power(request, grid, metric, seen, seconds.run)),
        noun=noun_of(task),
    )


def _power(
    request: CompareRequest, grid: Grid, metric: Metric, seen: Spread | None, run_seconds: float
) -> Iterator[Power]:
    """Yield what some numbers of seeds, the smallest first, could tell about two recipes or more."""
    if len(request.recipes) == 1:
        return
    for seeds in sorted({*NUMBERS, request.seeds}):
        size = detectable(len(request.recipes), seeds)
        runs = sum(len(grid.sweep(recipe)) + seeds for recipe in request.recipes)
        difference = seen.size(metric, size) if seen else None
        rounds = -(-runs // request.jobs)
        yield Power(seeds, size, difference, runs, rounds * run_seconds)


def spread(root: Path, task: str, metric: Metric) -> Spread | None:
    """Return the spread over seeds of a task's runs below a folder, pooled over recipes; None if no recipe
    has two seeds that trained.
    """
    groups: dict[str, list[float]] = {}
    for path in sorted(root.rglob("config.json")):
        folder = RunFolder(path.parent)
        try:
            config, outcome = folder.config(), folder.status().outcome
            score = read_scores(folder.scores).get(metric.name, math.nan)
        except (UserError, OSError):
            continue  # a damaged folder says nothing about the spread
        trained = outcome is not None and has_trained(outcome.state)
        if config.task == task and trained and math.isfinite(score):
            without_seeds = run_id(replace(config, seeds=SeedConfig.of(0)))
            groups.setdefault(without_seeds, []).append(score)
    over_recipes = pooled(MetricScale(metric).values(np.array(scores)) for scores in groups.values())
    if over_recipes is None:
        return None
    return Spread(over_recipes.variance**0.5, over_recipes.centre, over_recipes.groups, str(root))

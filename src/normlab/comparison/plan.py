"""The runs of a comparison, and ``normlab compare --plan``: what so many seeds will be able to tell, and what
they cost, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from normlab.comparison.result import CompareRequest, SweepRun, choose, has_trained, on_backend
from normlab.comparison.statistics import MetricScale, detectable
from normlab.config.config import Config, SeedConfig, run_id
from normlab.config.io import validated
from normlab.config.metric import Metric
from normlab.config.units import count
from normlab.errors import UserError
from normlab.runs.folder import RunFolder, read_json
from normlab.tasks import TASKS
from normlab.training.devices import resolved_precision
from normlab.training.recipes.grammar import describe, resolve
from normlab.training.trainer import Seconds, measure


class RunGrid:
    """The configurations of a comparison, by recipe, learning rate and seed."""

    def __init__(self, request: CompareRequest) -> None:
        self.request = request = on_backend(request)
        self.task = TASKS[request.base.task]
        self.seeds = tuple(range(request.first_seed, request.first_seed + request.seeds))
        self.swept = tuple(request.lrs) if len(request.lrs) > 1 else ()
        """The learning rates of the sweep; a single one leaves nothing to choose."""
        base = resolved_precision(request.base)
        resolved = [resolve(name, base, force=request.force) for name in request.recipes]
        for config in resolved:
            self.task.check(config)
        data, self.corpus = self.task.prepare(request.base.data, request.out / "data")
        self.base = {c.recipe: replace(c, data=data) for c in resolved}
        for config in self.base.values():
            self.task.check_text(config, self.corpus)
        self._refuse_same()

    def _refuse_same(self) -> None:
        """Raise UserError if two names resolve to the same run."""
        names: dict[str, str] = {}
        for name, config in self.base.items():
            other = names.setdefault(run_id(config), name)
            if other != name:
                raise UserError(f"the recipes {other!r} and {name!r} are the same; keep one of them")

    def config(self, recipe: str, lr: float, seed: int) -> Config:
        base = self.base[recipe]
        return replace(base, optim=replace(base.optim, lr=lr), seeds=SeedConfig(seed, seed, seed))

    def folder(self, recipe: str, lr: float, seed: int) -> RunFolder:
        return RunFolder(self.request.out / run_id(self.config(recipe, lr, seed)))

    def sweep(self, recipe: str) -> list[RunFolder]:
        """Return the folders of a recipe's sweep, one for each learning rate."""
        return [self.folder(recipe, lr, self.request.sweep_seed) for lr in self.swept]

    def trials(self, recipe: str) -> tuple[SweepRun, ...]:
        return tuple(
            SweepRun.of(f.path.name, lr, f.status())
            for f, lr in zip(self.sweep(recipe), self.swept, strict=True)
        )

    def chosen_lr(self, recipe: str) -> float:
        """Return the learning rate that the sweep chose, see ``choose``, or the only one."""
        return choose(self.trials(recipe)) if self.swept else self.request.lrs[0]

    def open_seed_runs(self, recipe: str) -> int:
        """Return how many runs with the reported seeds are left, whichever learning rate is chosen."""
        if any(folder.status().state != "done" for folder in self.sweep(recipe)):
            return len(self.seeds)
        lr = self.chosen_lr(recipe)
        return sum(self.folder(recipe, lr, seed).status().state != "done" for seed in self.seeds)


NUMBERS = (2, 3, 5, 10)
"""Numbers of seeds of which a plan speaks, beside the one asked for."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of the sweep, which a comparison will train, or which is done already."""

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
    """The middle of the scores on that scale."""
    recipes: int
    """The number of recipes, each with at least two seeds, that it was pooled over."""
    source: str

    def size(self, metric: Metric, deviations: float = 1.0) -> float:
        """A difference of so many standard deviations around ``centre``, as a score."""
        values = np.array(self.centre), np.array(deviations * self.sd)
        return abs(float(MetricScale(metric).difference(*values)))


@dataclass(frozen=True)
class Power:
    """What a number of seeds can tell, and its cost."""

    seeds: int
    sd: float
    """The difference found with a probability of 80%, in standard deviations of a recipe over seeds."""
    difference: float | None
    """The same as a score; None where no kept runs show the spread."""
    runs: int
    """All runs, the sweep included and those that are done."""
    seconds: float
    """Their time in ``jobs`` processes."""


@dataclass(frozen=True)
class ComparePlan:
    """The runs of a comparison, what they can tell, and the time that they take on this machine."""

    metric: Metric
    sweep: tuple[PlannedRun, ...]
    """Every recipe at every learning rate, with the seed of the sweep."""
    seed_runs: int
    """The number of runs with the reported seeds, at learning rates that the sweep will choose."""
    resolves_to: dict[str, str]
    seconds: Seconds
    """The time of one run, measured on a few steps of the first recipe."""
    total_seconds: float
    """The time of all runs that are not done yet, in ``jobs`` processes; stuck runs that stop early make it
    shorter.
    """
    spread: Spread | None
    power: tuple[Power, ...]

    @property
    def basis(self) -> str:
        """What the sizes of detectable differences rest on, in a sentence."""
        if self.spread is None:
            return (
                f"No kept runs show how much {self.metric.label} differs between seeds, so sizes are in "
                "standard deviations of a recipe over seeds"
            )
        score = float(MetricScale(self.metric).scores(np.array(self.spread.centre)))
        sd = self.spread.size(self.metric)
        return (
            f"By {count(self.spread.recipes, 'recipe')} with several seeds in {self.spread.source}, around "
            f"{self.metric.shown(score)} {self.metric.label}, where a recipe's seeds have a standard "
            f"deviation of {self.metric.amount(sd)}; other text or models may differ"
        )


@validated
def plan(request: CompareRequest, kept: Sequence[Path] = (Path("results"),)) -> ComparePlan:
    """Return the runs that ``compare`` would train, their time, measured on a few steps, and what they could
    tell, by the spread over seeds of the runs in ``request.out`` or, if there are none, in the folders
    ``kept``.

    >>> request = normlab.CompareRequest(recipes=("post", "pre"), lrs=(5e-3,), seeds=2, base=config, jobs=1)
    >>> normlab.plan(request).seed_runs
    4
    """
    grid = RunGrid(request)
    request = grid.request
    metric = grid.task.metrics_on(grid.corpus)[0]
    sweep = tuple(
        PlannedRun(recipe, lr, request.sweep_seed, folder.path.name, folder.status().state == "done")
        for recipe in request.recipes
        for lr, folder in zip(grid.swept, grid.sweep(recipe), strict=True)
    )
    seconds = measure(next(iter(grid.base.values())), grid.corpus)
    open_runs = sum(not p.done for p in sweep) + sum(map(grid.open_seed_runs, request.recipes))
    spreads = (spread(folder, request.base.task, metric) for folder in (request.out, *kept))
    seen = next(filter(None, spreads), None)
    return ComparePlan(
        metric=metric,
        sweep=sweep,
        seed_runs=len(request.recipes) * len(grid.seeds),
        resolves_to={name: describe(config) for name, config in grid.base.items()},
        seconds=seconds,
        total_seconds=-(-open_runs // request.jobs) * seconds.run,
        spread=seen,
        power=tuple(power(request, grid, metric, seen, seconds.run)),
    )


def power(
    request: CompareRequest, grid: RunGrid, metric: Metric, seen: Spread | None, run_seconds: float
) -> Iterator[Power]:
    """Yield what some numbers of seeds could tell, the smallest first."""
    for seeds in sorted({*NUMBERS, request.seeds}):
        size = detectable(len(request.recipes), seeds)
        runs = len(request.recipes) * (len(grid.swept) + seeds)
        points = seen.size(metric, size) if seen else None
        yield Power(seeds, size, points, runs, -(-runs // request.jobs) * run_seconds)


def spread(root: Path, task: str, metric: Metric) -> Spread | None:
    """Return the spread over seeds of a task's runs below a folder, pooled over recipes; None if no recipe
    has two seeds that trained.
    """
    groups: dict[str, list[float]] = {}
    for path in sorted(root.rglob("config.json")):
        folder = RunFolder(path.parent)
        try:
            config, outcome = folder.config(), folder.status().outcome
            score = read_json(folder.scores).get(metric.name) if folder.scores.exists() else None
        except (UserError, OSError):
            continue  # a damaged folder says nothing of a spread
        if config.task == task and outcome and has_trained(outcome.state) and isinstance(score, int | float):
            key = run_id(replace(config, seeds=SeedConfig(0, 0, 0)))
            groups.setdefault(key, []).append(float(score))
    several = [MetricScale(metric).values(np.array(scores)) for scores in groups.values() if len(scores) > 1]
    if not several:
        return None
    freedom = sum(len(values) - 1 for values in several)
    variance = sum(float(((values - values.mean()) ** 2).sum()) for values in several) / freedom
    centre = float(np.mean([values.mean() for values in several]))
    return Spread(variance**0.5, centre, len(several), str(root))

"""The runs of a comparison: every recipe at every learning rate, and at the chosen one with every seed."""

from __future__ import annotations

from dataclasses import replace

from normlab.errors import UserError
from normlab.recipes.grammar import resolve
from normlab.spec.comparison import Trial
from normlab.spec.config import Config, SeedConfig, run_id
from normlab.spec.metric import NLL
from normlab.spec.request import CompareRequest, usable_cores
from normlab.store.folder import RunFolder
from normlab.tasks.registry import TASKS
from normlab.training.devices import resolved_precision


class Grid:
    """The configurations of a comparison, by recipe, learning rate and seed."""

    def __init__(self, request: CompareRequest) -> None:
        self.request, self.task = request, TASKS[request.base.task]
        self.seeds = tuple(range(request.first_seed, request.first_seed + request.seeds))
        threads = request.base.machine.threads or max(1, usable_cores() // request.jobs)
        machine = replace(request.base.machine, threads=threads)
        base = resolved_precision(request.base)
        resolved = [resolve(name, base, force=request.force) for name in request.recipes]
        for config in resolved:
            self.task.check(config)
        data, self.corpus = self.task.prepare(request.base.data, request.out / "data")
        self.base = {c.recipe: replace(c, data=data, machine=machine) for c in resolved}
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

    def trial(self, recipe: str, lr: float) -> Trial:
        """The result of the first seed's run."""
        folder = self.folder(recipe, lr, self.seeds[0])
        status = folder.status()
        outcome = status.outcome.state if status.outcome else status.state
        return Trial(lr, folder.path.name, status.best_dev, outcome)

    def chosen_lr(self, recipe: str) -> float:
        """Return the learning rate with the best dev score among those that trained, or among all if none
        did. Ties are broken by the lower negative log-likelihood, then by the smaller rate.
        """
        decides = (self.task.decides(self.request.base), NLL)

        def merit(trial: Trial) -> tuple[bool, list[float], float]:
            scores = [metric.merit(trial.dev.get(metric.name)) for metric in decides]
            return trial.outcome == "trained", scores, -trial.lr

        return max((self.trial(recipe, lr) for lr in self.request.lrs), key=merit).lr

    def open_seed_runs(self, recipe: str) -> int:
        """Return how many runs with the other seeds are left, whichever learning rate is chosen."""
        states = [self.folder(recipe, lr, self.seeds[0]).status().state for lr in self.request.lrs]
        if any(state != "done" for state in states):
            return len(self.seeds) - 1
        lr = self.chosen_lr(recipe)
        return sum(self.folder(recipe, lr, seed).status().state != "done" for seed in self.seeds[1:])

"""The runs of a comparison: every recipe at every learning rate, and at the chosen one with the reported
seeds.
"""

from __future__ import annotations

from dataclasses import replace

from normlab.comparison.judge import trial
from normlab.comparison.request import CompareRequest, placed
from normlab.comparison.result import Trial, choose
from normlab.config.config import Config, SeedConfig, run_id
from normlab.errors import UserError
from normlab.runs.folder import RunFolder
from normlab.tasks.registry import TASKS
from normlab.training.devices import resolved_precision
from normlab.training.recipes.grammar import resolve


class Grid:
    """The configurations of a comparison, by recipe, learning rate and seed."""

    def __init__(self, request: CompareRequest) -> None:
        self.request = request = placed(request)
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

    def trials(self, recipe: str) -> tuple[Trial, ...]:
        """Return the results of a recipe's sweep."""
        return tuple(trial(f, lr) for f, lr in zip(self.sweep(recipe), self.swept, strict=True))

    def chosen_lr(self, recipe: str) -> float:
        """Return the learning rate that the sweep chose, see ``choose``, or the only one."""
        return choose(self.trials(recipe)) if self.swept else self.request.lrs[0]

    def open_seed_runs(self, recipe: str) -> int:
        """Return how many runs with the reported seeds are left, whichever learning rate is chosen."""
        if any(folder.status().state != "done" for folder in self.sweep(recipe)):
            return len(self.seeds)
        lr = self.chosen_lr(recipe)
        return sum(self.folder(recipe, lr, seed).status().state != "done" for seed in self.seeds)

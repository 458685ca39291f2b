"""The request of a comparison, as data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from normlab.errors import UserError
from normlab.spec.allowed import AMOUNT, COUNT, POSITIVE, SIZE, Range, check
from normlab.spec.arguments import validate_arguments
from normlab.spec.config import Config, OptimConfig, TrainConfig
from normlab.spec.fields import no_flag


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(jobs: int) -> int:
    """Return the threads of each of so many processes side by side: an equal share of the usable cores."""
    return max(1, usable_cores() // jobs)


@validate_arguments
@dataclass(frozen=True)
class CompareRequest:
    """Recipes to train at several learning rates with a seed of its own, and at the best one with others."""

    title: str = "Comparison"
    """Title of the page."""
    recipes: tuple[str, ...] = ("post", "post+warmup", "pre", "pre+fixnorm+scalenorm")
    """Names of recipes, such as post post+warmup enc:post/dec:pre; `normlab recipes` lists their parts."""
    lrs: tuple[float, ...] = (1e-3, 2e-3)
    """Peak learning rates to try; each recipe's own is chosen by dev loss with the sweep's seed."""
    seeds: int = 5
    """Number of reported seeds, at the chosen learning rate: ``first_seed``, ``first_seed + 1`` and so on;
    two cannot tell recipes apart, see --plan.
    """
    first_seed: int = 1
    """The first of the reported seeds."""
    sweep_seed: int = 0
    """Seed with which learning rates are tried, and which is not reported."""
    base: Config = no_flag(Config(optim=OptimConfig(warmup_steps=400), train=TrainConfig(precision="auto")))
    """Everything that is not a recipe's choice, a learning rate or a seed; ``normlab.configs`` has more."""
    jobs: int = 0
    """Runs to train at the same time; 0: one per usable core, or a single one on a GPU; on Ray as many as its
    CPUs or GPUs have room for.
    """
    on: str = "local"
    """Where runs are trained: local (this machine), or ray: the Ray cluster at RAY_ADDRESS, else the one that
    runs on this machine, else a new one on this machine alone.
    """
    out: Path = Path("runs")
    """Folder of the run folders, the prepared data, ``comparison.json`` and the page."""
    margin: float = 0.0
    """Smallest difference of the task's first metric that matters; 0: ten units of its last digit."""
    exchanges: int = 2000
    """Random exchanges of outputs in the comparison of the very models."""
    force: bool = False
    """Also train combinations that their source does not define; their results are marked."""
    command: str = no_flag("")
    """The command as it was typed, for the page; empty when called from Python."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipes", tuple(name.strip() for name in self.recipes))
        for name, given in (("recipes", self.recipes), ("lrs", self.lrs)):
            if not given:
                raise UserError(f"a comparison needs at least one of {name}, got none")
            if len(set(given)) < len(given):
                twice = next(item for item in given if given.count(item) > 1)
                raise UserError(f"{name} hold {twice} twice; name each once")
        least_exchanges = Range(least=100, whole=True)
        check(
            self,
            {
                POSITIVE: "lrs",
                SIZE: "seeds",
                COUNT: "jobs first_seed sweep_seed",
                AMOUNT: "margin",
                least_exchanges: "exchanges",
            },
        )
        if len(self.lrs) > 1 and self.first_seed <= self.sweep_seed < self.first_seed + self.seeds:
            raise UserError(
                f"sweep_seed is {self.sweep_seed}, and the reported seeds are {self.first_seed} to "
                f"{self.first_seed + self.seeds - 1}; the seed that chooses a learning rate cannot be "
                "reported, choose another --sweep-seed or --first-seed"
            )

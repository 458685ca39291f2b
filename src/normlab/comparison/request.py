"""The request of a comparison, as data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Lt

from normlab.config.config import Config, OptimConfig, TrainConfig
from normlab.config.fields import Amount, Count, Positive, Size, no_flag
from normlab.config.io import validated
from normlab.errors import UserError
from normlab.training.jobs.place import place


def _base() -> Config:
    return Config(optim=OptimConfig(warmup_steps=400), train=TrainConfig(precision="auto"))


@validated
@dataclass(frozen=True)
class CompareRequest:
    """Recipes to train at several learning rates with a seed of its own, and at the best one with others."""

    title: str = "Comparison"
    """Title of the page."""
    recipes: tuple[str, ...] = ("post", "post+warmup", "pre", "pre+fixnorm+scalenorm")
    """Names of recipes, such as post post+warmup enc:post/dec:pre; `normlab recipes` lists their parts."""
    lrs: tuple[Positive, ...] = (1e-3, 2e-3)
    """Peak learning rates to try; each recipe's own is chosen by dev loss with the sweep's seed."""
    seeds: Size = 5
    """Number of reported seeds, at the chosen learning rate: ``first_seed``, ``first_seed + 1`` and so on;
    two cannot tell recipes apart, see --plan.
    """
    first_seed: Count = 1
    """The first of the reported seeds."""
    sweep_seed: Count = 0
    """Seed with which learning rates are tried, and which is not reported."""
    base: Config = field(default_factory=_base, metadata={"flag": False})
    """Everything that is not a recipe's choice, a learning rate or a seed; `normlab.cli.presets` has more."""
    jobs: Count = 0
    """Runs to train at the same time; 0: one per usable core, or a single one on a GPU; on Ray as many as its
    CPUs or GPUs have room for.
    """
    on: str = "local"
    """Where runs are trained: local (this machine), or ray: the Ray cluster at RAY_ADDRESS, else the one that
    runs on this machine, else a new one on this machine alone.
    """
    out: Path = Path("runs")
    """Folder of the run folders, the prepared data, ``comparison.json`` and the page."""
    margin: Amount = 0.0
    """Smallest difference of the task's first metric that matters; 0: ten units of its last digit."""
    exchanges: Annotated[int, Ge(100), Lt(2**63)] = 2000
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
        if len(self.lrs) > 1 and self.first_seed <= self.sweep_seed < self.first_seed + self.seeds:
            raise UserError(
                f"sweep_seed is {self.sweep_seed}, and the reported seeds are {self.first_seed} to "
                f"{self.first_seed + self.seeds - 1}; the seed that chooses a learning rate cannot be "
                "reported, choose another --sweep-seed or --first-seed"
            )


def placed(request: CompareRequest) -> CompareRequest:
    """Return a request whose runs at the same time, and threads of each, are those of its place."""
    machine = request.base.machine
    jobs, threads = place(request.on).share(request.jobs, machine)
    return replace(request, jobs=jobs, base=replace(request.base, machine=replace(machine, threads=threads)))

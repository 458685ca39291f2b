"""Flags that name what is examined, a recipe or a model of yours, for the commands that examine one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from tyro.conf import arg

from normlab.cli.common import RUNS, ConfigParts, Imports, Switch, base_of, config_name, resolved
from normlab.cli.flags import ConfigFlags, load
from normlab.errors import UserError
from normlab.spec.config import Config, run_id
from normlab.spec.fields import flag_name

if TYPE_CHECKING:
    from normlab.examine.subjects import Case

FLAGS = {
    "blocks=": "--blocks encoder.layer",
    "branches=": "--branches attn mlp",
    "loss=lambda": "--loss my_package.my_module:loss",
    "call=lambda": "--batch with what the model's forward takes",
}
"""Arguments in Python, and the flags that replace them on the command line."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A recipe at its initialisation, or any torch module."""

    model: str = ""
    """package.module:function that returns your model; importable, or in the current directory."""
    batch: str = ""
    """package.module:function that returns a batch for it: a tensor, or a tuple or dict of arguments."""
    loss: str = ""
    """package.module:function (model, batch) -> scalar; without it the model's output holds its loss."""
    own_optimiser: str = ""
    """package.module:function (model) -> torch.optim.Optimizer; without it --model is stepped by an Adam."""
    blocks: tuple[str, ...] = ()
    """The container of your model's repeated blocks, or globs for them, if they are not found."""
    branches: tuple[str, ...] = ()
    """Modules inside a block whose outputs are added to the stream, if the sums are not seen."""
    recipe: str
    """A placement and what goes with it, such as pre+scalenorm; `normlab recipes` lists the parts."""
    lr: float | None = None
    """Learning rate of the training to come; by default that of the configuration."""
    seed: int
    """Seed of the initialisation and the data."""
    flags: ConfigParts
    config: str
    """Where defaults come from: a configuration's name (demo, text, multi30k ...) or a run's config.json."""
    tokens: int = 2048
    """Padded source + target positions of the batch that is examined."""
    out: Path | None = None
    """Folder of the page; by default --runs, or a run's own folder."""
    runs: Path = RUNS
    """Folder of the run folders, where text is also prepared."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print everything as JSON instead of sentences."""
    force: Switch = False
    """Also examine a combination that its source does not define."""
    imports: Imports = ()
    """A module of yours that registers placements, norms, studies and so on; may be given several times."""
    page: ClassVar[str]
    """First part of the names of the page and of the JSON file beside it."""

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        name, base = base_of(argv)
        return cls(recipe=base.recipe, seed=base.seeds.init, flags=ConfigFlags.of(base), config=name)

    def _require_whole(self) -> None:
        """Raise UserError for half of a model, and for flags that nothing reads."""
        if bool(self.model) != bool(self.batch):
            missing = "batch" if self.model else "model"
            raise UserError(
                f"--{missing} is missing: a model of yours needs a batch; give both, as in --{missing} "
                f"my_package.my_module:{missing}"
            )
        if self.model and (unused := self._of_a_recipe()):
            raise UserError(
                f"a model of yours has no configuration, so that nothing reads {' and '.join(unused)}; leave "
                "that out, or name a recipe instead"
            )
        for name in ("loss", "own_optimiser"):
            if getattr(self, name) and not self.model:
                raise UserError(
                    f"{flag_name(name)} goes with --model and --batch; a recipe and a run have their own"
                )
        if self.own_optimiser and self.lr is not None:
            raise UserError("--own-optimiser brings its own learning rate; leave --lr out")

    def _of_a_recipe(self) -> list[str]:
        """Return the flags that were typed and that only a recipe reads."""
        base = load(self.config)
        typed = {"--recipe": self.recipe != base.recipe, "--seed": self.seed != base.seeds.init}
        found = [name for name, there in (typed | {"--force": self.force}).items() if there]
        found += self.flags.differing_from(base)
        return found or ["--config"] * (self.config != config_name(()))

    def _resolved(self) -> Config:
        """The configuration of the recipe."""
        lr = load(self.config).optim.lr if self.lr is None else self.lr
        return resolved(self.config, self.flags, recipe=self.recipe, lr=lr, seed=self.seed, force=self.force)

    def _own(self) -> Case:
        """The model that --model names."""
        from normlab.examine.subjects import of_names

        return of_names(self.model, self.batch, self.loss, optimiser=self.own_optimiser, lr=self.lr)

    def _named(self, subject: str | Config) -> str:
        """Return the name of the page of a model or a configuration, which is never that of another one."""
        if isinstance(subject, Config):
            subject = f"{subject.recipe}-{run_id(subject)[:8]}"
        return f"{self.page}-{re.sub(r'[^A-Za-z0-9_.]+', '-', subject)[-100:]}"


@contextmanager
def flags_for_arguments() -> Iterator[None]:
    """Add the flags to type to a UserError that names arguments in Python."""
    try:
        yield
    except UserError as error:
        typed = ", ".join(flag for python, flag in FLAGS.items() if python in str(error))
        if not typed:
            raise
        raise UserError(f"{error}. On the command line: {typed}") from error

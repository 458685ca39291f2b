"""Flags that name what is examined, a recipe or a model of yours, for the commands that examine one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from tyro.conf import Positional, arg

from normlab.cli import failures
from normlab.cli.common import RUNS, ConfigParts, Imports, Switch, base_of, config_name, flags, resolved
from normlab.cli.flags import ConfigFlags, load
from normlab.errors import UserError
from normlab.spec.config import Config, run_id

if TYPE_CHECKING:
    from normlab.examine.subjects import Case

FLAGS = {
    "blocks=": "--blocks encoder.layer",
    "branches=": "--branches attn mlp",
}
"""Arguments in Python, and the flags that replace them on the command line."""


MOVED = {"--model": "model", "--batch": "batches", "--loss": "loss", "--own-optimiser": "optimizer"}
"""Flags of earlier versions, and what of a Setup they have become."""


def refuse_moved(argv: Sequence[str]) -> None:
    """Raise UserError for flags of earlier versions, with what replaces them."""
    for old, part in MOVED.items():
        if flags(argv, old):
            raise UserError(
                f"{old} is what a Setup holds as {part}; write a function setup() that returns "
                "normlab.Setup(model, batches, loss=…, optimizer=…), and name it: train.py:setup"
            )


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A recipe at its initialisation, or the setup of a file."""

    source: Annotated[Positional[str], arg(metavar="SOURCE")] = ""
    """train.py:setup, a function of yours that returns normlab.Setup(model, batches, …)."""
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
        refuse_moved(argv)
        name, base = base_of(argv)
        return cls(recipe=base.recipe, seed=base.seeds.init, flags=ConfigFlags.of(base), config=name)

    def _require_whole(self) -> None:
        """Raise UserError for flags that nothing reads."""
        if self.source and (unused := self._of_a_recipe()):
            raise UserError(
                f"{self.source} has a configuration or a setup of its own, so that nothing reads "
                f"{' and '.join(unused)}; leave that out, or name a recipe instead"
            )

    def _of_a_recipe(self) -> list[str]:
        """Return the flags that were typed and that only a recipe reads."""
        base = load(self.config)
        seeded = not self._of_file and self.seed != base.seeds.init
        typed = {"--recipe": self.recipe != base.recipe, "--seed": seeded}
        found = [name for name, there in (typed | {"--force": self.force}).items() if there]
        found += self.flags.differing_from(base)
        return found or ["--config"] * (self.config != config_name(()))

    def _resolved(self) -> Config:
        """The configuration of the recipe."""
        lr = load(self.config).optim.lr if self.lr is None else self.lr
        return resolved(self.config, self.flags, recipe=self.recipe, lr=lr, seed=self.seed, force=self.force)

    @property
    def _of_file(self) -> bool:
        """Whether the setup of a file of the user's is examined."""
        return ":" in self.source or self.source.endswith(".py")

    def _own(self, stack: ExitStack) -> Case:
        """The model of the setup, whose file is at home on ``sys.path`` until the stack is closed."""
        from normlab.examine.setups import setup_from_file
        from normlab.examine.subjects import of_setup

        failures.write(f"running {self.source}")
        return of_setup(stack.enter_context(setup_from_file(self.source, seed=self.seed)), self.lr)

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

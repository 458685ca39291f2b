"""What ``check``, ``trial`` and ``diagnose`` take: a setup of yours, a run, or a recipe with its flags."""

from __future__ import annotations

import json
import shlex
import sys
import time
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self

from rich.text import Text
from tyro.conf import Positional, arg

from normlab.cli import errors, terminal
from normlab.cli.options import (
    RUNS,
    ConfigFlags,
    ConfigParts,
    Imports,
    Switch,
    base_of,
    config_name,
    load,
    resolved,
    typed_values,
)
from normlab.config.config import Config
from normlab.errors import UserError

FAILS: Final = 3
"""Exit code where a property fails, or a gate is closed."""
EVERY_SECONDS: Final = 10.0
"""Without a terminal, progress is a line this often."""
MOVED: Final = {"--model": "model", "--batch": "batches", "--loss": "loss", "--own-optimiser": "optimizer"}
"""Flags of earlier versions, and what of a Setup they have become."""


@dataclass(frozen=True, kw_only=True)
class SourceFlags(ABC):
    """The flags that name what is looked at, and how a recipe is made."""

    WHAT: ClassVar[str]
    """What to type, where nothing is named."""
    LR_OF: ClassVar[Sequence[str]] = ("recipe",)
    """The kinds of source that read ``--lr``."""
    OWN: ClassVar[Sequence[str]] = ()
    """Flags of a configuration that have a meaning of their own here."""

    source: Annotated[Positional[str], arg(metavar="SOURCE")] = ""
    """What to take, see above; leave it out to take --recipe."""
    recipe: str = ""
    """A placement and what goes with it, such as pre+scalenorm; `normlab recipes` lists the parts."""
    lr: float | None = None
    """Peak learning rate of a recipe; by default that of the configuration."""
    seed: int
    """Seed of the weights and of the data."""
    flags: ConfigParts
    config: str
    """Where a recipe's defaults come from: a configuration's name (demo, text …) or a run's config.json."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print everything as JSON instead of sentences."""
    runs: Path = RUNS
    """Folder of the run folders, where text is also prepared."""
    force: Switch = False
    """Also take a combination that its source does not define."""
    imports: Imports = ()

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        """Raises UserError for flags of earlier versions, with what replaces them."""
        for old, part in MOVED.items():
            if typed_values(argv, old):
                raise UserError(
                    f"{old} is what a Setup holds as {part}; write a function setup() that returns "
                    "normlab.Setup(model, batches, loss=…, optimizer=…), and name it: train.py:setup"
                )
        name, base = base_of(argv)
        return cls(seed=base.seeds.init, flags=ConfigFlags.of(cls.adapted(base)), config=name)

    @classmethod
    def adapted(cls, base: Config) -> Config:
        """The configuration whose values are the defaults of the flags."""
        return base

    @property
    def kind(self) -> str:
        """What is named: a recipe, if nothing is, a file, hf or a run."""
        if not self.source:
            return "recipe"
        if self.source.startswith("hf:"):
            return "hf"
        return "file" if ":" in self.source or self.source.endswith(".py") else "run"

    def require_one(self) -> None:
        """Raise UserError if nothing is named, or flags that nothing reads."""
        base = self.adapted(load(self.config))
        typed = {
            "--recipe": bool(self.recipe),
            "--lr": self.lr is not None and self.kind not in self.LR_OF,
            "--seed": self.kind == "run" and self.seed != base.seeds.init,
            "--force": self.force,
        }
        of_recipe = [name for name, there in typed.items() if there]
        of_recipe += [name for name in self.flags.differing_from(base) if name not in self.OWN]
        of_recipe = of_recipe or ["--config"] * (self.config != config_name(()))
        if not self.source and not of_recipe and self.lr is None:
            raise UserError(self.WHAT)
        if self.source and of_recipe:
            raise UserError(
                f"{self.source} has a configuration or a setup of its own, so that nothing reads "
                f"{' and '.join(of_recipe)}; leave that out, or name a recipe instead"
            )

    def resolved(self, recipe: str = "") -> Config:
        """The configuration of the recipe, its rate, seed and flags."""
        base = load(self.config)
        return resolved(
            self.config,
            self.flags,
            recipe=recipe or self.recipe or base.recipe,
            lr=base.optim.lr if self.lr is None else self.lr,
            seed=self.seed,
            force=self.force,
        )

    def print_json(self, shown: Sequence[Mapping[str, Any]]) -> None:
        """Print what there is about each source, the only one by itself."""
        print(json.dumps(shown[0] if len(shown) == 1 else shown, ensure_ascii=False, allow_nan=False))

    def print_page(self, path: Path) -> None:
        """Print where a page is, beside JSON to standard error."""
        print(f"page: {path}", file=sys.stderr if self.as_json else sys.stdout)


def command_line() -> str:
    """Return the command as it was typed; read it before a file of the user's has arguments of its own."""
    return shlex.join(["normlab", *sys.argv[1:]])


def title_lines(title: str, facts: Mapping[str, Any]) -> tuple[Text, Text]:
    """What was looked at, and its facts in one line."""
    return Text(title, "bold"), Text("; ".join(f"{name} {value}" for name, value in facts.items()), "dim")


@contextmanager
def progress_line() -> Iterator[Any]:
    """Yield what shows the property that is being tested: a line that changes, or one every so often."""
    console, last = terminal.console(stderr=True), time.monotonic()
    with console.status("") as status:

        def show(name: str, done: int, of: int) -> None:
            nonlocal last
            status.update(f"{done + 1} of {of}: {name}")
            if not console.is_terminal and time.monotonic() - last > EVERY_SECONDS:
                last = time.monotonic()
                errors.write(f"{done + 1} of {of}: {name}")

        yield show

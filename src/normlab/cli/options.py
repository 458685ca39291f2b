"""The flags that commands read: those of a configuration, and those that several commands share.

Every field of a configuration's sections is a flag unless it is declared to be none. ``--help`` shows the
field's docstring, and as its default the value in the configuration that ``--config`` names. A new option is
therefore one field; a test freezes the set.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import shlex
import sys
import time
from abc import ABC
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field, fields, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, get_type_hints

from rich.text import Text
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, Suppress, UseAppendAction, arg

from normlab.base.io import changes_numbers, flag_name, is_flag, is_utf8
from normlab.cli import advice, errors, terminal
from normlab.cli.presets import CONFIGS
from normlab.errors import NoStepError, UserError, nearest
from normlab.lab.config import PARALLEL_TEXTS, Config, SeedConfig
from normlab.lab.runs.folder import RunFolder, find_run, read_config

if TYPE_CHECKING:
    from normlab.setups.named import NamedSetup

RUNS = Path("runs")
Switch = FlagCreatePairsOff[bool]
_IMPORT = "A module of yours that registers placements, norms, tasks and so on; may be given several times."
Imports = Annotated[UseAppendAction[tuple[str, ...]], arg(name="import", metavar="MODULE", help=_IMPORT)]


@functools.cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Class to field to docstring, from a module's source: Python does not keep them at run time."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        for pair in pairwise(getattr(node, "body", ())):
            match node, pair:
                case (
                    ast.ClassDef(name=owner),
                    (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))),
                ):
                    found.setdefault(owner, {})[name] = text
    return found


def flags_of(section: Any, *, optional: bool = False) -> type:
    """Build the dataclass of a section's flags, which tyro reads.

    The defaults are the section's own; with ``optional``, None, or False for a switch, means not typed.
    """
    hints, texts = get_type_hints(section), _docstrings(section.__module__)[section.__name__]
    help_ = {name: " ".join(text.split()).replace("``", "") for name, text in texts.items()}
    flags = []
    for f in filter(is_flag, fields(section)):
        hint, default = hints[f.name], f.default
        if optional and hint is not bool:
            hint, default = hint | None, None
        flags.append((f.name, Annotated[hint, arg(help=help_.get(f.name))], field(default=default)))
    made = make_dataclass(section.__name__, flags, frozen=True)
    made.__doc__ = " ".join((section.__doc__ or "").split())
    return made


_SECTIONS: dict[str, Any] = {
    f.name: flags_of(section)
    for f, section in zip(fields(Config), get_type_hints(Config).values(), strict=True)
    if is_flag(f)
}
_Sections: Any = make_dataclass("_Sections", _SECTIONS.items(), frozen=True)


class ConfigFlags(_Sections):
    """The values of a configuration's flags, by section."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """The flags of a configuration, as defaults."""
        given = {
            name: kind(**{f.name: getattr(getattr(config, name), f.name) for f in fields(kind)})
            for name, kind in _SECTIONS.items()
        }
        return cls(**given)

    def changed(self, config: Config) -> list[str]:
        """The fields whose values differ from a configuration's."""
        return [
            name
            for section in _SECTIONS
            for name, value in vars(getattr(self, section)).items()
            if value != getattr(getattr(config, section), name)
        ]

    def applied_to(self, config: Config) -> Config:
        """The configuration with the typed values; new texts replace the old ones and their digest."""
        typed = {name: replace(getattr(config, name), **vars(getattr(self, name))) for name in _SECTIONS}
        data = typed["data"]
        if data.dataset not in ("", config.data.dataset):
            old: dict[str, Any] = {
                name: "" for name in PARALLEL_TEXTS if getattr(data, name) == getattr(config.data, name)
            }
            data = replace(data, **old)
        where = [f.name for f in fields(data) if not changes_numbers(f)]
        if any(getattr(data, name) != getattr(config.data, name) for name in where):
            data = replace(data, digest="")
        return replace(config, **typed | {"data": data})


def load(name_or_file: str) -> Config:
    """Return a configuration by name, or that of a run from its ``config.json``.

    Raises UserError for an unknown name, with the nearest known one; FileNotFoundError for a missing file.
    """
    if not _is_file_name(name_or_file):
        if name_or_file in CONFIGS:
            return CONFIGS[name_or_file]()
        raise UserError(
            f"no configuration is called {name_or_file!r}{nearest(name_or_file, CONFIGS)}; or give a file: "
            "--config runs/<id>/config.json"
        )
    path = Path(name_or_file)
    if path.exists() and not path.is_file():
        raise UserError(f"--config is {name_or_file!r}, not a regular file; name a run's config.json")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; each run of `normlab run list` has a config.json")
    return read_config(path)


def _is_file_name(name_or_file: str) -> bool:
    return name_or_file.endswith(".json") or "/" in name_or_file


ConfigParts = Annotated[OmitArgPrefixes[ConfigFlags], arg(name="")]


def typed_values(argv: Sequence[str], name: str) -> list[str]:
    """Return the values of a flag on the command line before it is parsed."""
    found = []
    for place, word in enumerate(argv):
        key, equals, value = word.partition("=")
        if key.startswith("--") and flag_name(key[2:]) == name:
            found.append(value if equals else "".join(argv[place + 1 : place + 2]))
    return found


def typed_value(argv: Sequence[str], name: str) -> str | None:
    """Return the value of a flag on the command line before it is parsed; the last one counts."""
    return next(reversed(typed_values(argv, name)), None)


def require_text(argv: Sequence[str]) -> None:
    """Raise UserError for a word that is not UTF-8: no configuration or page can hold it."""
    for word in argv:
        if not is_utf8(word):
            raise UserError(
                f"{word!r} is not UTF-8; rename a file of that name, or type text in UTF-8, in a terminal "
                "set to UTF-8: export LC_ALL=C.UTF-8"
            )


def require_places(argv: Sequence[str]) -> None:
    """Raise UserError for a place that is empty, or begins with a $ or ~ that the shell did not replace."""
    for name in ("--out", "--output", "--page", "--runs", "--data"):
        for value in typed_values(argv, name):
            if not value:
                raise UserError(f"{name} is empty; name a place, such as {name} . for the current directory")
            if value.startswith(("$", "~")):
                raise UserError(
                    f"{name} is {value!r}: the shell keeps {value[0]} in single quotes or after =; "
                    f"type {name} {value}, or {name} './{value}' for a place of that name"
                )


def config_name(argv: Sequence[str]) -> str:
    """Return the value of ``--config``, else a configuration that suits the given text, else ``demo``."""
    suiting = {
        "--train-src": "text",
        "--dataset": "text",
        "--train-text": "language_model",
        "--train-pairs": "classification",
    }
    given = (name for typed, name in suiting.items() if typed_value(argv, typed))
    return typed_value(argv, "--config") or next(given, "demo")


def base_of(argv: Sequence[str]) -> tuple[str, Config]:
    """The name of the configuration that ``--config`` asks for, and the configuration.

    Modules given with ``--import`` are imported first, because they may define it.
    """
    if imports := typed_values(argv, "--import"):
        from normlab.lab.recipes.plugins import load_plugins

        load_plugins(*imports)
    name = config_name(argv)
    return name, load(name)


def resolved(name: str, flags: ConfigFlags, *, recipe: str, lr: float, seed: int, force: bool) -> Config:
    """Return the configuration of a name or file with the typed flags, resolved for this machine.

    Only what is typed changes the configuration in a run's file.
    """
    from normlab.lab.recipes import build, grammar
    from normlab.lab.training.devices import resolved_precision

    base = load(name)
    asked = flags.applied_to(base)
    config = replace(asked, optim=replace(asked.optim, lr=lr))
    if seed != base.seeds.init:
        config = replace(config, seeds=SeedConfig.of(seed))
    if recipe != base.recipe or not _is_file_name(name):
        config = grammar.resolve(recipe, config, force=force, kept=flags.changed(base))
    else:
        grammar.require_known(config)
        config = replace(config, own_code=grammar.own_code(config))
    for note in build.notes([config], flags.changed(base), asked):
        errors.write(note)
    return resolved_precision(config)


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The flags of commands that read the weights of a run."""

    run_folder: Annotated[Positional[str], arg(metavar="RUN")]
    """A run's folder, or the beginning of its id."""
    weights: Literal["average", "best", "last"] | None = None
    """The weights to read; by default those that were tested."""
    runs: Path = RUNS
    """Folder of the run folders."""
    imports: Imports = ()

    def folder(self) -> RunFolder:
        """The run's folder. Raises UserError for a recipe with parts that are not registered here."""
        from normlab.lab.recipes.grammar import require_known

        folder = find_run(self.run_folder, self.runs)
        require_known(folder.config())
        return folder


FAILS: Final = 3
"""Exit code if a property fails or a gate is closed."""
EVERY_SECONDS: Final = 10.0
"""Without a terminal, a line of progress is printed this often."""


@dataclass(frozen=True, kw_only=True)
class SourceFlags(ABC):
    """The flags that name what is examined, and those from which a recipe is made."""

    WHAT: ClassVar[str]
    """What to type, shown if nothing is named."""
    LR_OF: ClassVar[Sequence[str]] = ("recipe",)
    """The kinds of source that read ``--lr``."""
    OWN: ClassVar[Sequence[str]] = ()
    """Flags of a configuration that mean something of their own here."""
    OF_RECIPE: ClassVar[Collection[str]] = ("lr", "config", "runs", "force", "imports")
    """Fields that only a recipe or a run reads, besides those of a configuration."""

    source: Annotated[Positional[str], arg(metavar="SOURCE")] = ""
    """One of those above; leave it out for a recipe."""
    module: Annotated[str, arg(aliases=["-m"])] = ""
    """Run a module as the script, as in python -m."""
    arguments: Suppress[tuple[str, ...]] = ()
    """What the user's script is given: all that is typed after --."""
    recipe: str = ""
    """A placement and other parts, such as pre+scalenorm; normlab recipes lists them."""
    lr: float | None = None
    """Peak learning rate of a recipe; by default the configuration's."""
    seed: int
    """Seed of the weights and of the data."""
    flags: ConfigParts
    config: str
    """Where a recipe's defaults come from: a configuration's name (demo, text …) or a run's config.json."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print JSON instead of sentences."""
    runs: Path = RUNS
    """Folder that holds the run folders and prepared text."""
    force: Switch = False
    """Also allow a combination that its source does not define."""
    imports: Imports = ()

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        name, base = base_of(argv)
        return cls(seed=base.seeds.init, flags=ConfigFlags.of(cls.adapted(base)), config=name)

    @classmethod
    def adapted(cls, base: Config) -> Config:
        """The configuration whose values are the defaults of the flags."""
        return base

    @classmethod
    def is_of_recipe(cls, field: str) -> bool:
        """Whether only a recipe or a run reads a field: one of these, or most of a configuration's."""
        of_configuration = field not in {f.name for f in fields(cls)} and flag_name(field) not in cls.OWN
        return of_configuration or field in cls.OF_RECIPE

    @property
    def command(self) -> str:
        """The name of the command."""
        return self.WHAT.split()[0]

    @property
    def kind(self) -> str:
        """What kind of thing is named: script, file, hf or run; recipe if nothing is."""
        if self.module:
            return "script"
        if not self.source:
            return "recipe"
        if self.source.startswith("hf:"):
            return "hf"
        if ":" in self.source:
            return "file"
        return "script" if self.source.endswith(".py") else "run"

    def require_one(self) -> None:
        """Raise UserError if nothing is named, or if flags are typed that would be ignored."""
        if self.arguments and self.kind != "script":
            raise UserError(
                f"only a script takes what is typed after --, as in train.py -- {self.arguments[0]}"
            )
        if self.source and self.module:
            raise UserError(f"{self.source} and -m {self.module} are two scripts; name one of them")
        base = self.adapted(load(self.config))
        typed = {
            "--recipe": bool(self.recipe),
            "--lr": self.lr is not None and self.kind not in self.LR_OF,
            "--seed": self.kind == "run" and self.seed != base.seeds.init,
            "--force": self.force,
        }
        of_recipe = [name for name, there in typed.items() if there]
        of_recipe += [name for name in map(flag_name, self.flags.changed(base)) if name not in self.OWN]
        of_recipe = of_recipe or ["--config"] * (self.config != config_name(()))
        named = self.source or self.module
        if not named and not of_recipe and self.lr is None:
            raise UserError(self.WHAT)
        if named and of_recipe:
            raise UserError(
                f"{named} has a configuration or a setup of its own, so normlab would ignore "
                f"{' and '.join(of_recipe)}; leave that out, or name a recipe instead"
            )

    @contextmanager
    def script_setup(self, **how: Any) -> Iterator[NamedSetup]:
        """Run the script up to its first steps, and yield the setup that it shows."""
        from normlab.setups.script import setup_from_script

        script, is_module = self.module or self.source, bool(self.module)
        advice.require_script(script, is_module=is_module, command=self.command)
        errors.write(f"running {script} up to its first steps")
        how |= {"module": is_module, "seed": self.seed}
        with ExitStack() as stack:
            try:
                source = stack.enter_context(setup_from_script(script, self.arguments, **how))
            except NoStepError as error:
                more = "" if is_module else advice.for_script_without_step(script, self.command)
                raise UserError(f"{error}{more}") from error
            yield source

    def resolved(self, recipe: str = "") -> Config:
        """The configuration that the recipe, its rate, its seed and the other flags make."""
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
        """Print a list of what there is about each source; if there is just one, without the list."""
        print(json.dumps(shown[0] if len(shown) == 1 else shown, ensure_ascii=False, allow_nan=False))

    def print_page(self, path: Path) -> None:
        """Print where a page is: to standard error if standard output is JSON."""
        print(f"page: {path}", file=sys.stderr if self.as_json else sys.stdout)


def command_line() -> str:
    """Return the command as it was typed. Call this before a user's file runs, which may change sys.argv."""
    return shlex.join(["normlab", *sys.argv[1:]])


def title_lines(title: str, facts: Mapping[str, Any]) -> tuple[Text, Text]:
    """What was examined, and its facts in one line."""
    return Text(title, "bold"), Text("; ".join(f"{name} {value}" for name, value in facts.items()), "dim")


@contextmanager
def progress_line() -> Iterator[Any]:
    """Yield a function that shows what is in progress: in one changing line, or in new ones now and then.

    Meanwhile what a user's code prints goes to standard error, because standard output is for the answer.
    """
    console, last = terminal.console(stderr=True), time.monotonic()
    with redirect_stdout(sys.stderr), console.status("") as status:

        def show(name: str, done: int, of: int) -> None:
            nonlocal last
            status.update(f"{done + 1} of {of}: {name}")
            if not console.is_terminal and time.monotonic() - last > EVERY_SECONDS:
                last = time.monotonic()
                errors.write(f"{done + 1} of {of}: {name}")

        yield show

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
from normlab.lab.config import PARALLEL_TEXTS, Config, DataConfig, SeedConfig
from normlab.lab.runs.folder import RunFolder, find_run, read_config

if TYPE_CHECKING:
    from normlab.setups.named import NamedSetup

RUNS = Path("runs")
Switch = FlagCreatePairsOff[bool]
_IMPORT = "A module of yours that registers placements, norms, tasks and so on; may be given several times."
Imports = Annotated[UseAppendAction[tuple[str, ...]], arg(name="import", metavar="MODULE", help=_IMPORT)]


@functools.cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields by class and name, from a module's source: Python does not keep any."""
    docstrings: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field_and_text in pairwise(node.body):
            match field_and_text:
                case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                    docstrings.setdefault(node.name, {})[name] = text
    return docstrings


def flags_of(section: Any, *, optional: bool = False) -> type:
    """Build the dataclass of a section's flags, which tyro reads.

    The defaults are the section's own; with ``optional``, None, or False for a switch, means not typed.
    """
    hints, docstrings = get_type_hints(section), _docstrings(section.__module__)[section.__name__]
    flags = []
    for f in filter(is_flag, fields(section)):
        hint, default = hints[f.name], f.default
        if optional and hint is not bool:
            hint, default = hint | None, None
        help_ = None
        if f.name in docstrings:
            help_ = " ".join(docstrings[f.name].split()).replace("``", "")
        flags.append((f.name, Annotated[hint, arg(help=help_)], field(default=default)))
    kind = make_dataclass(section.__name__, flags, frozen=True)
    kind.__doc__ = " ".join((section.__doc__ or "").split())
    return kind


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
        sections = {}
        for name, kind in _SECTIONS.items():
            values = vars(getattr(config, name))
            sections[name] = kind(**{f.name: values[f.name] for f in fields(kind)})
        return cls(**sections)

    def changed(self, config: Config) -> list[str]:
        """The fields whose values differ from a configuration's."""
        names: list[str] = []
        for section in _SECTIONS:
            others = vars(getattr(config, section))
            flags = vars(getattr(self, section))
            names += [name for name, value in flags.items() if value != others[name]]
        return names

    def applied_to(self, config: Config) -> Config:
        """The configuration with the typed values; new texts replace the old ones and their digest."""
        sections = {name: replace(getattr(config, name), **vars(getattr(self, name))) for name in _SECTIONS}
        return replace(config, **sections | {"data": _without_old_texts(sections["data"], config.data)})


def _without_old_texts(data: DataConfig, before: DataConfig) -> DataConfig:
    """The data without the texts of a configuration that other ones replace, and without their digest."""
    if data.dataset not in ("", before.dataset):
        untyped = [name for name in PARALLEL_TEXTS if getattr(data, name) == getattr(before, name)]
        data = replace(data, **dict[str, Any](dict.fromkeys(untyped, "")))
    # fields that change no number say where a text is: its content enters by its digest
    places = [f.name for f in fields(data) if not changes_numbers(f)]
    if any(getattr(data, name) != getattr(before, name) for name in places):
        data = replace(data, digest="")
    return data


def load(name_or_file: str) -> Config:
    """Return a configuration by name, or that of a run from its ``config.json``.

    Raises UserError for an unknown name, with the nearest known one; FileNotFoundError for a missing file.
    """
    if not _is_file_name(name_or_file):
        if name_or_file in CONFIGS:
            return CONFIGS[name_or_file]()
        raise UserError(
            f"no configuration is called {name_or_file!r}{nearest(name_or_file, sorted(CONFIGS))}; "
            "or give a file: --config runs/<id>/config.json"
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
    values = []
    for word, next_word in zip(argv, (*argv[1:], ""), strict=False):
        key, equals, value = word.partition("=")
        if key.startswith("--") and flag_name(key[2:]) == name:
            values.append(value if equals else next_word)
    return values


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
    typed = typed_value(argv, "--config")
    if typed:
        return typed
    for flag, name in suiting.items():
        if typed_value(argv, flag):
            return name
    return "demo"


def base_of(argv: Sequence[str]) -> tuple[str, Config]:
    """The name of the configuration that ``--config`` asks for, and the configuration.

    Modules given with ``--import`` are imported first, because they may define it.
    """
    imports = typed_values(argv, "--import")
    if imports:
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
    with_flags = flags.applied_to(base)
    config = replace(with_flags, optim=replace(with_flags.optim, lr=lr))
    if seed != base.seeds.init:
        config = replace(config, seeds=SeedConfig.of(seed))
    if recipe != base.recipe or not _is_file_name(name):
        config = grammar.resolve(recipe, config, force=force, kept=flags.changed(base))
    else:
        grammar.require_known(config)
        config = replace(config, own_code=grammar.own_code(config))
    for note in build.notes([config], flags.changed(base), with_flags):
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
        """Whether only a recipe or a run reads a field: those of ``OF_RECIPE``, and those of a configuration
        but for ``OWN``.
        """
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
        of_recipe = self._typed_for_recipe()
        named = self.source or self.module
        if not named and not of_recipe and self.lr is None:
            raise UserError(self.WHAT)
        if named and of_recipe:
            raise UserError(
                f"{named} has a configuration or a setup of its own, so normlab would ignore "
                f"{' and '.join(of_recipe)}; leave that out, or name a recipe instead"
            )

    def _typed_for_recipe(self) -> list[str]:
        """The flags that were typed and that only a recipe reads."""
        base = self.adapted(load(self.config))
        typed = {
            "--recipe": bool(self.recipe),
            "--lr": self.lr is not None and self.kind not in self.LR_OF,
            "--seed": self.kind == "run" and self.seed != base.seeds.init,
            "--force": self.force,
        }
        flags = [flag for flag, is_typed in typed.items() if is_typed]
        flags += [flag for flag in map(flag_name, self.flags.changed(base)) if flag not in self.OWN]
        if not flags and self.config != config_name(()):
            return ["--config"]
        return flags

    @contextmanager
    def script_setup(self, **how: Any) -> Iterator[NamedSetup]:
        """Run the script up to its first steps, and yield the setup that it shows."""
        from normlab.cli.waiting import says_where
        from normlab.setups.script import setup_from_script

        script, is_module = self.module or self.source, bool(self.module)
        advice.require_script(script, is_module=is_module, command=self.command)
        errors.write(f"running {script} up to its first steps")
        how |= {"module": is_module, "seed": self.seed}
        with ExitStack() as stack:
            try:
                with says_where(script):
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

    def print_json(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Print the documents about all sources as a list; a single one is printed without the list."""
        content = documents[0] if len(documents) == 1 else documents
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))

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
    console, last_time = terminal.console(stderr=True), time.monotonic()
    with redirect_stdout(sys.stderr), console.status("") as status:

        def show(name: str, done: int, of: int) -> None:
            nonlocal last_time
            line = f"{done + 1} of {of}: {name}"
            status.update(line)
            if not console.is_terminal and time.monotonic() - last_time > EVERY_SECONDS:
                last_time = time.monotonic()
                errors.write(line)

        yield show

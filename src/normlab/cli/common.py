"""Parts that several commands share: types of flags, and the resolution of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, UseAppendAction, arg

from normlab.cli.flags import ConfigFlags, is_file_name, load
from normlab.config.config import Config, SeedConfig
from normlab.config.fields import flag_name
from normlab.config.io import is_utf8
from normlab.errors import UserError

RUNS = Path("runs")
Switch = FlagCreatePairsOff[bool]
ConfigParts = Annotated[OmitArgPrefixes[ConfigFlags], arg(name="")]
_IMPORT = "A module of yours that registers placements, norms, tasks and so on; may be given several times."
Imports = Annotated[UseAppendAction[tuple[str, ...]], arg(name="import", metavar="MODULE", help=_IMPORT)]


def flags(argv: Sequence[str], name: str) -> list[str]:
    """Return the values of a flag on the command line before it is parsed."""
    found = []
    for place, word in enumerate(argv):
        key, equals, value = word.partition("=")
        if key.startswith("--") and flag_name(key[2:]) == name:
            found.append(value if equals else "".join(argv[place + 1 : place + 2]))
    return found


def flag(argv: Sequence[str], name: str) -> str | None:
    """Return the value of a flag on the command line before it is parsed; the last one counts."""
    return next(reversed(flags(argv, name)), None)


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


def require_text(argv: Sequence[str]) -> None:
    """Raise UserError for a word that is not UTF-8, which no configuration and no page can hold."""
    for word in argv:
        if not is_utf8(word):
            raise UserError(
                f"{word!r} is not UTF-8; rename a file of that name, or type text in UTF-8, in a terminal "
                "that is set to it: export LC_ALL=C.UTF-8"
            )


def require_places(argv: Sequence[str]) -> None:
    """Raise UserError for a place without a name, or with one that the shell should have replaced."""
    for name in ("--out", "--output", "--page", "--runs", "--data"):
        for value in flags(argv, name):
            if not value:
                raise UserError(f"{name} is empty; name a place, such as {name} . for the current directory")
            if value.startswith(("$", "~")):
                raise UserError(
                    f"{name} is {value!r}: the shell replaces no {value[0]} in single quotes or after =; "
                    f"type {name} {value}, or {name} './{value}' for a place of that name"
                )


def config_name(argv: Sequence[str]) -> str:
    """Return the value of ``--config``, or a configuration that suits the text, ``demo`` without one."""
    suiting = {
        "--train-src": "text",
        "--dataset": "text",
        "--train-text": "language_model",
        "--train-pairs": "classification",
    }
    given = (name for typed, name in suiting.items() if flag(argv, typed))
    return flag(argv, "--config") or next(given, "demo")


def base_of(argv: Sequence[str]) -> tuple[str, Config]:
    """The name of the configuration that ``--config`` asks for, and the configuration.

    Modules given with ``--import`` are imported first, because they may define it.
    """
    if imports := flags(argv, "--import"):
        from normlab.training.recipes.plugins import load_plugins

        load_plugins(*imports)
    name = config_name(argv)
    return name, load(name)


def resolved(name: str, flags: ConfigFlags, *, recipe: str, lr: float, seed: int, force: bool) -> Config:
    """Return the configuration of a name or file with the typed flags, resolved for this machine.

    The file of a run is changed only by what is typed.
    """
    from normlab.training.devices import resolved_precision
    from normlab.training.recipes.grammar import own_code, require_known, resolve

    base = load(name)
    config = flags.applied_to(base)
    config = replace(config, optim=replace(config.optim, lr=lr))
    if seed != base.seeds.init:
        config = replace(config, seeds=SeedConfig(seed, seed, seed))
    if recipe != base.recipe or not is_file_name(name):
        config = resolve(recipe, config, force=force)
    else:
        require_known(config)
        config = replace(config, own_code=own_code(config))
    return resolved_precision(config)


def files_of(names: Sequence[str]) -> list[Path]:
    """Return the files that ``lines_of`` reads for these names."""
    from normlab.data.sources import file_of, open_lines

    texts = [open_lines("/dev/stdin" if name == "-" else name) for name in names]
    return [path for path in map(file_of, texts) if path is not None]


def lines_of(name: str) -> list[str]:
    """Return the lines of a file or a column, see ``data.sources``; - is standard input."""
    from normlab.data.sources import open_lines

    return list(open_lines("/dev/stdin" if name == "-" else name))

"""A command that trains with a seed, and what its runs depend on: its words, its files and what is named."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any, Final

from normlab.base.files import sha256_of
from normlab.errors import UserError

SEED: Final = "{seed}"
DIGITS: Final = 12
"""Hexadecimal digits of the name of a command's folder."""


@dataclass(frozen=True)
class Command:
    """A command in which ``{seed}`` stands for the seed, with the digests of the files that it depends on.

    Two commands with the same words and the same content of files are the same, and share their runs.
    """

    text: str
    files: Mapping[str, str]
    """The SHA-256 of each file, by its path from the folder where the command is run."""

    @classmethod
    def of(cls, text: str, depends: Sequence[Path] = (), *, name: str) -> Command:
        """Read a command. Raises UserError, with its ``name``, if it is empty, holds no ``{seed}`` or cannot
        be split into words.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError(f"{name} {text!r} cannot be split into words: {error}; mend its quotes") from None
        if not words:
            raise UserError(f"{name} is empty; type a command such as 'python train.py --seed={SEED}'")
        if SEED not in text:
            raise UserError(
                f"{name} {text!r} has no {SEED}, so that each of its runs would be the same; write {SEED} "
                "where the command takes its seed"
            )
        paths = dict.fromkeys((*_files_of(words), *_files_below(depends)))
        return cls(text, {_from_here(path): sha256_of(path) for path in sorted(paths)})

    @property
    def id(self) -> str:
        """A name for the folder of its runs: a digest of the words and of the content of its files."""
        content = json.dumps([self.text, sorted(self.files.items())])
        return hashlib.sha256(content.encode()).hexdigest()[:DIGITS]

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """When each file was written and how large it is: a quick sign that one was changed meanwhile."""
        states = [Path(path).stat() if Path(path).exists() else None for path in self.files]
        return tuple((0, 0) if state is None else (state.st_mtime_ns, state.st_size) for state in states)

    def words(self, seed: int) -> list[str]:
        """The words of the command with one seed."""
        return [word.replace(SEED, str(seed)) for word in shlex.split(self.text)]


def _from_here(path: Path) -> str:
    """A path relative to the current folder if it lies below it; any other path as it is."""
    folder, absolute = Path.cwd(), path.absolute()
    return str(absolute.relative_to(folder) if absolute.is_relative_to(folder) else path)


def _files_of(words: Sequence[str]) -> Iterator[Path]:
    """The files that a command names, and the modules beside a Python script that it imports.

    A word with spaces may be a command itself, as in ``sh -c 'python train.py'``.
    """
    for place, word in enumerate(words):
        inner = _words_in(word)
        if len(inner) > 1:
            yield from _files_of(inner)
        paths = [Path(word), Path(word.partition("=")[2])]  # also --config=FILE
        if place and words[place - 1] == "-m":
            module = Path(*word.split("."))
            paths += [module.with_suffix(".py"), module / "__main__.py"]
        for path in paths:
            # the interpreter that a command names by its path is none of its own files
            is_program = place == 0 and path.is_absolute()
            if is_program or not path.is_file():
                continue
            yield path
            if path.suffix == ".py":
                yield from _imported_by(path)


def _words_in(word: str) -> list[str]:
    try:
        return shlex.split(word)
    except ValueError:  # it is not a command
        return []


def _imported_by(script: Path) -> Iterator[Path]:
    """The files below the current folder that a script imports; nothing is run to find them."""
    finder = ModuleFinder(path=[str(script.parent), "."])
    try:
        finder.run_script(str(script))
    except (SyntaxError, UnicodeDecodeError):
        return  # the command itself will say what is wrong
    modules: dict[str, Any] = finder.modules
    for name, module in modules.items():
        if module.__file__ and name != "__main__":
            yield Path(module.__file__)


def _files_below(depends: Sequence[Path]) -> Iterator[Path]:
    """The files that ``--depends`` names, and all in the folders that it names."""
    for path in depends:
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from (file for file in path.rglob("*") if file.is_file())
        else:
            raise UserError(f"--depends names {path}, but there is no such file or folder")

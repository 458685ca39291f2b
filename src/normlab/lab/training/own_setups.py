"""The user's own setups, made anew from a seed: from files, from functions, or from what a Setup holds."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from normlab.errors import UserError
from normlab.lab.recipes.baselines import without_alias
from normlab.setups.function import called, setup_from_file
from normlab.setups.setup import Setup
from normlab.setups.step import with_step
from normlab.trace.restore import same_random_state


def files_of(names: Iterable[str]) -> dict[str, str]:
    """Return the file that each name refers to: ``change.py`` for ``A=change.py``.

    Raises UserError for an invalid short name.
    """
    return {name: name if Path(name).is_file() else without_alias(name) for name in names}


@contextmanager
def opened(setups: Mapping[str, Any], name: str, seed: int) -> Iterator[tuple[Setup, Setup, str]]:
    """Yield the setup of ``name`` made from a seed, the first setup made from the same seed, whose batches
    all share, and the digest of the user's files that the former came from.

    ``setups`` holds for each name a file, a function, or a Setup that can be made anew. Modules that a file
    imports from its own folder stay its own: another file may have others of the same name.
    """
    first = next(iter(setups))
    modules_before = set(sys.modules)

    def new_files() -> dict[str, Path]:
        return _own_files(sys.modules.keys() - modules_before)

    try:
        with _made(setups[first], first, seed) as shared:
            if name == first:
                yield shared, shared, _code(shared, setups[first], new_files())
                return
            _forget(new_files())
            with _made(setups[name], name, seed) as setup:
                yield setup, shared, _code(setup, setups[name], new_files())
    finally:
        _forget(new_files())


@contextmanager
def _made(value: Any, name: str, seed: int) -> Iterator[Setup]:
    """Make a setup from a seed. Raises UserError for one that cannot be made anew."""
    if isinstance(value, str):
        with setup_from_file(value, seed=seed) as source:
            yield with_step(source.setup)
        return
    with same_random_state(seed):
        setup = called(value, name, seed)
        if setup is value:
            parts = [*setup.optimizers] if setup.scheduler is None else [*setup.optimizers, setup.scheduler]
            if setup.make is None or not all(map(callable, parts)):
                raise UserError(
                    f"{name} is a Setup, and each seed needs a model and an optimizer of its own: give a "
                    "function that returns one, or make=, and functions as optimizer= and scheduler="
                )
            setup = replace(setup, model=setup.make())
    yield with_step(setup)


def _code(setup: Setup, value: Any, files: Mapping[str, Path]) -> str:
    """Return the digest of the user's files: those of its modules, or those that define what was given. What
    the modules are called does not matter.
    """
    if not isinstance(value, str):
        parts = [value, setup.loss, setup.step, *map(type, setup.model.modules())]
        modules = {getattr(part, "__module__", None) for part in parts}
        files = _own_files(module for module in modules if module in sys.modules)
    digest = hashlib.sha256()
    for content in sorted(file.read_bytes() for file in files.values()):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def _own_files(modules: Iterable[str]) -> dict[str, Path]:
    """Return the files of those modules that belong to no installed package."""
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = [Path(place).resolve() for place in places]
    installed.append(Path(__file__).resolve().parents[2])  # this package, wherever it lies
    files: dict[str, Path] = {}
    for name in modules:
        given = getattr(sys.modules[name], "__file__", None)
        if not given or not Path(given).is_file():
            continue
        file = Path(given).resolve()
        if not any(map(file.is_relative_to, installed)):
            files[name] = file
    return files


def _forget(modules: Iterable[str]) -> None:
    for name in modules:
        del sys.modules[name]

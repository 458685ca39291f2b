"""The user's own setups, made anew from a seed: from files, from functions, or from what a Setup holds."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from normlab.base.libraries import is_library
from normlab.errors import UserError
from normlab.lab.recipes.baselines import without_alias
from normlab.setups.function import SOURCES, setup_from_file, setup_from_function
from normlab.setups.setup import Setup
from normlab.setups.step import with_step
from normlab.trace.restore import same_random_state


def files_of(names: Iterable[str]) -> dict[str, str]:
    """Return the file that each name refers to: ``change.py`` for ``A=change.py``.

    Raises UserError for an invalid short name.
    """
    return {name: name if Path(name).is_file() else without_alias(name) for name in names}


class OpenedSetup(NamedTuple):
    """A setup that was made from a seed, and what a run of it needs to know of the comparison."""

    setup: Setup
    first_setup: Setup
    """The first setup of the comparison, made from the same seed: all train on its batches."""
    code: str
    """The digest of the user's files that the setup came from."""


@contextmanager
def opened_setup(sources: Mapping[str, Any], name: str, seed: int) -> Iterator[OpenedSetup]:
    """Make the setup of a name from a seed.

    Modules that a file imports from its own folder stay its own: another file may have others of the same
    name.

    Args:
        sources: for each name of the comparison a file, a function, or a Setup that can be made anew.
        name: the setup to open.
        seed: of its start, and of its batches.
    """
    first = next(iter(sources))
    modules_before = set(sys.modules)

    def imported_files() -> dict[str, Path]:
        return _users_files(sys.modules.keys() - modules_before)

    try:
        with _made(sources[first], first, seed) as first_setup:
            if name == first:
                code = _digest_of_code(first_setup, sources[first], imported_files())
                yield OpenedSetup(first_setup, first_setup, code)
                return
            _forget(imported_files())
            with _made(sources[name], name, seed) as setup:
                code = _digest_of_code(setup, sources[name], imported_files())
                yield OpenedSetup(setup, first_setup, code)
    finally:
        _forget(imported_files())


@contextmanager
def _made(source: Any, name: str, seed: int) -> Iterator[Setup]:
    """Make a setup from a seed. Raises UserError for one that cannot be made anew."""
    if isinstance(source, str):
        with setup_from_file(source, seed=seed) as named:
            yield with_step(named.setup)
        return
    with same_random_state(seed):
        setup = setup_from_function(source, name, seed)
        is_handed_over = setup is source  # no function has made it from this seed
        if is_handed_over:
            setup = _made_anew(setup, name)
    yield with_step(setup)


def _made_anew(setup: Setup, name: str) -> Setup:
    """Return a setup with a new model. Raises UserError unless all its parts can be made anew.

    An optimizer or a scheduler that is no function is bound to the model that the setup holds.
    """
    makers = [*setup.optimizers]
    if setup.scheduler is not None:
        makers.append(setup.scheduler)
    if setup.make is None or not all(map(callable, makers)):
        raise UserError(
            f"{name} is a Setup, and each seed needs a model and an optimizer of its own: give a "
            "function that returns one, or make=, and functions as optimizer= and scheduler="
        )
    return replace(setup, model=setup.make())


def _digest_of_code(setup: Setup, source: Any, imported: Mapping[str, Path]) -> str:
    """Return the digest of the user's files that a setup came from, whatever their modules are called.

    These are the ones that define it and, if it came from a file, all that this has imported. What
    ``--import`` names was imported before, so only the former shows it.
    """
    is_named = isinstance(source, str)
    maker = SOURCES.get(source.partition(":")[0]) if is_named else source
    files = {**_defining_files(setup, maker), **(imported if is_named else {})}
    digest = hashlib.sha256()
    for content in sorted(file.read_bytes() for file in files.values()):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def _defining_files(setup: Setup, source: Any) -> dict[str, Path]:
    """Return the user's files that define a source, its loss and step, and the classes of its modules."""
    parts = [source, setup.loss, setup.step, *map(type, setup.model.modules())]
    modules = {getattr(part, "__module__", None) for part in parts}
    return _users_files(module for module in modules if module in sys.modules)


def _users_files(modules: Iterable[str]) -> dict[str, Path]:
    """Return the files of those modules that are the user's."""
    files: dict[str, Path] = {}
    for name in modules:
        given = getattr(sys.modules[name], "__file__", None)
        if not given or not Path(given).is_file():
            continue
        if not is_library(given):
            files[name] = Path(given).resolve()
    return files


def _forget(modules: Iterable[str]) -> None:
    """Let Python import these modules anew when they are next asked for."""
    for name in modules:
        del sys.modules[name]

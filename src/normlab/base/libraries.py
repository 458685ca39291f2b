"""Whose code a file holds: a library's (Python's, an installed package's or normlab's), or the user's."""

from __future__ import annotations

import site
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path


@lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Return whether a file of code came with an installed package."""
    return _is_below(file, _homes_of_packages())


@lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Return whether a file of code belongs to Python, to an installed package or to normlab, and not to
    the user.
    """
    if file.startswith("<"):  # code without a file, such as "<string>", is made by a library
        return True
    return is_installed(file) or _is_below(file, _other_libraries())


def _is_below(file: str, folders: Iterable[Path]) -> bool:
    path = Path(file).resolve()
    return any(path.is_relative_to(folder) for folder in folders)


@lru_cache(maxsize=1)
def _homes_of_packages() -> tuple[Path, ...]:
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({Path(folder).resolve() for folder in folders})


@lru_cache(maxsize=1)
def _other_libraries() -> tuple[Path, ...]:
    """Return the folders of libraries beside those that hold installed packages."""
    folders = [Path(__file__).parents[1]]  # normlab, which may be a checkout
    folders += [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    torch = find_spec("torch")  # wherever it is, such as on PYTHONPATH
    if torch is not None and torch.origin is not None:
        folders.append(Path(torch.origin).parents[1])
    return tuple({folder.resolve() for folder in folders})

"""Modules of other people that register placements, norms, schemes and schedules of their own.

What is imported is named by whoever starts the process, or was installed by them; never by a file that is
read.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from normlab.errors import UserError

ENVIRONMENT = "NORMLAB_IMPORT"
"""Variable with the names of modules, separated by commas; worker processes inherit it."""
GROUP = "normlab.plugins"
"""Entry points of installed packages, imported wherever recipes are resolved."""
HINT = "if a module of yours defines it, add --import my_package.my_module"


def load_plugins(*names: str) -> None:
    """Import modules by name, so that what they register can be chosen, here and in worker processes.

    Found are installed ones and those in the current directory. Those of the variable ``NORMLAB_IMPORT`` and
    of installed packages with an entry point in the group ``normlab.plugins`` are imported with them.

    Raises UserError with the reason why a module cannot be imported.
    """
    wanted = list(dict.fromkeys([*imported(), *names]))
    for installed in entry_points(group=GROUP):
        _import(installed.module, f"installed package's entry point {installed.name!r} in {GROUP!r}")
    if wanted and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for name in wanted:
        _import(name, "--import" if name in names else f"${ENVIRONMENT}")
    if wanted:
        os.environ[ENVIRONMENT] = ",".join(wanted)


def imported() -> list[str]:
    """The modules that ``NORMLAB_IMPORT`` names, here and in worker processes."""
    return os.environ.get(ENVIRONMENT, "").replace(",", " ").split()


def code_digest(sources: Iterable[object]) -> str:
    """Digest of the files outside this package that define some classes and functions; empty if none does.

    What such a file imports in its turn is not looked at.
    """
    names = {getattr(source, "__module__", None) or __name__ for source in sources}
    own = sorted(name for name in names if name.partition(".")[0] != __name__.partition(".")[0])
    if not own:
        return ""
    digest = hashlib.sha256()
    for name in own:
        file = getattr(sys.modules.get(name), "__file__", None)
        digest.update(name.encode() + b"\0")
        digest.update(Path(file).read_bytes() if file else b"")
    return digest.hexdigest()


def _import(name: str, asked_by: str) -> None:
    try:
        import_module(name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name is not None
        hint = ""
        if "/" in name or name.endswith(".py"):
            module = name.removesuffix(".py").strip("./").replace("/", ".")
            hint = f"; give a module and no file: --import {module}"
        elif missing and (name + ".").startswith(f"{getattr(error, 'name', '')}."):
            hint = f"; it is looked for in {Path.cwd()} and among what is installed"
        said = (
            str(error) if isinstance(error, (ImportError, UserError)) else f"{type(error).__name__}: {error}"
        )
        raise UserError(f"cannot import {name!r} ({asked_by}): {said}{hint}") from error

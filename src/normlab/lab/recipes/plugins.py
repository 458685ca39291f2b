"""Plug-ins: modules outside this package that register placements, norms, schemes and schedules.

Only modules that the user names or has installed are imported, never ones that a file names.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from normlab.base.io import validated
from normlab.errors import UserError

ENVIRONMENT = "NORMLAB_IMPORT"
"""Environment variable with the names of modules, separated by commas; worker processes inherit it."""
GROUP = "normlab.plugins"
"""Group of entry points by which installed packages register plug-ins."""
HINT = "if a module of yours defines it, add --import my_package.my_module"


@validated
def load_plugins(*names: str) -> None:
    """Import modules by name, so that recipes here and in worker processes can use what they register.

    Modules are found among the installed ones and in the current directory. Those in the variable
    ``NORMLAB_IMPORT``, and those of installed packages with an entry point in the group ``normlab.plugins``,
    are imported as well.

    Raises UserError with the reason if a module cannot be imported.

    >>> normlab.load_plugins("my_norms")  # a module of yours that registers parts of recipes
    """
    wanted = list(dict.fromkeys([*imported(), *names]))
    for installed in entry_points(group=GROUP):
        _import(installed.module, f"installed package's entry point {installed.name!r} in {GROUP!r}")
    if wanted and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last, so that no file in it shadows a library
    for name in wanted:
        _import(name, "--import" if name in names else f"${ENVIRONMENT}")
    if wanted:
        os.environ[ENVIRONMENT] = ",".join(wanted)


def imported() -> list[str]:
    """The modules that ``NORMLAB_IMPORT`` names, here and in worker processes."""
    return os.environ.get(ENVIRONMENT, "").replace(",", " ").split()


def code_digest(sources: Iterable[object]) -> str:
    """Return the digest of the files outside this package that define some objects; empty if none does.

    Modules that such a file imports do not enter the digest.
    """
    package = __name__.partition(".")[0]
    names = {getattr(source, "__module__", None) or __name__ for source in sources}
    outside = sorted(name for name in names if name.partition(".")[0] != package)
    if not outside:
        return ""
    digest = hashlib.sha256()
    for name in outside:
        file = getattr(sys.modules.get(name), "__file__", None)
        digest.update(name.encode() + b"\0")
        digest.update(Path(file).read_bytes() if file else b"")
    return digest.hexdigest()


def _import(name: str, asked_by: str) -> None:
    try:
        import_module(name)
    except Exception as error:
        # These two say what they are in their message.
        kind = "" if isinstance(error, (ImportError, UserError)) else f"{type(error).__name__}: "
        reason = f"{kind}{error}"
        if not name or name.startswith("."):
            reason = "it is not the name of a module, such as my_package.my_module"
        if "/" in name or name.endswith(".py"):
            module = name.removesuffix(".py").strip("./").replace("/", ".")
            reason += f"; give a module instead of a file: --import {module}"
        elif isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            reason += f"; modules are looked for in {Path.cwd()} and among the installed packages"
        raise UserError(f"cannot import {name!r} ({asked_by}): {reason}") from error

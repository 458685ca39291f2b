"""Read which properties a project allows to fail: ``allow = ["groups"]`` under ``[tool.normlab.check]``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from normlab.base.files import read_toml
from normlab.checks.property import require_property
from normlab.errors import UserError, nearest

FILE: Final = "pyproject.toml"
TABLE: Final = ("tool", "normlab", "check")
KEYS: Final = ("allow",)
FORM: Final = f'write allow = ["groups"] under [{".".join(TABLE)}]'


def allowed_here(folder: Path) -> tuple[str, ...]:
    """Return the properties that the pyproject.toml in a folder allows to fail; none without such a file.

    Raises UserError for a file that cannot be read, and for a word or a property that does not exist.
    """
    file = folder / FILE
    table = _table(file) if file.is_file() else {}
    for word in table:
        if word not in KEYS:
            raise UserError(f"[{'.'.join(TABLE)}] in {file} has {word!r}{nearest(word, KEYS)}; {FORM}")
    names = table.get("allow", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"allow in {file} is {names!r}, and must be a list of properties; {FORM}")
    for name in names:
        require_property(name, f"allow in {file}")
    return tuple(names)


def _table(file: Path) -> Mapping[str, Any]:
    """Return the table ``[tool.normlab.check]`` of a file; empty if there is none."""
    table: Any = read_toml(file)
    for name in TABLE:
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise UserError(f"{name} in {file} is {table!r}, and must be a table; {FORM}")
    return table

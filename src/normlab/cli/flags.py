"""The flags of a configuration: every field of its sections that is not declared without one.

``--help`` shows a field's docstring, and as its default the value in the configuration that ``--config``
names. A new option is therefore one field; a test freezes the set.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from dataclasses import field, fields, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

from tyro.conf import arg

from normlab.cli.presets import CONFIGS
from normlab.config.config import PARALLEL_TEXTS, Config
from normlab.config.fields import changes_numbers, flag_name, is_flag
from normlab.errors import UserError, nearest
from normlab.runs.folder import read_config


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

    The defaults are the section's own; with ``optional`` None, or for a switch False, is what was not typed.
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
        sections = {name: vars(getattr(config, name)) for name in _SECTIONS}
        return cls(
            **{
                name: kind(**{f.name: sections[name][f.name] for f in fields(kind)})
                for name, kind in _SECTIONS.items()
            }
        )

    def differing_from(self, config: Config) -> list[str]:
        """The flags whose values differ from a configuration's, as they are typed."""
        return [
            flag_name(name)
            for section in _SECTIONS
            for name, value in vars(getattr(self, section)).items()
            if value != getattr(getattr(config, section), name)
        ]

    def applied_to(self, config: Config) -> Config:
        """The configuration with what was typed; other texts replace the old ones and their digest."""
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
    if not is_file_name(name_or_file):
        if name_or_file in CONFIGS:
            return CONFIGS[name_or_file]()
        raise UserError(
            f"no configuration is called {name_or_file!r}{nearest(name_or_file, CONFIGS)}; or give a file: "
            "--config runs/<id>/config.json"
        )
    path = Path(name_or_file)
    if path.exists() and not path.is_file():
        raise UserError(f"--config is {name_or_file!r}, no regular file; name a run's config.json")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; `normlab runs` lists runs; each has a config.json")
    return read_config(path)


def is_file_name(name_or_file: str) -> bool:
    """Whether ``--config`` names a file and not a configuration."""
    return name_or_file.endswith(".json") or "/" in name_or_file

"""Find the containers of repeated blocks in a model, by the names and types of modules alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from normlab.errors import UserError


def candidates(model: nn.Module, globs: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield containers with the paths of their possible blocks, outer ones first.

    They are the named ones, or else all modules whose children are numbered siblings: at least two of one
    type, or a list of one. Raises UserError for a name that fits no module.
    """
    modules = dict(model.named_modules())
    if globs:
        for name in globs:
            yield name, _named(modules, name)
        return
    for path, module in modules.items():
        for children in _siblings(module):
            yield path, [f"{path}.{child}" if path else child for child in children]


def _named(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """Return the children of the module of this name, or the modules that it fits as a glob."""
    if name in modules:
        paths = [f"{name}.{child}" for child, _ in modules[name].named_children()]
    else:
        paths = [path for path in modules if fnmatchcase(path, name)]
    if not paths:
        some = ", ".join([path for path in modules if path][:8])
        raise UserError(f"blocks={name!r} fits no module of the model; the paths begin {some}, …")
    return paths


def _siblings(module: nn.Module) -> Iterator[list[str]]:
    """Yield, per common name, the children that differ only in a number and hold modules and a matrix."""
    stems: dict[str, dict[str, type[nn.Module]]] = {}
    for name, child in module.named_children():
        stem = re.sub(r"\d+", "", name)
        holds_modules = next(child.children(), None) is not None
        if stem != name and holds_modules and any(p.ndim > 1 for p in child.parameters()):
            stems.setdefault(stem, {})[name] = type(child)
    for children in stems.values():
        types = list(children.values())
        repeated = len(types) > len(set(types))
        if repeated or (isinstance(module, nn.ModuleList) and len(types) == 1):
            yield list(children)


def layer_of(path: str) -> int | None:
    """Return the first number in a path, which is the layer counted from 0, or None."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)

"""Use names for what they can tell: possible blocks among siblings, and the role of a branch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from normlab.diagnosis.reading.block import Block, Step
from normlab.diagnosis.reading.recording import Event
from normlab.errors import UserError

ATTENTION = re.compile(r"att(n|ention)|mha", re.IGNORECASE)
FFN = re.compile(r"mlp|ff|feed_?forward|fc\d|intermediate|linear\d|dense|moe|expert|glu", re.IGNORECASE)


def candidates(model: nn.Module, named: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield containers with the paths of their possible blocks, outer ones first.

    Those that are named, or else all modules with children that are numbered siblings: one type at least
    twice, or a list of one. Raises UserError for a name that fits no module.
    """
    modules = dict(model.named_modules())
    for name in named:
        paths = [p for p in modules if fnmatchcase(p, name)]
        if name in modules:
            paths = [f"{name}.{child}" for child, _ in modules[name].named_children()]
        if not paths:
            some = ", ".join([path for path in modules if path][:8])
            raise UserError(f"blocks={name!r} fits no module of the model; the paths begin {some}, …")
        yield name, paths
    for path, module in () if named else modules.items():
        for children in _siblings(module):
            yield path, [f"{path}.{child}" if path else child for child in children]


def _siblings(module: nn.Module) -> Iterator[list[str]]:
    """Yield, per common name, the children that differ only in a number and hold modules and a matrix."""
    stems: dict[str, dict[str, type[nn.Module]]] = {}
    for name, child in module.named_children():
        stem = re.sub(r"\d+", "", name)
        inside = next(child.children(), None) is not None and any(p.ndim > 1 for p in child.parameters())
        if stem != name and inside:
            stems.setdefault(stem, {})[name] = type(child)
    for children in stems.values():
        kinds = list(children.values())
        if len(kinds) > len(set(kinds)) or (isinstance(module, nn.ModuleList) and len(kinds) == 1):
            yield list(children)


def role_of(block: Block, step: Step, shown: Sequence[Event]) -> str:
    """Name the role of a branch by the names of the modules that put it out, or else of those that ran before
    it was added; attention to a tensor from before its block is cross-attention.
    """
    ran = [event for event in block.between(step) if event.side == "input"]
    for told in [*(block.names(e.path) for e in shown), " ".join(block.names(e.path) for e in ran)]:
        if ATTENTION.search(told):
            return "cross_attention" if block.reads_memory(step, ran) else "self_attention"
        if FFN.search(told):
            return "ffn"
    return "branch"


def layer_of(path: str) -> int | None:
    """The first number in a path, which is the layer, counted from 0; None where there is none."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)

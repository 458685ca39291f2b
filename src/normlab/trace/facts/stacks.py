"""The stacks of blocks that pass a stream on, and what siblings among blocks have in common."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import torch
from torch import nn

from normlab.trace.facts.streams import stream_of
from normlab.trace.trace import Event


class Block(NamedTuple):
    """A numbered member of a stack."""

    index: int
    path: str
    module: nn.Module


Stacks = Mapping[str, Sequence[Block]]
"""Blocks by the path of their container, plus what comes before the number in its children's names."""


def find_stacks(model: nn.Module, events: Sequence[Event]) -> dict[str, list[Block]]:
    """Find the stacks among the modules that were called."""
    called = {event.module: event for event in events if event.call == 0}
    stacks: dict[str, list[Block]] = {}
    for path, module in model.named_modules():
        siblings: dict[str, list[Block]] = defaultdict(list)
        for name, child in module._modules.items():
            numbered = re.fullmatch(r"(.*?)(\d+)", name)
            if numbered and child is not None:
                inner = f"{path}.{name}" if path else name
                siblings[numbered[1]].append(Block(int(numbered[2]), inner, child))
        for prefix, blocks in siblings.items():
            ordered = sorted(blocks, key=lambda b: b.index)
            carriers = {b.path for b in blocks if _carries_stream(called.get(b.path), b.module)}
            if _chained([event for own, event in called.items() if own in carriers]):
                stacks[f"{path}.{prefix}".strip(".") or prefix] = ordered
    return _outermost(stacks)


def _chained(calls: Sequence[Event]) -> bool:
    """Return whether some block reads what the previous one wrote or read; no branch in a list does."""
    pairs = ((stream_of(b.inputs), stream_of(a.outputs), stream_of(a.inputs)) for a, b in pairwise(calls))
    return any(x is not None and any(y is not None and torch.equal(x, y) for y in own) for x, *own in pairs)


def _carries_stream(event: Event | None, block: nn.Module) -> bool:
    if event is None or sum(1 for _ in block.parameters()) < 2:
        return False
    x, y = stream_of(event.inputs), stream_of(event.outputs)
    return x is not None and y is not None and x.shape == y.shape and x.ndim >= 3


def _outermost(stacks: dict[str, list[Block]]) -> dict[str, list[Block]]:
    """Drop stacks that lie inside a block of another, such as experts or the layers of a feed-forward."""
    paths = [b.path for blocks in stacks.values() for b in blocks]
    return {
        name: blocks
        for name, blocks in stacks.items()
        if not any(b.path.startswith(f"{p}.") for b in blocks for p in paths)
    }


def within(path: str, outer: str) -> bool:
    """Return whether a module or parameter is this module or lies in it."""
    return f"{path}.".startswith(f"{outer}.")


def block_of(stacks: Stacks, path: str) -> Block | None:
    """Return the block that holds a module or parameter."""
    return next((b for blocks in stacks.values() for b in blocks if within(path, b.path)), None)


def siblings(stacks: Stacks, paths: Iterable[str]) -> dict[str, list[str]]:
    """Group parameters or modules in blocks by their path within the block.

    If the part of the block that holds them has other parameters, as when self-attention, cross-attention and
    feed-forwards alternate, they are of another kind and form another group.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    first: dict[tuple[str, str, object], str] = {}
    blocks = {f"{b.path}.": (name, _parts(b.module)) for name, some in stacks.items() for b in some}
    for path in paths:
        for start, (name, parts) in blocks.items():
            if path.startswith(start):
                inner = path[len(start) :]
                part = inner.partition(".")[0]
                kind = first.setdefault((name, part, parts.get(part)), start)
                groups[f"{name}.*.{inner} as in {kind}"].append(path)
                break
    return dict(groups)


def _parts(block: nn.Module) -> dict[str, tuple[tuple[str, torch.Size], ...]]:
    """Return the names and shapes of the parameters of each part of a block."""
    parts: dict[str, tuple[tuple[str, torch.Size], ...]] = defaultdict(tuple)
    for name, p in block.named_parameters():
        parts[name.partition(".")[0]] += ((name, p.shape),)
    return parts


def settings(module: nn.Module) -> dict[str, Any]:
    """Return a module's class, plain attributes and names of functions."""
    plain: dict[str, Any] = {"class": type(module).__name__}
    for name, value in vars(module).items():
        if (value is None or isinstance(value, (bool, int, float, str))) and name != "training":
            plain[name] = value
        elif callable(value) and hasattr(value, "__name__"):
            plain[name] = value.__name__
    return plain


def declares_itself(stacks: Stacks, odd: str, modules: Iterable[str]) -> bool:
    """Return whether the odd module's block has a plain attribute that differs from that of all others."""
    blocks = [block_of(stacks, path) for path in (odd, *(m for m in modules if m != odd))]
    if None in blocks:
        return False
    own, first, *rest = (
        {
            (path, name): value
            for path, module in block.module.named_modules()
            for name, value in settings(module).items()
            if name != "class" and not callable(vars(module)[name])
        }
        for block in blocks
        if block is not None
    )
    alike = {key: value for key, value in first.items() if all(other.get(key) == value for other in rest)}
    return any(key in own and own[key] != value for key, value in alike.items())


def learns(model: nn.Module, path: str) -> bool:
    """Return whether the smallest part around a module that has parameters is trained."""
    own = list(model.get_submodule(path).parameters())
    if not own and path:
        return learns(model, path.rpartition(".")[0])
    return any(p.requires_grad for p in own)


class _Odd(NamedTuple):
    """The only one whose value differs from the others, which all agree."""

    key: str
    value: Any
    rest: Any


def odd_one(values: Mapping[str, Any]) -> _Odd | None:
    """Find the odd one among three or more."""
    counts = Counter(values.values()).most_common()
    if len(values) < 3 or len(counts) != 2 or counts[1][1] != 1:
        return None
    (rest, _), (value, _) = counts
    return _Odd(next(key for key, own in values.items() if own == value), value, rest)


def shared(paths: Iterable[str]) -> list[str]:
    """Return the leading names that all these paths share."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return [names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels)]


def common(paths: list[str]) -> str:
    """Return the longest path that all of these begin with, or the first of them if they share nothing."""
    return ".".join(shared(paths)) or paths[0]

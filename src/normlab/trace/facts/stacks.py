"""The stacks of blocks: numbered siblings of a container that hand a stream of one shape on."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace.trace import Event, Trace


class Block(NamedTuple):
    """A member of a stack, by its number."""

    index: int
    path: str
    module: nn.Module


Stacks = Mapping[str, Sequence[Block]]
"""By the path of the container, with what stands before the number in its children's names."""


def stream_of(tensors: Iterable[Tensor]) -> Tensor | None:
    """The first floating tensor `[..., D]` among what a block reads or writes."""
    return next((x for x in tensors if x.is_floating_point() and x.ndim >= 2), None)


def find_stacks(model: nn.Module, events: Sequence[Event]) -> dict[str, list[Block]]:
    """Find them among the modules that were called."""
    called: dict[str, Event] = {}
    for event in events:
        called.setdefault(event.module, event)
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
    """Whether some block reads what the one before wrote, or read; a list of branches reads neither."""
    pairs = ((stream_of(b.inputs), stream_of(a.outputs), stream_of(a.inputs)) for a, b in pairwise(calls))
    return any(x is not None and any(y is not None and torch.equal(x, y) for y in own) for x, *own in pairs)


def _carries_stream(event: Event | None, block: nn.Module) -> bool:
    if event is None or sum(1 for _ in block.parameters()) < 2:
        return False
    x, y = stream_of(event.inputs), stream_of(event.outputs)
    return x is not None and y is not None and x.shape == y.shape and x.ndim >= 3


def _outermost(stacks: dict[str, list[Block]]) -> dict[str, list[Block]]:
    """Without those that lie inside a block of another: experts, the layers of a feed-forward."""
    paths = [b.path for blocks in stacks.values() for b in blocks]
    return {
        name: blocks
        for name, blocks in stacks.items()
        if not any(b.path.startswith(f"{p}.") for b in blocks for p in paths)
    }


def within(path: str, outer: str) -> bool:
    """Whether a module or parameter is this module, or lies in it."""
    return f"{path}.".startswith(f"{outer}.")


def block_of(stacks: Stacks, path: str) -> Block | None:
    """The block that holds a module or parameter."""
    return next((b for blocks in stacks.values() for b in blocks if within(path, b.path)), None)


def siblings(stacks: Stacks, paths: Iterable[str]) -> dict[str, list[str]]:
    """Group parameters or modules in blocks by their path within the block.

    Where the part of the block that holds them has other parameters, as where self-attention, cross-attention
    and feed-forwards take turns, they are of another kind, and of another group.
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
    """The names and shapes of the parameters of each part of a block."""
    parts: dict[str, tuple[tuple[str, torch.Size], ...]] = defaultdict(tuple)
    for name, p in block.named_parameters():
        parts[name.partition(".")[0]] += ((name, p.shape),)
    return parts


def settings(module: nn.Module) -> dict[str, Any]:
    """The class, the plain attributes and the names of the functions of a module."""
    plain: dict[str, Any] = {"class": type(module).__name__}
    for name, value in vars(module).items():
        if (value is None or isinstance(value, (bool, int, float, str))) and name != "training":
            plain[name] = value
        elif callable(value) and hasattr(value, "__name__"):
            plain[name] = value.__name__
    return plain


def declares_itself(stacks: Stacks, odd: str, modules: Iterable[str]) -> bool:
    """Whether a plain attribute within one of these modules' blocks differs from what it is in all others."""
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
    """Whether the smallest part around a module that has parameters is trained."""
    own = list(model.get_submodule(path).parameters())
    if not own and path:
        return learns(model, path.rpartition(".")[0])
    return any(p.requires_grad for p in own)


class Odd(NamedTuple):
    """The only one whose value differs from that of all others, which agree."""

    key: str
    value: Any
    rest: Any


def odd_one(values: Mapping[str, Any]) -> Odd | None:
    """Find it among three and more."""
    counts = Counter(values.values()).most_common()
    if len(values) < 3 or len(counts) != 2 or counts[1][1] != 1:
        return None
    (rest, _), (value, _) = counts
    return Odd(next(key for key, own in values.items() if own == value), value, rest)


def rows_equal(x: Tensor) -> bool:
    """Whether all rows `[B, ...]` are the same."""
    return len(x) < 2 or bool(torch.equal(x, x[:1].expand_as(x)))


def shared(paths: Iterable[str]) -> list[str]:
    """The leading names that all of these paths have in common."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return [names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels)]


def common(paths: list[str]) -> str:
    """The longest path that all of these begin with, the first of them where they share nothing."""
    return ".".join(shared(paths)) or paths[0]


SCALES: Final = (1e6, 1e7)
"""Sizes at which a normed branch is lost beside the stream that it is added to."""


class Scaled(NamedTuple):
    """What streams of two sizes show."""

    factors: Mapping[str, float]
    """By block, of those that pass their input on by one factor."""
    mixing: frozenset[str]
    """Those that ran, and do not."""
    runs: tuple[Trace, ...]
    """One for each size, in which every block reads its stream that much larger."""


def scaled_streams(trace: Trace, streams: Mapping[str, Tensor]) -> Scaled:
    """Make the input of each of these blocks a million and ten million times as large.

    The difference of the outputs is the factor: 1 where a branch is added, 0 where a norm follows.
    """

    def enter(x: Tensor, c: float) -> Callable[[Tensor], Tensor]:
        return lambda own: c * (x if x.shape == own.shape else own)

    runs = tuple(trace.again(changed={p: enter(x, c) for p, x in streams.items()}) for c in SCALES)
    low, high = (_written(run) for run in runs)
    factors: dict[str, float] = {}
    for path, x in streams.items():
        if path not in low or path not in high or low[path].shape != x.shape:
            continue
        change = (high[path] - low[path]).double() / (SCALES[1] - SCALES[0])
        size = float(x.double().square().sum())
        factor = float((change * x).sum()) / size if size else 0.0
        if float((change - factor * x).square().sum()) <= 1e-12 * size:
            factors[path] = 0.0 if abs(factor) < 1e-6 else round(factor, 6)
    return Scaled(factors, frozenset(streams.keys() & low.keys() - factors.keys()), runs)


def _written(trace: Trace) -> dict[str, Tensor]:
    """The stream that the first call of each module writes."""
    calls = reversed(trace.once(events=True).events)
    return {e.module: y for e in calls if (y := stream_of(e.outputs)) is not None}


def grown(low: Tensor, high: Tensor) -> bool:
    """Whether a value of the two runs grows in proportion to the stream."""
    a, b = float(low.double().norm()), float(high.double().norm())
    return a > 0 and abs(b / a - SCALES[1] / SCALES[0]) < 1e-3

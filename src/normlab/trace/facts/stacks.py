"""The stacks of blocks that pass a stream on, what siblings have in common, and which modules norm."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.private_torch import BatchOrInstanceNorm, children_of
from normlab.trace.compare import distance
from normlab.trace.trace import Event, Trace

SCALES: Final = (1e6, 1e7)
"""Sizes of the stream beside which a normed branch that is added to it vanishes."""
OVER_TOKENS: Final = (BatchOrInstanceNorm, nn.GroupNorm, nn.LocalResponseNorm)
"""Norms of torch that may take several tokens together."""


class Block(NamedTuple):
    """A numbered member of a stack."""

    index: int
    path: str
    module: nn.Module


Stacks = Mapping[str, Sequence[Block]]
"""Blocks by the path of their container, plus what comes before the number in its children's names."""


class ListedLayer(NamedTuple):
    """A numbered layer that is a list: its parts are called, and it never is."""

    path: str
    read: Tensor
    """What its first part read."""
    written: tuple[Tensor, ...]
    """What its parts wrote."""
    left: Tensor
    """What the next call outside of it read; if none follows, what a module around it wrote."""


def stream_of(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the first floating tensor `[..., D]` that a block reads or writes."""
    return next((x for x in tensors if x.is_floating_point() and x.ndim >= 2), None)


def find_stacks(
    model: nn.Module,
    events: Sequence[Event],
    passes_on: Callable[[Tensor, Tensor], bool],
    is_used: Callable[[Tensor], bool],
    listed: Collection[str] = (),
) -> dict[str, list[Block]]:
    """Find the stacks among the modules that were called.

    Args:
        model: The model.
        events: Its calls in one pass.
        passes_on: ``passes_on(x, y)`` says whether a graph shows that ``y`` holds ``x``, with nothing but
            factors, sums and norms in between.
        is_used: ``is_used(y)`` says whether a graph shows that the loss is made of ``y``.
        listed: The paths of layers that are lists. Numbered modules inside of one are blocks only if all of
            them pass on what they read; otherwise they are parts of such a layer.
    """
    called = {event.module: event for event in events if event.call == 0}
    stacks: dict[str, list[Block]] = {}
    for name, blocks in _numbered(model):
        carriers = {b.path for b in blocks if _carries_stream(called.get(b.path), b.module)}
        calls = [event for event in events if event.module in carriers]
        are_parts = any(within(path, layer) for path in carriers for layer in listed)
        if are_parts and not all(_passes_on(event, passes_on) for event in calls):
            continue
        if _chained(calls, passes_on, is_used):
            stacks[name] = blocks
    return _outermost(stacks)


def _passes_on(event: Event, passes_on: Callable[[Tensor, Tensor], bool]) -> bool:
    read, written = stream_of(event.inputs), stream_of(event.outputs)
    return read is not None and written is not None and passes_on(read, written)


def find_listed_layers(model: nn.Module, events: Sequence[Event]) -> dict[str, list[ListedLayer]]:
    """Find the layers that are lists, of those that leave a tensor of the shape that they read."""
    called = {event.module for event in events}
    listed: dict[str, list[ListedLayer]] = {}
    for name, blocks in _numbered(model):
        if not any(b.path in called for b in blocks):
            layers = [_listed_layer(b, called, events) for b in blocks]
            listed[name] = [layer for layer in layers if layer is not None]
    return {name: layers for name, layers in listed.items() if len(layers) > 1}


def _numbered(model: nn.Module) -> Iterator[tuple[str, list[Block]]]:
    """Yield the numbered children of each module in their order, with the name of the stack they may be."""
    for path, module in model.named_modules():
        siblings: dict[str, list[Block]] = defaultdict(list)
        for name, child in children_of(module).items():
            numbered = re.fullmatch(r"(.*?)(\d+)", name)
            if numbered and child is not None:
                inner = f"{path}.{name}" if path else name
                siblings[numbered[1]].append(Block(int(numbered[2]), inner, child))
        for prefix, blocks in siblings.items():
            yield f"{path}.{prefix}".strip(".") or prefix, sorted(blocks, key=lambda b: b.index)


def _listed_layer(block: Block, called: Container[str], events: Sequence[Event]) -> ListedLayer | None:
    """Return what a list read and left; None if none of it is called, or it leaves another shape."""
    parts = set(_called_parts(block.path, block.module, called))
    places = [i for i, event in enumerate(events) if event.module in parts]
    if not places:
        return None
    read = stream_of(events[places[0]].inputs)
    left = _left_behind(block.path, events[places[-1] + 1 :])
    if read is None or left is None or read.ndim < 3 or read.shape != left.shape:
        return None
    written = tuple(x for i in places for x in events[i].outputs)
    return ListedLayer(block.path, read, written, left)


def _called_parts(path: str, module: nn.Module, called: Container[str]) -> Iterator[str]:
    """Yield the outermost modules in a list that are called."""
    for name, child in module.named_children():
        inner = f"{path}.{name}"
        if inner in called:
            yield inner
        else:
            yield from _called_parts(inner, child, called)


def _left_behind(path: str, later: Sequence[Event]) -> Tensor | None:
    """Return what the next module outside of a layer reads, or what one around the layer writes.

    Calls are in the order of their ends, so what a module calls comes before the module itself.
    """
    outside = [event for event in later if not within(event.module, path)]
    if not outside:
        return None
    around_next = [event for event in outside if within(outside[0].module, event.module)]
    beside = [event for event in around_next if not _encloses(event.module, path)]
    if not beside:
        return stream_of(outside[0].outputs)
    return stream_of(min(beside, key=lambda event: len(event.module)).inputs)


def _encloses(outer: str, path: str) -> bool:
    return not outer or within(path, outer)


def _chained(
    calls: Sequence[Event], passes_on: Callable[[Tensor, Tensor], bool], is_used: Callable[[Tensor], bool]
) -> bool:
    """Return whether some call of a block reads what the one before it wrote, or a sum that holds what the
    one before it passed on. No branch in a list does: what is added to the stream does not hold it.

    Where the output of the one before is lost, it is enough to read the same. Of branches side by side, which
    also read the same, every output is used.
    """
    for before, after in pairwise(calls):
        read, written, next_read = (
            stream_of(tensors) for tensors in (before.inputs, before.outputs, after.inputs)
        )
        if read is None or written is None or next_read is None:
            continue
        if torch.equal(next_read, written) or (torch.equal(next_read, read) and not is_used(written)):
            return True
        if passes_on(read, written) and passes_on(written, next_read):
            return True
    return False


def _carries_stream(event: Event | None, block: nn.Module) -> bool:
    """Return whether a call of a module shows that it may be a block: it writes a tensor of the shape that it
    reads, and is more than one map.
    """
    names = {name for name, _ in block.named_parameters()}
    # one map, as of a feed-forward, holds a weight and a bias
    if event is None or len(names) < 2 or names == {"weight", "bias"}:
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
    values: dict[str, Any] = {"class": type(module).__name__}
    for name, value in vars(module).items():
        if (value is None or isinstance(value, (bool, int, float, str))) and name != "training":
            values[name] = value
        elif callable(value) and hasattr(value, "__name__"):
            values[name] = value.__name__
    return values


def declares_itself(stacks: Stacks, odd: str, modules: Iterable[str]) -> bool:
    """Return whether the odd module's block has a plain attribute that differs from that of all others."""
    attributes = list[dict[tuple[str, str], Any]]()
    for path in (odd, *(module for module in modules if module != odd)):
        block = block_of(stacks, path)
        if block is None:
            return False
        attributes.append(_plain_attributes(block.module))
    of_odd, first, *others = attributes
    alike = {key: value for key, value in first.items() if all(o.get(key) == value for o in others)}
    return any(key in of_odd and of_odd[key] != value for key, value in alike.items())


def _plain_attributes(block: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the numbers, truths, texts and Nones among the attributes of a block's modules, by path and
    name.
    """
    attributes: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules():
        for name, value in settings(module).items():
            if name != "class" and not callable(vars(module)[name]):
                attributes[path, name] = value
    return attributes


def learns(model: nn.Module, path: str) -> bool:
    """Return whether the smallest part around a module that has parameters is trained."""
    return any(p.requires_grad for _, p in parameters_around(model, path))


def parameters_around(model: nn.Module, path: str) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters, by name, of the smallest part around a module that has any."""
    parameters = list(model.get_submodule(path).named_parameters())
    if not parameters and path:
        return parameters_around(model, path.rpartition(".")[0])
    return parameters


def is_of_its_own_kind(model: nn.Module, odd: str, modules: Iterable[str]) -> bool:
    """Return whether the odd module holds parameters of other names or shapes than each of the others."""

    def kind(path: str) -> list[tuple[str, torch.Size]]:
        return [(name, p.shape) for name, p in parameters_around(model, path)]

    return all(kind(path) != kind(odd) for path in modules if path != odd)


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
    (value_of_others, _), (odd_value, _) = counts
    key = next(key for key, value in values.items() if value == odd_value)
    return _Odd(key, odd_value, value_of_others)


def shared(paths: Iterable[str]) -> list[str]:
    """Return the leading names that all these paths share."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return [names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels)]


def common(paths: list[str]) -> str:
    """Return the longest path that all of these begin with, or the first of them if they share nothing."""
    return ".".join(shared(paths)) or paths[0]


class Scaled(NamedTuple):
    """What streams of two sizes show."""

    factors: Mapping[str, float]
    """By block, for those that pass their input on times one factor."""
    mixing: frozenset[str]
    """Blocks that ran and do not."""
    runs: tuple[Trace, ...]
    """One run for each size, in which every block reads a stream that many times larger."""


def scaled_streams(trace: Trace, streams: Mapping[str, Tensor]) -> Scaled:
    """Make the input of each of these blocks a million and ten million times as large.

    The difference of the outputs gives the factor: 1 if a branch is added, 0 if a norm follows.
    """

    def enter(x: Tensor, scale: float) -> Callable[[Tensor], Tensor]:
        return lambda read: scale * (x if x.shape == read.shape else read)

    runs = tuple(
        trace.again(changed={path: enter(x, scale) for path, x in streams.items()}) for scale in SCALES
    )
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
    """Return the stream that the first call of each module writes."""
    calls = reversed(trace.once(events=True).events)
    return {e.module: y for e in calls if (y := stream_of(e.outputs)) is not None}


def grown(low: Tensor, high: Tensor) -> bool:
    """Return whether a value of the two runs grows in proportion to the stream."""
    a, b = float(low.double().norm()), float(high.double().norm())
    return a > 0 and abs(b / a - SCALES[1] / SCALES[0]) < 1e-3


class Response(NamedTuple):
    """How the output of a module that may be a norm responds to its input."""

    module: str
    width: int
    has_vector: bool
    """Whether it holds a parameter for each feature."""
    mixes: bool
    """Whether one feature of its output depends on the others."""
    grows: float
    """By what share of its size it changes when its input becomes ten times as large; 0 up to rounding."""
    leaks: bool
    """Whether a token of its output depends on others."""


def responses(trace: Trace) -> list[Response]:
    """Call again each module that keeps the shape of one tensor and holds only numbers and vectors."""
    events = [e for e in trace.events if e.call == 0 and _may_norm(trace.model, e)]
    with trace.running():
        tried = [_response(trace, event) for event in events]
    return [response for response in tried if response is not None]


def gains(trace: Trace, norms: Iterable[Response]) -> dict[str, Tensor]:
    """Return each norm's factor on each feature, read off a token of as many ones as minus ones."""
    read: dict[str, Tensor] = {}
    with trace.running():
        for norm in norms:
            module, width = trace.model.get_submodule(norm.module), norm.width
            signs = 1.0 - 2 * (torch.randperm(width, generator=torch.Generator().manual_seed(7)) % 2)
            x = signs.to(next(module.parameters(), signs))[None, None]
            plus, minus = _called(module, x), _called(module, -x)
            if width % 2 == 0 and width >= 16 and plus is not None and minus is not None:
                read[norm.module] = ((plus - minus) / 2 * x).flatten().double()
    return read


def sets_norm_or_dropout(trace: Trace, inner: str, values: Mapping[str, Any]) -> bool:
    """Return whether a setting, by block, is a norm's or the rate of a dropout that the same module calls."""
    value_of = {f"{block}.{inner}".rstrip("."): value for block, value in values.items()}
    rates = set[tuple[str, Any]]()
    for call in trace.again(training=True).functions("dropout", "scaled_dot_product_attention"):
        rate = call.argument(1, "p") if call.name == "dropout" else call.argument(4, "dropout_p")
        rates.add((call.module, rate))
    for path, value in value_of.items():
        if value and isinstance(value, float) and (path, value) in rates:
            return True
    return any(norm.module in value_of and norm.mixes and not norm.grows for norm in responses(trace))


def scatters(gain: Tensor) -> bool:
    """Return whether the signs of a gain look like a fair coin's, within three deviations, or it is zero."""
    count = gain.numel()
    return abs(int((gain < 0).sum()) - count / 2) <= 1.5 * count**0.5 or not bool(gain.any())


def _called(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return what a module makes of a tensor; None if it raises, or makes another shape."""
    with suppress(Exception):
        y = module(x.clone())
        return y if isinstance(y, Tensor) and y.shape == x.shape else None
    return None


def _may_norm(model: nn.Module, event: Event) -> bool:
    """Return whether a call keeps the shape of one tensor, and its module holds only numbers and vectors."""
    if len(event.inputs) != 1 or len(event.outputs) != 1 or not event.module:
        return False
    x, module = event.inputs[0], model.get_submodule(event.module)
    return (
        x.is_floating_point()
        and x.ndim > 1
        and x.shape[-1] > 2
        and x.shape == event.outputs[0].shape
        and not any(isinstance(m, OVER_TOKENS) for m in module.modules())
        and all(p.numel() in (1, x.shape[-1]) for p in module.parameters())
    )


def _response(trace: Trace, event: Event) -> Response | None:
    module, (like,) = trace.model.get_submodule(event.module), event.inputs
    shape, width = [min(n, 3) for n in like.shape[:-1]], like.shape[-1]
    h = torch.randn(*shape, width, generator=torch.Generator().manual_seed(5)).to(like)
    other_feature, other_tokens = h.clone(), h.clone()
    other_feature[..., 0] = -2 * h[..., 0] + 1
    other_tokens.view(len(h), -1, width)[:, 1:] = h.view(len(h), -1, width)[:, 1:].roll(1, -1) * 1.7 + 0.3
    inputs = (h, other_feature, other_tokens, 1e3 * h, 1e4 * h)
    outputs = [y for x in inputs if (y := _called(module, x)) is not None]
    if len(outputs) < len(inputs):
        return None
    y, y_of_other_feature, y_of_other_tokens, y_of_thousand, y_of_ten_thousand = outputs
    least = 1e-6 if trace.exact else 16 * torch.finfo(h.dtype).eps
    mixes = distance(y[..., 1:], y_of_other_feature[..., 1:]) > least
    first, first_beside_others = (out.reshape(len(h), -1, width)[:, 0] for out in (y, y_of_other_tokens))
    leaks = distance(first, first_beside_others) > least
    grows = distance(y_of_thousand, y_of_ten_thousand)
    has_vector = any(p.numel() == width for p in module.parameters())
    return Response(event.module, width, has_vector, mixes, grows if grows > least else 0.0, leaks)

"""The order of tokens is seen: by the model, and by each layer that claims positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.checks.property import Answers, Untestable, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.documents import restarts
from normlab.trace.facts.stacks import block_of
from normlab.trace.tensors import map_tensors, replaced
from normlab.trace.trace import Trace

ROUNDINGS = 8
"""Roundings of the model's own type, in which tables of angles may be kept, that a score may hold."""
ADVICE = "add position embeddings, or rotate queries and keys alike"


class Scores(NamedTuple):
    """What one self-attention computes on one repeated token."""

    module: str
    scores: Tensor
    """`[B, H, T, T]`, before the softmax."""
    values: Tensor | None


@property_of("tokens", explains=["state_dict"], passes=4)
def order(step: Step) -> Answers:
    """The order of the tokens is seen, in each layer that claims positions.

    In a model that looks both ways two tokens change places: more than two outputs must change. A model that
    looks back reads one token all over: the scores of a query are then a function of the distance alone, up
    to a factor and a constant of the query, and not the same at all distances; unless what enters attention
    already depends on the position. Values do not depend on it.
    """
    try:
        tokens = step.facts.tokens
    except Unknown:
        yield from _patches(step)
        return
    if tokens.ids.shape[1] < 6:
        raise Untestable("rows hold fewer than six tokens")
    try:
        causal = step.facts.causal
    except Unknown:
        causal = False
    yield from (_repeated(step) if causal else _exchanged(step))


def _exchanged(step: Step) -> Answers:
    facts, ids = step.facts, step.facts.tokens.ids
    base = step.logits(step.exact)
    row = next((i for i, r in enumerate(ids) if r[1] != r[len(r) // 2]), None)
    if row is None:
        raise Untestable("tokens repeat")
    one, other = 1, ids.shape[1] // 2
    swapped = ids.clone()
    swapped[row, [one, other]] = ids[row, [other, one]]
    moved = step.logits(step.exact.again(batch=facts.with_tokens(swapped)))
    expected = base.clone()
    if base.ndim >= 3 and base.shape[:2] == ids.shape:
        expected[row, [one, other]] = base[row, [other, one]]
    if distance(expected, moved) <= step.rounding:
        yield fail("", "two tokens that change places change no output but by changing places", ADVICE)


def _repeated(step: Step) -> Answers:
    trace, least = step.exact.again(batch=_one_token(step)), _least(step)
    maps = list(_scores(step, trace))
    if not maps:
        raise Untestable("no scores of self-attention are seen, so layers cannot be told apart")
    first, flat = maps[0], [one.module for one in maps if _slope(one.scores) < least]
    if _depends_on_position(step, trace, first.module):
        return
    if first.values is not None and _variation(first.values, 2) > least:
        say = "the values of one repeated token differ by position"
        yield fail(first.module, say, "rotate queries and keys only")
    if len(flat) == len(maps):
        say = (
            "the scores of one repeated token are the same at every distance in all layers, and nothing else "
        )
        yield fail(first.module, say + "tells positions apart", ADVICE)
    if _slope(first.scores) >= least and (size := _beyond_distance(first.scores)) > least:
        say = (
            f"the scores of one repeated token depend on more than the distance, by {size:.1e} of their size"
        )
        yield fail(first.module, say, "rotate queries and keys alike, along the axis of positions")
    if flat:
        yield from _without_positions(step, flat, [one.module for one in maps])


def _without_positions(step: Step, flat: list[str], every: list[str]) -> Answers:
    evidence = f"{len(flat)} of {len(every)} layers see no positions"
    meant = len(flat) > 1 or len(every) < 3 or _declares(step, flat[0], [m for m in every if m not in flat])
    yield note(flat[0], evidence) if meant else fail(flat[0], evidence, "this layer has lost its positions")


def _declares(step: Step, odd: str, others: list[str]) -> bool:
    """Whether an attribute of the layer's modules says that it differs, as ``use_rope=False`` does."""
    blocks = [block_of(step.facts.stacks, path) for path in (odd, *others)]
    if any(b is None for b in blocks):
        return False
    own, first, *rest = (_settings(b.module) for b in blocks if b is not None)
    alike = {key: value for key, value in first.items() if all(other.get(key) == value for other in rest)}
    return any(key in own and own[key] != value for key, value in alike.items())


def _settings(block: nn.Module) -> Mapping[tuple[str, str], Any]:
    plain = (bool, int, str, type(None))
    return {
        (path, name): value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, plain) and not name.startswith("_")
    }


def _one_token(step: Step) -> Any:
    """The batch with one token all over, no padding, and positions as the model counts them itself."""
    facts, tokens = step.facts, step.facts.tokens
    ids = tokens.ids
    pool = torch.unique(ids[~(ids == (facts.declared.pad_id if facts.declared.pad_id is not None else -1))])
    batch = facts.with_tokens(torch.full_like(ids, int(pool[len(pool) // 2])))
    count = ids.shape

    def plain(place: Any, x: Tensor) -> Tensor:
        if place == tokens.place or x.is_floating_point() or x.shape != count:
            return x
        if set(torch.unique(x.long()).tolist()) <= {0, 1}:
            return torch.ones_like(x)
        return x if restarts(x.long()) is None else torch.arange(x.shape[1]).expand_as(x).to(x)

    return map_tensors(batch, plain)


def _scores(step: Step, trace: Trace) -> Iterator[Scores]:
    width = step.facts.tokens.ids.shape[1]
    for call in trace.functions("scaled_dot_product_attention", "softmax"):
        if call.name == "softmax":
            x = call.argument(0, "input")
            if x.ndim == 4 and x.shape[-1] == x.shape[-2] == width:
                yield Scores(call.module, x.detach(), None)
            continue
        q, k = call.argument(0, "query").detach(), call.argument(1, "key").detach()
        if q.ndim != 4 or q.shape[-2] != k.shape[-2] or q.shape[-2] != width:
            continue
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scale = call.argument(6, "scale")
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        bias = call.argument(3, "attn_mask")
        if isinstance(bias, Tensor) and bias.is_floating_point():
            scores = scores + bias
        yield Scores(call.module, scores, call.argument(2, "value").detach())


def _depends_on_position(step: Step, trace: Trace, module: str) -> bool:
    """Whether the stream that the nearest module around the first scores reads varies over positions."""
    width = step.facts.tokens.ids.shape[1]
    while True:
        for event in trace.events:
            streams = [
                x for x in event.inputs if x.is_floating_point() and x.ndim == 3 and width in x.shape[:2]
            ]
            if event.module == module and streams:
                return _variation(streams[0], 1 if streams[0].shape[1] == width else 0) > _least(step)
        if not module:
            return False
        module = module.rpartition(".")[0]


def _least(step: Step) -> float:
    types = {x.dtype for x in (*step.model.parameters(), *step.model.buffers()) if x.is_floating_point()}
    return ROUNDINGS * max(torch.finfo(dtype).eps for dtype in types)


def _variation(x: Tensor, axis: int) -> float:
    """How far a tensor differs along an axis from its first entry there."""
    return distance(x, x.narrow(axis, 0, 1).expand_as(x))


def _slope(scores: Tensor) -> float:
    """How far the scores of the last query differ by its keys, relative to the largest score."""
    size = torch.ones_like(scores[0, 0]).tril().bool()
    last, scale = scores[..., -1, :], scores[..., size].abs().max().clamp_min(1e-300)
    return float((last - last[..., :1]).abs().max() / scale)


def _beyond_distance(scores: Tensor) -> float:
    """By how much the scores of two neighbouring queries differ beyond a factor and a constant of each."""
    size = scores[..., torch.ones_like(scores[0, 0]).tril().bool()].abs().max().clamp_min(1e-300)
    worst = 0.0
    for i in range(4, scores.shape[-1]):  # by distance: those of a query, and of the query before
        pair = scores[..., i, 1 : i + 1].flip(-1), scores[..., i - 1, :i].flip(-1)
        x, y = (part - part.mean(-1, keepdim=True) for part in pair)
        factor = (x * y).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True).clamp_min(1e-300)
        worst = max(worst, float((x - factor * y).abs().max() / size))
    return worst


def _patches(step: Step) -> Answers:
    """Two patches of an image that change places must change the outputs."""
    for event in step.exact.events:
        module = step.exact.model.get_submodule(event.module) if event.module else None
        if not isinstance(module, nn.Conv2d) or module.kernel_size != module.stride or not step.facts.stacks:
            continue
        images = event.inputs[0]
        place = next((p for p, x in step.facts.entries.items() if x.shape == images.shape), None)
        (high, wide), logits = module.stride, step.logits(step.exact)
        down, across = images.shape[2] // high, images.shape[3] // wide
        if place is None or logits.ndim != 2 or min(down, across) < 2:
            continue
        one, other = (..., slice(high), slice(wide)), (..., slice(high, 2 * high), slice(wide, 2 * wide))
        swapped = step.facts.entries[place].clone()
        swapped[one], swapped[other] = swapped[other].clone(), swapped[one].clone()
        moved = step.logits(step.exact.again(batch=replaced(step.exact.batch, place, swapped)))
        if distance(logits, moved) <= step.rounding:
            say, counts = (
                "two patches that change places change no output",
                {down * across + i for i in range(3)},
            )
            held = any(counts & {*p.shape} for p in step.exact.model.parameters())
            yield fail(event.module, say, ADVICE) if held else note(event.module, say)
        return
    raise Untestable("the batch holds neither tokens nor an image that is cut into patches")

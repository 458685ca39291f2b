"""What passes show of a model's wiring: streams, scores, chains of maps, and the order of tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace import graph
from normlab.trace.compare import distance, laid_out
from normlab.trace.facts import Unknown
from normlab.trace.facts.documents import restarts
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.stacks import Stacks, siblings, stream_of
from normlab.trace.facts.targets import MULTIPLIED
from normlab.trace.functions import OWN, RUNNING, FunctionCall
from normlab.trace.graph import PRODUCTS, REDUCTIONS, Node, before, operation, parameter
from normlab.trace.tensors import Place, map_tensors, replaced
from normlab.trace.trace import Event, Trace

ATTENDED: Final = ("softmax", "scaled_dot_product_attention")


class Scores(NamedTuple):
    """The scores of one attention: the constant on the product of queries and keys, and their width."""

    module: str
    factor: float
    width: int
    free: bool
    """Whether queries are normed or a parameter scales the scores, so that no constant has to."""
    drawn: tuple[float, float]
    """How much smaller the matrix of the queries is drawn than that of the keys, and the sampling error."""

    def is_by(self, factor: float) -> bool:
        """Whether this is the constant, but for the rounding of a low precision."""
        return abs(self.factor - factor) < 1e-3 * abs(factor)

    @property
    def is_by_width(self) -> bool:
        """Whether the width or its root is the constant, or the start of the queries makes up for it."""
        wanted, (ratio, error) = self.width**-0.5, self.drawn
        drawn = error > 0 and abs(self.factor * ratio / wanted - 1) < 5 * error
        return self.free or drawn or self.is_by(wanted) or self.is_by(1 / self.width)

    def is_by_another(self, stream: torch.Size) -> bool:
        """Whether it is 1, or belongs to another size: of the stream, heads, tokens or rows."""
        sizes = {1, stream[-1] // self.width, 1 / self.width, *stream}
        return any(self.is_by(size**power) for size in sizes if size for power in (-0.5, -1.0))


class Wiring(NamedTuple):
    """What is read off one pass in which every block reads a leaf of its own."""

    streams: dict[str, tuple[bool, bool]]
    """By block: whether its output holds its input as it was, and whether at all."""
    attending: set[str]
    """Modules in which something attends."""
    scores: list[Scores]
    over_queries: list[str]
    """Modules whose softmax is over another axis than the one that is summed over."""
    chains: list[tuple[str, str, int]]
    """Two maps in a row with no nonlinearity between them, wider inside than outside, and that width."""


def read_wiring(trace: Trace, blocks: list[str]) -> Wiring:
    """Read the wiring of a model, of which these modules are blocks."""
    leaves: dict[str, Tensor] = {}

    def cut(path: str) -> Callable[[Tensor], Tensor]:
        def enter(x: Tensor) -> Tensor:
            if not x.is_floating_point() or RUNNING:
                return x
            leaves.setdefault(path, x.detach().requires_grad_())
            return leaves[path].clone() if leaves[path].shape == x.shape else x

        return enter

    frozen = [p for p in trace.model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for p in frozen:
            p.requires_grad_(True)
        again = trace.again(changed={path: cut(path) for path in blocks})
        with again.with_graph(events=True, functions=lambda n: n in (*ATTENDED, *MULTIPLIED, OWN)) as passed:
            calls = passed.functions
            read = [(i, s) for i, c in enumerate(calls) if (s := _scores(c)) is not None]
            return Wiring(
                {e.module: s for e in passed.events if (s := _stream(e, leaves)) is not None},
                {c.module for c in calls if c.name in ATTENDED},
                [scores for _, scores in read],
                [s.module for i, s in read if calls[i].name == "softmax" and _over_queries(*calls[i:])],
                list(_chains(calls)),
            )
    finally:
        for p in frozen:
            p.requires_grad_(False)


def alike(stacks: Stacks, scores: Iterable[Scores]) -> Iterator[dict[str, Scores]]:
    """Yield scores by their module, together where they have one place in their blocks."""
    calls: dict[str, list[Scores]] = defaultdict(list)
    for one in scores:
        calls[f"{one.module}."].append(one)
    for modules in siblings(stacks, calls).values():
        for here in zip(*(calls[m] for m in modules), strict=False):
            yield dict(zip(modules, here, strict=True))


def _stream(event: Event, leaves: dict[str, Tensor]) -> tuple[bool, bool] | None:
    x, y = leaves.get(event.module), stream_of(event.outputs)
    if x is None or y is None or x.shape != y.shape or event.call:
        return None
    others = frozenset(x.shape[1:-1]) - {x.shape[-1]} if x.ndim > 3 else frozenset[int]()
    return graph.comes_from(y, x, graph.MAPS, others), graph.comes_from(y, x)


def _scores(call: FunctionCall) -> Scores | None:
    """The scores that an attention was handed, None where they cannot be read or are no attention's."""
    if call.name == "scaled_dot_product_attention":
        q, k, scale = call.argument(0, "query"), call.argument(1, "key"), call.kwargs.get("scale")
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
        return _read(call.module, factor, q.shape[-1], (q.grad_fn, k.grad_fn))
    x = call.argument(0, "input")
    if call.name != "softmax" or not isinstance(x, Tensor) or x.grad_fn is None or x.ndim < 2:
        return None
    products = graph.summands(x.grad_fn)
    if len(products) != 1:
        return None
    factor, product = products[0]
    first = getattr(product, "_saved_batch1", getattr(product, "_saved_self", None))
    return None if first is None else _read(call.module, factor, first.shape[-1], graph.operands(product))


def _read(module: str, factor: float, width: int, pair: tuple[Node | None, Node | None]) -> Scores | None:
    if None in pair or any(parameter(one) is not None for one in pair):
        return None
    constants = [graph.rotated(one) for one in pair]
    behind = [n for one in pair for n in graph.upstream(one, PRODUCTS)]
    free = any(operation(n) in REDUCTIONS or (operation(n) == "Mul" and len(before(n)) > 1) for n in behind)
    if None in constants and not free:
        return None
    return Scores(module, factor * prod(c for c in constants if c is not None), width, free, _drawn(pair))


def _drawn(ends: Iterable[Node]) -> tuple[float, float]:
    q, k = (_matrix(end) for end in ends)
    if q is None or k is None or q is k or min(q.numel(), k.numel()) < 2:
        return 1.0, 0.0
    own, other = (float(w.detach().double().std()) for w in (q, k))
    return (own / other, (0.5 / q.numel() + 0.5 / k.numel()) ** 0.5) if other else (1.0, 0.0)


def _matrix(end: Node) -> Tensor | None:
    """The only parameter that makes queries, or keys."""
    own = {
        id(p): p
        for n in graph.upstream(end, PRODUCTS)
        if operation(n) in PRODUCTS
        for one in before(n)
        if (p := parameter(one)) is not None and p.ndim > 1
    }
    return next(iter(own.values())) if len(own) == 1 else None


def _over_queries(call: FunctionCall, *later: FunctionCall) -> bool:
    """Whether a softmax over scores is over another axis than the next product sums over."""
    weights, dim = call.result, call.argument(1, "dim", call.kwargs.get("axis"))
    for one in later:
        if one.name in ("matmul", "__matmul__", "bmm") and one.module == call.module:
            left, right = one.argument(0, "input"), one.argument(1, "other", one.kwargs.get("mat2"))
            for side, axis in ((left, -1), (right, -2)):
                same = isinstance(side, Tensor) and side.shape == weights.shape
                if same and torch.equal(side.detach(), weights.detach()) and isinstance(dim, int):
                    return dim % weights.ndim != axis % weights.ndim
    return False


def _chains(calls: tuple[FunctionCall, ...]) -> Iterator[tuple[str, str, int]]:
    """Pairs of maps, the second of which reads the first's output, and wider inside than outside."""
    maps: dict[Node, tuple[str, int]] = {}
    for call in calls:
        tensors = [a for a in call.args if isinstance(a, Tensor)]
        x = next((a for a in tensors if not isinstance(a, nn.Parameter)), None)
        if call.name not in MULTIPLIED or x is None or not any(isinstance(a, nn.Parameter) for a in tensors):
            continue
        first = None if x.grad_fn is None else maps.get(graph.scaled(x.grad_fn)[1])
        if first is not None and x.shape[-1] > max(first[1], call.result.shape[-1]):
            yield first[0], call.module, x.shape[-1]
        end = graph.scaled(call.result.grad_fn)[1]
        if operation(end) in PRODUCTS:  # not written over since, as by an activation in place
            maps[end] = call.module, x.shape[-1]


class Exchange(NamedTuple):
    """A batch in which two places of a row, or of images, are exchanged."""

    batch: Any
    expected: Tensor
    """The logits of a model that does not see the order."""
    module: str = ""
    has_positions: bool = True
    """Whether a parameter of the model may hold something for each place."""


def exchanged_tokens(facts: Facts, logits: Tensor) -> Exchange:
    """Exchange two tokens. Raises Unknown where they repeat."""
    ids, expected = facts.tokens.ids, logits.clone()
    one, other = 1, ids.shape[1] // 2
    row = next((i for i, own in enumerate(ids) if own[one] != own[other]), None)
    if row is None:
        raise Unknown("tokens repeat")
    swapped = ids.clone()
    swapped[row, [one, other]] = ids[row, [other, one]]
    if logits.ndim >= 3 and logits.shape[:2] == ids.shape:
        expected[row, [one, other]] = logits[row, [other, one]]
    return Exchange(facts.with_tokens(swapped), expected)


def exchanged_patches(facts: Facts, logits: Tensor) -> Exchange:
    """Exchange two patches of each image. Raises Unknown where none is cut into patches."""
    model, batch = facts.trace.model, facts.trace.batch
    for event in facts.trace.events:
        module = model.get_submodule(event.module)
        if not isinstance(module, nn.Conv2d) or module.kernel_size != module.stride or not facts.stacks:
            continue
        images = event.inputs[0]
        place = next((p for p, x in facts.entries.items() if x.shape == images.shape), None)
        high, wide = module.stride
        down, across = images.shape[2] // high, images.shape[3] // wide
        if place is None or logits.ndim != 2 or min(down, across) < 2:
            continue
        one, other = (..., slice(high), slice(wide)), (..., slice(high, 2 * high), slice(wide, 2 * wide))
        swapped = facts.entries[place].clone()
        swapped[one], swapped[other] = swapped[other].clone(), swapped[one].clone()
        counts = {down * across + more for more in range(3)}
        held = any(counts & {*p.shape} for p in model.parameters())
        return Exchange(replaced(batch, place, swapped), logits, event.module, held)
    raise Unknown("the batch holds neither tokens nor an image that is cut into patches")


def one_token(facts: Facts) -> Any:
    """The batch with one token all over, no padding, and positions as the model counts them itself."""
    tokens, ids = facts.tokens, facts.tokens.ids
    pool = torch.unique(ids[ids != facts.declared.pad_id] if facts.declared.pad_id is not None else ids)

    def plain(place: Place, x: Tensor) -> Tensor:
        if place == tokens.place or x.is_floating_point() or x.shape != ids.shape:
            return x
        if set(torch.unique(x.long()).tolist()) <= {0, 1}:
            return torch.ones_like(x)
        return x if restarts(x.long()) is None else torch.arange(x.shape[1]).expand_as(x).to(x)

    return map_tensors(facts.with_tokens(torch.full_like(ids, int(pool[len(pool) // 2]))), plain)


class Repeated(NamedTuple):
    """What one self-attention computes on one repeated token."""

    module: str
    scores: Tensor
    """`[B, H, T, T]`, before the softmax."""
    values: Tensor | None

    @property
    def seen(self) -> Tensor:
        """Which keys get a weight of a query of a model that looks back; a mask leaves others none."""
        return (self.scores.double().softmax(-1) > 0).tril()

    @property
    def size(self) -> Tensor:
        """The largest score of a key that is seen."""
        return self.scores.masked_fill(~self.seen, 0).abs().max().clamp_min(1e-300)

    @property
    def slope(self) -> float:
        """How far the scores of the last query differ by the keys that it sees, relative to the largest."""
        last, seen = self.scores[..., -1, :], self.seen[..., -1, :]
        far, near = last.masked_fill(~seen, -torch.inf).amax(-1), last.masked_fill(~seen, torch.inf).amin(-1)
        return float((far - near).max() / self.size)

    @property
    def beyond_distance(self) -> float:
        """How far the scores of two neighbouring queries differ beyond a factor and a constant of each."""
        worst, s, seen = 0.0, self.scores, self.seen
        for i in range(4, s.shape[-1]):  # by distance: those of a query, and of the query before
            both = seen[..., i, 1 : i + 1] & seen[..., i - 1, :i]
            pair = (x.masked_fill(~both, torch.nan) for x in (s[..., i, 1 : i + 1], s[..., i - 1, :i]))
            x, y = ((part - part.nanmean(-1, keepdim=True)).nan_to_num(0) for part in pair)
            factor = (x * y).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True).clamp_min(1e-300)
            worst = max(worst, float((x - factor * y).abs().max() / self.size))
        return worst


def repeated(trace: Trace, width: int) -> Iterator[Repeated]:
    """What each self-attention over so many positions computes."""
    for call in trace.functions("scaled_dot_product_attention", "softmax"):
        if call.name == "softmax":
            x = call.argument(0, "input")
            if x.ndim == 4 and x.shape[-1] == x.shape[-2] == width:
                yield Repeated(call.module, x.detach(), None)
            continue
        q, k = call.argument(0, "query").detach(), call.argument(1, "key").detach()
        if q.ndim != 4 or q.shape[-2] != k.shape[-2] or q.shape[-2] != width:
            continue
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scale, bias = call.argument(6, "scale"), call.argument(3, "attn_mask")
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if isinstance(bias, Tensor) and bias.is_floating_point():
            scores = scores + bias
        yield Repeated(call.module, scores, call.argument(2, "value").detach())


def stream_variation(trace: Trace, module: str, size: tuple[int, int]) -> float:
    """How far the stream `[B, T, …]` read nearest around a module varies over T. Raises Unknown."""
    inside = module.split(".")
    for around in [".".join(inside[:depth]) for depth in range(len(inside), -1, -1)]:
        for event in trace.events:
            shown = (laid_out(x, *size) for x in event.inputs if x.is_floating_point())
            here = [x for x in shown if x is not None and x.ndim > 2]
            if event.module == around and here:
                return variation(min(here, key=Tensor.dim), 1)
    raise Unknown("no module around attention reads a stream with an axis for positions")


def variation(x: Tensor, axis: int) -> float:
    """How far a tensor differs along an axis from its first entry there."""
    return distance(x, x.narrow(axis, 0, 1).expand_as(x))

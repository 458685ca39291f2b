"""What one pass with its graph shows of a model's wiring: streams, attention scores, and chains of maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace import graph
from normlab.trace.facts.stacks import stream_of
from normlab.trace.functions import FunctionCall
from normlab.trace.graph import PRODUCTS, REDUCTIONS, Node, before, operation, parameter
from normlab.trace.trace import Event, Trace

ATTENDED: Final = ("softmax", "scaled_dot_product_attention")
MULTIPLIED: Final = ("linear", "addmm", "matmul", "__matmul__", "bmm", "baddbmm", "einsum")


class Scores(NamedTuple):
    """The scores of one attention: the constant on the product of queries and keys, and their width."""

    module: str
    factor: float
    width: int
    free: bool
    """Whether queries are normed or a parameter scales the scores, so that no constant has to."""
    drawn: tuple[float, float]
    """How much smaller the matrix of the queries is drawn than that of the keys, and the sampling error."""


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
    """Two maps in a row with nothing that bends between them, wider inside than outside, and that width."""


def read_wiring(trace: Trace, blocks: list[str]) -> Wiring:
    """Read the wiring of a model, of which these modules are blocks."""
    leaves: dict[str, Tensor] = {}

    def cut(path: str) -> Callable[[Tensor], Tensor]:
        def enter(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            leaves.setdefault(path, x.detach().requires_grad_())
            return leaves[path].clone() if leaves[path].shape == x.shape else x

        return enter

    frozen = [p for p in trace.model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for p in frozen:
            p.requires_grad_(True)
        again = trace.again(changed={path: cut(path) for path in blocks})
        with again.with_graph(events=True, functions=lambda n: n in (*ATTENDED, *MULTIPLIED)) as passed:
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


def _stream(event: Event, leaves: dict[str, Tensor]) -> tuple[bool, bool] | None:
    x, y = leaves.get(event.module), stream_of(event.outputs)
    if x is None or y is None or x.shape != y.shape or event.call:
        return None
    return graph.comes_from(y, x, graph.MAPS), graph.comes_from(y, x)


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

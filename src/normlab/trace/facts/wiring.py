"""What passes show of a model's wiring, read off autograd graphs: streams, scores, chains of maps.

A graph's nodes name their operations, and some keep the tensors that they read. So whether a tensor is
passed on unchanged, or what constant scales it, is seen by following nodes back from it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.private_torch import saved
from normlab.trace.autograd import nodes_behind
from normlab.trace.compare import distance
from normlab.trace.facts.adapters import ADDED, Adapter, adapters_in
from normlab.trace.facts.stacks import ListedLayer, Stacks, siblings, stream_of
from normlab.trace.functions import OWN, RUNNING, FunctionCall
from normlab.trace.tensors import Place, at
from normlab.trace.trace import Event, Trace

Node = Any
"""A node of the autograd graph."""
ATTENDED: Final = ("softmax", "scaled_dot_product_attention")
MULTIPLIED: Final = ("linear", "addmm", "matmul", "__matmul__", "bmm", "baddbmm", "einsum")
"""Functions of torch that multiply matrices."""
PRODUCTS: Final = frozenset("Mm Addmm Bmm Baddbmm Addbmm Mv Addmv Dot Linear MkldnnLinear".split())
"""Operations that contract two tensors over an axis."""
MAPS: Final = PRODUCTS | {"Convolution", "Embedding", "Softmax", "FftR2C", "FftC2C", "ThnnFusedLstmCell"}
"""Operations after which nothing of a stream is left unchanged."""
REDUCTIONS: Final = frozenset(
    "Mean Var Std VarMean Norm LinalgVectorNorm NativeLayerNorm FusedRmsNorm Rsqrt".split()
)
"""Operations that only norms need."""
SHAPES: Final = frozenset(
    "View UnsafeView ReshapeAlias Transpose Permute T Clone Expand Unsqueeze Squeeze ViewAsReal "
    "ViewAsComplex ToCopy Select Slice Split SplitWithSizes Alias AsStrided Unbind Repeat Flip".split()
)
"""Operations that only move entries."""
SUMS: Final = frozenset(("Add", "Sub", "Cat", "MaskedFill", "Where", "Tanh"))
"""Operations between products and a softmax: sums, masks and caps."""
TURNS: Final = frozenset(("Add", "Sub", "Cat", "Stack", "Neg", "Roll"))
"""Operations that make up a rotation of features, besides products with cosines."""
ANGLES: Final = frozenset(("Cos", "Sin"))
"""Operations whose results turn what they are multiplied by, also where a parameter sets the angle."""


class Scores(NamedTuple):
    """The scores of one attention: the constant on the product of queries and keys, and their width."""

    module: str
    factor: float
    width: int
    heads: int
    free: bool
    """Whether queries are normed or a parameter scales the scores, so no constant has to. A parameter that
    turns them does not scale them.
    """
    drawn: tuple[float, float]
    """The deviation of the queries' matrix relative to that of the keys', and its sampling error."""
    turned: bool = False
    """Whether trained angles turn queries or keys: each feature may stand there as a cosine and a sine."""

    def is_by(self, factor: float) -> bool:
        """Return whether this is the constant, up to the rounding of a low precision."""
        return abs(self.factor - factor) < 1e-3 * abs(factor)

    @property
    def is_by_width(self) -> bool:
        """Whether the constant is one over the width or its root, or the start of the queries makes up for
        another one, or it is free.
        """
        wanted, (ratio, error) = self.width**-0.5, self.drawn
        drawn = error > 0 and abs(self.factor * ratio / wanted - 1) < 5 * error
        widths = (self.width, self.width / 2) if self.turned else (self.width,)
        return self.free or drawn or any(self.is_by(w**-0.5) or self.is_by(1 / w) for w in widths)

    def is_by_another(self, stream: torch.Size) -> bool:
        """Return whether it is 1 or belongs to another size: of the stream, of heads, tokens or rows."""
        sizes = {1, self.heads, self.heads * self.width, stream[-1] // self.width, 1 / self.width, *stream}
        return any(self.is_by(size**power) for size in sizes if size for power in (-0.5, -1.0))


class Wiring(NamedTuple):
    """What is read off one pass in which every call of a block reads its own leaf."""

    streams: dict[str, tuple[bool, bool]]
    """By block that runs with a graph: whether the output of every call holds its input unchanged, and
    whether it does so at all.
    """
    attending: set[str]
    """Modules in which something attends."""
    scores: list[Scores]
    over_queries: list[str]
    """Modules whose softmax runs over a different axis than the sum that follows."""
    chains: list[tuple[str, str, int]]
    """Two maps in a row with no nonlinearity between them, wider inside than outside, and that width."""
    adapters: list[Adapter]


def read_wiring(trace: Trace, blocks: list[str]) -> Wiring:
    """Read the wiring of a model whose blocks are these modules."""
    leaves = _Leaves()
    # a block that stands in several places has several paths, but must be cut off once in each call
    paths = {id(trace.model.get_submodule(path)): path for path in reversed(blocks)}
    with ExitStack() as stack:
        for p in trace.model.parameters():
            if not p.requires_grad and p.is_floating_point():
                stack.callback(p.requires_grad_, False)
                p.requires_grad_(True)
        again = trace.again(changed=dict.fromkeys(paths.values(), leaves.cut_off))
        with again.with_graph(events=True, functions=(*ATTENDED, *MULTIPLIED, *ADDED, OWN)) as passed:
            calls = passed.functions
            all_scores, over_queries = list[Scores](), list[str]()
            for i, call in enumerate(calls):
                scores = _scores(call)
                if scores is None:
                    continue
                all_scores.append(scores)
                if call.name == "softmax" and _over_queries(call, calls[i + 1 :]):
                    over_queries.append(scores.module)
            return Wiring(
                streams=_streams((e for e in passed.events if e.module in paths.values()), leaves),
                attending={call.module for call in calls if call.name in ATTENDED},
                scores=all_scores,
                over_queries=over_queries,
                chains=list(_chains(calls)),
                adapters=list(adapters_in(calls, MULTIPLIED, lambda node: _scaled(node)[1], _products_in)),
            )


class _Leaves:
    """Cuts the graph where a block is called: the call reads a leaf with the value of its input."""

    def __init__(self) -> None:
        self._by_input: dict[int, tuple[Tensor, Tensor]] = {}

    def cut_off(self, x: Tensor) -> Tensor:
        """Return what a call of a block reads in place of its input.

        A call without gradients, as a teacher's, has no graph that could show how it is wired.
        """
        if not x.is_floating_point() or RUNNING or not torch.is_grad_enabled():
            return x
        leaf = x.detach().requires_grad_()
        entered = leaf.clone()  # a block may write to what it reads, but not to a leaf
        self._by_input[id(entered)] = leaf, entered
        return entered

    def read_by(self, event: Event) -> Tensor | None:
        """Return the leaf that a call of a module read; None if it was not cut off."""
        leaves = (self._by_input[id(x)][0] for x in event.inputs if id(x) in self._by_input)
        return next(leaves, None)


def passes_on(x: Tensor, y: Tensor) -> bool:
    """Return whether the graph shows that ``y`` holds ``x``, with nothing but factors, sums, norms and moved
    entries in between.
    """
    made_by = x.grad_fn
    return y is x or (made_by is not None and any(node is made_by for node in _upstream(y.grad_fn, MAPS)))


def passed_by(layers: Sequence[ListedLayer]) -> dict[str, bool]:
    """Return for each of the layers that are lists whether it passes its stream on.

    It does not where what it leaves is made of what its parts wrote alone, with nothing but factors, sums,
    norms and moved entries in between, and these wrote nothing that holds what it read, or what that was made
    of. Nothing is returned for layers that do not follow each other: each must leave what its parts made.
    """
    passed: dict[str, bool] = {}
    for layer in layers:
        made = {x.grad_fn for x in layer.written} - {None}
        if layer.read.grad_fn is None or made.isdisjoint(_upstream(layer.left.grad_fn)):
            return {}
        # each layer may norm the stream before its first part reads it
        before = {n for n in _upstream(layer.read.grad_fn) if not hasattr(n, "variable")}
        holds_it = not before.isdisjoint(_upstream(layer.left.grad_fn, MAPS))
        passed[layer.path] = holds_it or _is_mapped_outside(layer.left.grad_fn, made)
    return passed


def _is_mapped_outside(left: Node, made: Collection[Node]) -> bool:
    """Return whether a product that no part computes comes before a node, such as a mix of streams."""

    def beyond(n: Node) -> bool:
        return n not in made and not _is_map(n, MAPS)

    return any(_is_map(n, MAPS) and n not in made for n in nodes_behind(left, beyond=beyond))


def features_read(trace: Trace, place: Place) -> Tensor:
    """Return which features of an entry `[…, F]` of the batch parameters multiply as they are: those in a
    slice of it that is the first factor of a product, which sums over them.
    """
    entry = at(trace.batch, place)
    read = torch.zeros(entry.shape[-1], dtype=torch.bool)
    if not entry.is_contiguous():
        return read
    for call in trace.functions(*MULTIPLIED):
        x = call.argument(0, "input")
        if not isinstance(x, Tensor) or not any(isinstance(a, nn.Parameter) for a in call.args):
            continue
        is_slice = x.untyped_storage().data_ptr() == entry.untyped_storage().data_ptr()
        if is_slice and x.stride() == entry.stride():
            start = (x.storage_offset() - entry.storage_offset()) % len(read)
            read[start : start + x.shape[-1]] = True
    return read


def alike(stacks: Stacks, scores: Iterable[Scores]) -> Iterator[dict[str, Scores]]:
    """Yield scores by their module, grouped by their place in the block."""
    by_module: dict[str, list[Scores]] = defaultdict(list)
    for each in scores:
        by_module[f"{each.module}."].append(each)
    for modules in siblings(stacks, by_module).values():
        # a module may attend several times: its calls are compared one by one
        for of_one_call in zip(*(by_module[module] for module in modules), strict=False):
            yield dict(zip(modules, of_one_call, strict=True))


def _streams(events: Iterable[Event], leaves: _Leaves) -> dict[str, tuple[bool, bool]]:
    """Return what ``_stream`` says of each block: a shared one must pass its input on in every call."""
    streams: dict[str, tuple[bool, bool]] = {}
    for event in events:
        if (stream := _stream(event, leaves.read_by(event))) is not None:
            unchanged, at_all = streams.get(event.module, (True, True))
            streams[event.module] = unchanged and stream[0], at_all and stream[1]
    return streams


def _stream(event: Event, x: Tensor | None) -> tuple[bool, bool] | None:
    """Return whether the output of a call holds its input ``x`` unchanged, and whether it does so at all;
    None if it has no output of the same shape.
    """
    y = stream_of(event.outputs)
    if x is None or y is None or x.shape != y.shape:
        return None
    others = frozenset(x.shape[1:-1]) - {x.shape[-1]} if x.ndim > 3 else frozenset[int]()
    return _comes_from(y, x, MAPS, others), _comes_from(y, x)


def _scores(call: FunctionCall) -> Scores | None:
    """Return the scores that an attention was given; None if they cannot be read or are no attention's."""
    if call.name == "scaled_dot_product_attention":
        q, k, scale = call.argument(0, "query"), call.argument(1, "key"), call.kwargs.get("scale")
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
        return _read(call.module, factor, q.shape, (q.grad_fn, k.grad_fn))
    x = call.argument(0, "input")
    if call.name != "softmax" or not isinstance(x, Tensor) or x.grad_fn is None or x.ndim < 2:
        return None
    products = _summands(x.grad_fn)
    if len(products) != 1:
        return None
    factor, product = products[0]
    first = saved(product, "batch1", saved(product, "self"))
    if first is None:
        return None
    return _read(call.module, factor, torch.Size([*x.shape[:-1], first.shape[-1]]), _operands(product))


def _read(
    module: str, factor: float, queries: torch.Size, pair: tuple[Node | None, Node | None]
) -> Scores | None:
    """Return the scores of an attention; None if what scales them cannot be read.

    Args:
        module: Where it runs.
        factor: The constant on the product of queries and keys.
        queries: Their shape, `[B, H, T, D]`, or `[B, T, D]` where there is one head.
        pair: The nodes of queries and keys.
    """
    if None in pair or any(parameter_behind(end) is not None for end in pair):
        return None
    constants = [_rotated(end) for end in pair]
    behind = [node for end in pair for node in _upstream(end, PRODUCTS | ANGLES)]
    is_free = any(_operation(node) in REDUCTIONS or _is_gated(node) for node in behind)
    if None in constants and not is_free:
        return None
    factor *= prod(constant for constant in constants if constant is not None)
    heads = queries[1] if len(queries) > 3 else 1
    return Scores(
        module=module,
        factor=factor,
        width=queries[-1],
        heads=heads,
        free=is_free,
        drawn=_drawn(pair),
        turned=any(map(_is_turned, behind)),
    )


def _is_gated(node: Node) -> bool:
    """Return whether a node multiplies by what parameters make, other than the cosine of an angle."""
    return _operation(node) == "Mul" and len(_before(node)) > 1 and not _is_turned(node)


def _is_turned(node: Node) -> bool:
    """Return whether a node multiplies by the cosine or sine of an angle that a graph shows."""
    return _operation(node) == "Mul" and any(_operation(_scaled(n)[1]) in ANGLES for n in _before(node))


def _drawn(ends: Iterable[Node]) -> tuple[float, float]:
    """Return the deviation of the queries' matrix relative to that of the keys', and its sampling error;
    (1, 0) if there are no two matrices.
    """
    q, k = (_matrix(end) for end in ends)
    if q is None or k is None or q is k or min(q.numel(), k.numel()) < 2:
        return 1.0, 0.0
    of_q, of_k = (float(w.detach().double().std()) for w in (q, k))
    if not of_k:
        return 1.0, 0.0
    # the relative error of the deviation of n draws is 1 / sqrt(2 n)
    return of_q / of_k, (0.5 / q.numel() + 0.5 / k.numel()) ** 0.5


def _matrix(end: Node) -> Tensor | None:
    """Return the matrix that makes queries, or keys, if no other does but corrections of low rank."""
    products = [node for node in _upstream(end, PRODUCTS) if _operation(node) in PRODUCTS]
    matrices = dict[int, Tensor]()
    for product in _of_full_rank(products):
        for node in _before(product):
            p = parameter_behind(node)
            if p is not None and p.ndim > 1:
                matrices[id(p)] = p
    return next(iter(matrices.values())) if len(matrices) == 1 else None


def _of_full_rank(ends: Sequence[Node]) -> list[Node]:
    """Return the ends that are not corrections of low rank, as LoRA's, to the others; all if there is no
    other.
    """
    return [n for n in ends if not _is_correction(n)] or list(ends)


def _is_correction(node: Node) -> bool:
    """Return whether a node is the second of two products with a narrower width between them."""
    widths = _widths(node) if _operation(node) in PRODUCTS else None
    read, _ = _operands(node) if widths is not None else (None, None)
    if widths is None or read is None:
        return False
    _, first = _scaled(read)
    widths_of_first = _widths(first) if _operation(first) in PRODUCTS else None
    return widths_of_first is not None and widths[0] < min(widths_of_first[0], widths[1])


def _widths(product: Node) -> tuple[int, int] | None:
    """Return the width over which a product sums, and that of its result, if its node has kept its matrix."""
    right = saved(product, "mat2")
    return None if right is None else (right.shape[-2], right.shape[-1])


def _over_queries(softmax: FunctionCall, later: Iterable[FunctionCall]) -> bool:
    """Return whether a softmax over scores runs over a different axis than the next product's sum."""
    weights, dim = softmax.result, softmax.argument(1, "dim", softmax.kwargs.get("axis"))
    for call in later:
        if call.name not in ("matmul", "__matmul__", "bmm") or call.module != softmax.module:
            continue
        left, right = call.argument(0, "input"), call.argument(1, "other", call.kwargs.get("mat2"))
        for side, summed_axis in ((left, -1), (right, -2)):
            has_shape = isinstance(side, Tensor) and side.shape == weights.shape
            if has_shape and torch.equal(side.detach(), weights.detach()) and isinstance(dim, int):
                return dim % weights.ndim != summed_axis % weights.ndim
    return False


def _chains(calls: Sequence[FunctionCall]) -> Iterator[tuple[str, str, int]]:
    """Yield pairs of maps, wider inside than outside, of which the second reads the first's output."""
    maps: dict[Node, tuple[str, int]] = {}
    for call in calls:
        tensors = [a for a in call.args if isinstance(a, Tensor)]
        x = next((a for a in tensors if not isinstance(a, nn.Parameter)), None)
        if call.name not in MULTIPLIED or x is None or not any(isinstance(a, nn.Parameter) for a in tensors):
            continue
        first = None if x.grad_fn is None else maps.get(_scaled(x.grad_fn)[1])
        if first is not None and x.shape[-1] > max(first[1], call.result.shape[-1]):
            yield first[0], call.module, x.shape[-1]
        end = _scaled(call.result.grad_fn)[1]
        # not overwritten since, as by an in-place activation
        if _operation(end) in PRODUCTS and not _are_shares(x):
            maps[end] = call.module, x.shape[-1]


def _are_shares(x: Tensor) -> bool:
    """Return whether each row `[..., N]` holds shares that add up to one: these choose among the rows of a
    table, as a one-hot row looks one up, and are no features.
    """
    x = x.detach().double()
    return bool((x >= 0).all()) and distance(x.sum(-1), torch.ones_like(x[..., 0])) < 1e-6


def _operation(node: Node) -> str:
    """Return the name of a node's operation, without the suffix for its derivative."""
    return re.sub(r"Backward\w*$", "", type(node).__name__)


def _before(node: Node) -> list[Node]:
    return [n for n, _ in node.next_functions if n is not None]


def _upstream(node: Node | None, stop: Collection[str] = (), axes: Collection[int] = ()) -> Iterator[Node]:
    """Yield a node and all behind it, but nothing behind these operations unless they sum over such axes."""

    def beyond(n: Node) -> bool:
        right = saved(n, "mat2") if axes else None  # a product sums over its rows
        summed = 0 if right is None else right.shape[-2]
        return not _is_map(n, stop) or summed in axes

    return nodes_behind(node, beyond=beyond)


def _is_map(node: Node, operations: Collection[str]) -> bool:
    """Return whether a node is one of these operations. If there are any, a fused attention counts as one."""
    return _operation(node) in operations or (
        bool(operations) and _operation(node).startswith("ScaledDotProduct")
    )


def _comes_from(y: Tensor, x: Tensor, stop: Collection[str] = (), axes: Collection[int] = ()) -> bool:
    """Return whether ``y`` was computed from the leaf ``x`` on a path that ``_upstream`` follows."""
    return y is x or any(getattr(n, "variable", None) is x for n in _upstream(y.grad_fn, stop, axes))


def parameter_behind(node: Node) -> nn.Parameter | None:
    """Return the parameter that a node passes on, times a constant or with its entries moved."""
    variable = getattr(_scaled(node)[1], "variable", None)
    return variable if isinstance(variable, nn.Parameter) else None


def multiplier(node: Node) -> Tensor | None:
    """Return what a node multiplies or divides by, if that has no graph of its own."""
    if _operation(node) not in ("Mul", "Div") or len(_before(node)) != 1:
        return None
    is_first = node.next_functions[0][0] is not None  # whether the first operand is the one with a graph
    other = saved(node, "other" if is_first else "self")
    is_factor = is_first or _operation(node) == "Mul"  # not what is divided by the one with a graph
    return other if isinstance(other, Tensor) and is_factor else None


def _constant(node: Node) -> float | None:
    """Return the number that a node multiplies by; None if it is another operation or has no such number."""
    other = multiplier(node)
    if other is None or other.numel() != 1:
        return None
    value = float(other)
    if _operation(node) == "Mul":
        return value
    return 1 / value if value else None


def _scaled(node: Node) -> tuple[float, Node]:
    """Follow a node back through constant factors and moved entries; return the product and the end."""
    factor = 1.0
    while True:
        by = _constant(node)
        moved = _operation(node) in SHAPES and len(_before(node)) == 1
        if by is None and not moved:
            return factor, node
        factor *= 1.0 if by is None else by
        node = _before(node)[0]


def _ends(node: Node, through: Callable[[Node], bool]) -> Iterator[tuple[float, Node]]:
    """Follow a node back through these operations too; yield the constant factor of each end, and the end."""
    waiting, seen = [(1.0, node)], set[tuple[float, Node]]()
    while waiting:
        factor, start = waiting.pop()
        by, end = _scaled(start)
        factor *= by
        if (factor, end) in seen:
            continue
        seen.add((factor, end))
        if through(end):
            waiting += [(factor, before) for before in _before(end)]
        else:
            yield factor, end


def _summands(node: Node) -> list[tuple[float, Node]]:
    """Return the products that a node sums, masks or caps, each with its constant factor."""
    factors_of: dict[Node, float] = {}
    for factor, end in _ends(node, lambda n: _operation(n) in SUMS):
        if _operation(end) in PRODUCTS:
            # ``baddbmm`` has a constant of its own
            factors_of.setdefault(end, factor * float(saved(end, "alpha", 1.0)))
    return [(factor, product) for product, factor in factors_of.items()]


def _products_in(node: Node) -> list[Node]:
    return [product for _, product in _summands(node)]


def factors(node: Node) -> tuple[nn.Parameter, ...]:
    """Return the matrices whose products with something a node passes on or sums."""
    parameters = [parameter_behind(before) for product in _products_in(node) for before in _before(product)]
    return tuple(p for p in parameters if p is not None and p.ndim > 1)


def _rotated(node: Node) -> float | None:
    """Return the one constant factor on a node's features, even through a rotation of them, or None."""

    def turns(n: Node) -> bool:
        by = multiplier(n) if _operation(n) == "Mul" else None  # cosines differ from feature to feature
        by_table = by is not None and by.ndim > 0 and by.shape[-1] > 1
        return _operation(n) in TURNS or by_table or _is_turned(n)

    ends = [
        (factor, end)
        for factor, end in _ends(node, turns)
        if parameter_behind(end) is None and _operation(end) not in ANGLES
    ]
    of_full_rank = _of_full_rank([end for _, end in ends])  # a correction may have a factor of its own
    constants = {round(factor, 9) for factor, end in ends if end in of_full_rank}
    return constants.pop() if len(constants) == 1 else None


def _operands(product: Node) -> tuple[Node | None, Node | None]:
    pair = [n for n, _ in product.next_functions][-2:]
    return (pair[0], pair[1]) if len(pair) == 2 else (None, None)

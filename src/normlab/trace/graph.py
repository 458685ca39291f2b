"""Read an autograd graph backwards: what a tensor was computed from, and by which constants it was scaled."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from torch import Tensor, nn

from normlab.trace.step import nodes_behind

Node = Any
"""A node of the autograd graph."""
PRODUCTS: Final = frozenset("Mm Addmm Bmm Baddbmm Addbmm Mv Addmv Dot Linear MkldnnLinear".split())
"""Operations that contract two tensors over an axis."""
MAPS: Final = PRODUCTS | {"Convolution", "Embedding", "Softmax", "FftR2C", "FftC2C", "ThnnFusedLstmCell"}
"""Operations after which nothing of a stream is left as it was."""
REDUCTIONS: Final = frozenset(
    "Mean Var Std VarMean Norm LinalgVectorNorm NativeLayerNorm FusedRmsNorm Rsqrt".split()
)
"""Operations that only a norm needs."""
SHAPES: Final = frozenset(
    "View UnsafeView ReshapeAlias Transpose Permute T Clone Expand Unsqueeze Squeeze ViewAsReal "
    "ViewAsComplex ToCopy Select Slice Split SplitWithSizes Alias AsStrided Unbind Repeat Flip".split()
)
"""Operations that only move entries."""
SUMS: Final = frozenset(("Add", "Sub", "Cat", "MaskedFill", "Where", "Tanh"))
"""Operations that products go through on their way to a softmax: sums, masks and caps."""
TURNS: Final = frozenset(("Add", "Sub", "Cat", "Stack", "Neg", "Roll"))
"""Operations that a rotation of features is made of, beside products with cosines."""


def operation(node: Node) -> str:
    """The name of a node's operation, without the word for its derivative."""
    return re.sub(r"Backward\w*$", "", type(node).__name__)


def attends(node: Node) -> bool:
    """Whether a node is torch's own attention."""
    return operation(node).startswith("ScaledDotProduct")


def before(node: Node) -> list[Node]:
    """The nodes that a node reads."""
    return [n for n, _ in node.next_functions if n is not None]


def upstream(node: Node | None, stop: Collection[str] = (), axes: Collection[int] = ()) -> Iterator[Node]:
    """Yield a node and all that lies behind it, but not behind these operations, save sums over such axes."""

    def beyond(n: Node) -> bool:
        return not (operation(n) in stop or (stop and attends(n))) or (bool(axes) and _summed(n) in axes)

    return nodes_behind(node, beyond=beyond)


def _summed(node: Node) -> int:
    """The length of the axis that a product of two tensors sums over, 0 where that is not known."""
    right = getattr(node, "_saved_mat2", None)
    return 0 if right is None else right.shape[-2]


def comes_from(y: Tensor, x: Tensor, stop: Collection[str] = (), axes: Collection[int] = ()) -> bool:
    """Whether ``y`` was computed from the leaf ``x`` on a way that ``upstream`` goes."""
    return y is x or any(getattr(n, "variable", None) is x for n in upstream(y.grad_fn, stop, axes))


def parameter(node: Node) -> nn.Parameter | None:
    """The parameter that a node hands on, moved at most."""
    variable = getattr(scaled(node)[1], "variable", None)
    return variable if isinstance(variable, nn.Parameter) else None


def _multiplier(node: Node) -> Tensor | None:
    """What a node multiplies or divides by, if that has no graph of its own."""
    if operation(node) not in ("Mul", "Div") or len(before(node)) != 1:
        return None
    first = node.next_functions[0][0] is not None
    other = getattr(node, "_saved_other" if first else "_saved_self", None)
    return other if isinstance(other, Tensor) and (first or operation(node) == "Mul") else None


def constant(node: Node) -> float | None:
    """The number that a node multiplies by; None if it is another operation, or its factor is no number."""
    other = _multiplier(node)
    if other is None or other.numel() != 1:
        return None
    value = float(other)
    return value if operation(node) == "Mul" else 1 / value if value else None


def scaled(node: Node) -> tuple[float, Node]:
    """Follow a node back through constant factors and moved entries: their product, and where they end."""
    factor = 1.0
    while True:
        by = constant(node)
        moved = operation(node) in SHAPES and len(before(node)) == 1
        if by is None and not moved:
            return factor, node
        factor *= 1.0 if by is None else by
        node = before(node)[0]


def _ends(node: Node, through: Callable[[Node], bool]) -> Iterator[tuple[float, Node]]:
    """Follow a node back through these operations, too: the constant factor of each end, and the end."""
    waiting, seen = [(1.0, node)], set[tuple[float, Node]]()
    while waiting:
        factor, one = waiting.pop()
        by, one = scaled(one)
        end = factor * by, one
        if end in seen:
            continue
        seen.add(end)
        if through(one):
            waiting += [(end[0], n) for n in before(one)]
        else:
            yield end


def summands(node: Node) -> list[tuple[float, Node]]:
    """The products that a node sums, masks or caps, each with its constant factor."""
    products: dict[Node, float] = {}
    for factor, one in _ends(node, lambda n: operation(n) in SUMS):
        if operation(one) in PRODUCTS:
            products.setdefault(one, factor * float(getattr(one, "_saved_alpha", 1.0)))
    return [(factor, one) for one, factor in products.items()]


def factors(node: Node) -> tuple[nn.Parameter, ...]:
    """The matrices whose products with something a node hands on, or sums."""
    read = (parameter(n) for _, one in summands(node) for n in before(one))
    return tuple(p for p in read if p is not None and p.ndim > 1)


def rotated(node: Node) -> float | None:
    """The constant factor on a node's features, also through a rotation of them; None where it is not one."""

    def turns(n: Node) -> bool:
        by = _multiplier(n) if operation(n) == "Mul" else None  # cosines differ from feature to feature
        return operation(n) in TURNS or (by is not None and by.ndim > 0 and by.shape[-1] > 1)

    ends = _ends(node, turns)
    factors = {round(factor, 9) for factor, one in ends if parameter(one) is None}
    return factors.pop() if len(factors) == 1 else None


def operands(product: Node) -> tuple[Node | None, Node | None]:
    """What a product multiplies."""
    pair = [n for n, _ in product.next_functions][-2:]
    return (pair[0], pair[1]) if len(pair) == 2 else (None, None)

"""Read an autograd graph backwards: what a tensor was computed from, and by which constants it was scaled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor, nn

Node = Any
"""A node of the autograd graph."""
PRODUCTS: Final = frozenset(
    ("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Dot", "Linear", "MkldnnLinear")
)
"""Operations that contract two tensors over an axis."""
MAPS: Final = PRODUCTS | {"Convolution", "Embedding", "Softmax", "FftR2C", "FftC2C", "ThnnFusedLstmCell"}
"""Operations after which nothing of a stream is left as it was."""
REDUCTIONS: Final = frozenset(
    ("Mean", "Var", "Std", "VarMean", "Norm", "LinalgVectorNorm", "NativeLayerNorm", "FusedRmsNorm", "Rsqrt")
)
"""Operations that only a norm needs."""
SHAPES: Final = frozenset(
    (
        "View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "T", "Clone", "Expand", "Unsqueeze",
        "Squeeze", "ViewAsReal", "ViewAsComplex", "ToCopy", "Select", "Slice", "Split", "SplitWithSizes",
        "Alias", "AsStrided", "Unbind", "Repeat", "Flip",
    )
)  # fmt: skip
"""Operations that only move entries."""


def operation(node: Node) -> str:
    """The name of a node's operation, without the word for its derivative."""
    return re.sub(r"Backward\w*$", "", type(node).__name__)


def attends(node: Node) -> bool:
    """Whether a node is torch's own attention."""
    return operation(node).startswith("ScaledDotProduct")


def before(node: Node) -> list[Node]:
    """The nodes that a node reads."""
    return [n for n, _ in node.next_functions if n is not None]


def upstream(node: Node | None, stop: frozenset[str] = frozenset()) -> Iterator[Node]:
    """Yield a node and all that it was computed from, without what lies behind these operations."""
    waiting, seen = [node], set[Node]()
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        yield one
        if not (operation(one) in stop or (stop and attends(one))):
            waiting += before(one)


def comes_from(y: Tensor, x: Tensor, stop: frozenset[str] = frozenset()) -> bool:
    """Whether ``y`` was computed from the leaf ``x`` on a way that crosses none of these operations."""
    return y is x or any(getattr(n, "variable", None) is x for n in upstream(y.grad_fn, stop))


def parameter(node: Node) -> nn.Parameter | None:
    """The parameter that a node hands on, moved at most."""
    variable = getattr(scaled(node)[1], "variable", None)
    return variable if isinstance(variable, nn.Parameter) else None


def constant(node: Node) -> float | None:
    """The number that a node multiplies by; None if it is another operation, or its factor is no number."""
    name = operation(node)
    if name not in ("Mul", "Div") or len(before(node)) != 1:
        return None
    first = node.next_functions[0][0] is not None
    other = getattr(node, "_saved_other" if first else "_saved_self", None)
    if not isinstance(other, Tensor) or other.numel() != 1 or (name == "Div" and not first):
        return None
    value = float(other)
    return value if name == "Mul" else 1 / value if value else None


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


def summands(node: Node) -> list[tuple[float, Node]]:
    """Follow a node back through sums, masks and caps, too: each product in it with its constant factor."""
    found: dict[Node, float] = {}
    waiting = [(1.0, node)]
    while waiting:
        factor, one = waiting.pop()
        by, one = scaled(one)
        factor *= by
        name = operation(one)
        if name in PRODUCTS:
            found.setdefault(one, factor * float(getattr(one, "_saved_alpha", 1.0)))
        elif name in ("Add", "Sub", "Cat", "MaskedFill", "Where", "Tanh"):
            waiting += [(factor, n) for n in before(one)]
    return [(factor, one) for one, factor in found.items()]


def rotated(node: Node) -> float | None:
    """The constant factor on a node's features, also through a rotation of them; None where it is not one."""
    found, waiting, seen = set[float](), [(1.0, node)], set[tuple[Node, float]]()
    while waiting:
        factor, one = waiting.pop()
        by, one = scaled(one)
        factor *= by
        if (one, factor) in seen:
            continue
        seen.add((one, factor))
        if operation(one) in ("Add", "Sub", "Cat", "Stack", "Neg", "Roll") or _table(one):
            waiting += [(factor, n) for n in before(one)]
        elif parameter(one) is None:
            found.add(round(factor, 9))
    return found.pop() if len(found) == 1 else None


def _table(node: Node) -> bool:
    """Whether a node multiplies by constants that differ from feature to feature, as cosines do."""
    if operation(node) != "Mul" or len(before(node)) != 1:
        return False
    first = node.next_functions[0][0] is not None
    other = getattr(node, "_saved_other" if first else "_saved_self", None)
    return isinstance(other, Tensor) and other.ndim > 0 and other.shape[-1] > 1


def operands(product: Node) -> tuple[Node | None, Node | None]:
    """What a product multiplies."""
    pair = [n for n, _ in product.next_functions][-2:]
    return (pair[0], pair[1]) if len(pair) == 2 else (None, None)

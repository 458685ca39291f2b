"""Adapters: two matrices of low rank whose product corrects that of another matrix with the same input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace.facts.joined import sources_of
from normlab.trace.functions import FunctionCall

ADDED: Final = ("add", "add_", "__add__", "__radd__", "__iadd__")
"""Functions by which the correction is added."""


class Adapter(NamedTuple):
    """Parameters of an adapter, and the matrix that it corrects."""

    down: nn.Parameter
    """The matrix that reads the input, `[r, in]` or `[in, r]`."""
    up: nn.Parameter
    """The one that reads what that gives, `[out, r]` or `[r, out]`."""
    matrix: nn.Parameter


class _Product(NamedTuple):
    """A product of a parameter with something."""

    parameter: nn.Parameter
    read: Tensor
    """What it is multiplied with."""
    width: int
    """The number of features of the result."""


def adapters_in(
    calls: Iterable[FunctionCall],
    products: Iterable[str],
    end_of: Callable[[Any], Any],
    summands_of: Callable[[Any], Iterable[Any]],
) -> Iterator[Adapter]:
    """Yield the adapters in the calls of a pass with its graph.

    Args:
        calls: The calls, in order.
        products: Functions that multiply.
        end_of: Follows a node of the graph back through constant factors and moved entries.
        summands_of: Gives the nodes of the products that a node sums.
    """
    products_by_node: dict[Any, _Product] = {}
    known = set[tuple[int, int]]()
    for call in calls:
        node = getattr(call.result, "grad_fn", None)
        if node is None:
            continue
        if call.name in products:
            product = _product(call)
            if product is not None:
                products_by_node[end_of(node)] = product
        elif call.name in ADDED:
            terms = [products_by_node[term] for term in summands_of(node) if term in products_by_node]
            for up in terms:
                down = None if up.read.grad_fn is None else products_by_node.get(end_of(up.read.grad_fn))
                matrix = None if down is None else _corrected(down, up, terms)
                if down is None or matrix is None or (id(up.parameter), id(matrix)) in known:
                    continue
                known.add((id(up.parameter), id(matrix)))
                yield Adapter(down.parameter, up.parameter, matrix)


def _product(call: FunctionCall) -> _Product | None:
    """Return the product of one parameter with something that a call computes; None if it does not."""
    matrices: list[nn.Parameter] = []
    read = None
    for x in (x for x in call.args if isinstance(x, Tensor)):
        sources = sources_of(x)  # the matrix may be transposed first
        matrices += [p for p in sources if isinstance(p, nn.Parameter) and p.ndim == 2]
        if read is None and not sources:
            read = x
    if len(matrices) != 1 or read is None:
        return None
    return _Product(matrices[0], read, call.result.shape[-1])


def _corrected(down: _Product, up: _Product, terms: Iterable[_Product]) -> nn.Parameter | None:
    """Return the matrix that reads the same input as a pair of low rank and whose product is added to the
    pair's; None if there is none, or if the pair's rank is not low.
    """
    if down.width >= min(down.read.shape[-1], up.width):
        return None
    for term in terms:
        is_other = term.parameter is not up.parameter and term.width == up.width
        if is_other and term.read.shape == down.read.shape and torch.equal(term.read, down.read):
            return term.parameter
    return None

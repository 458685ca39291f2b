"""The terms of a loss, read from its graph: which have no gradient, and what lies behind each.

A loss is a sum of terms, each perhaps with a factor. In the graph these are the nodes up to which the loss is
linear: a node whose derivative is the same everywhere saves no tensor that has a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from normlab.private_torch import all_saved
from normlab.trace.autograd import gradients_in, nodes_behind
from normlab.trace.functions import OWN
from normlab.trace.trace import Pass, Trace

DIVERGENCE: Final = "kl_div"
"""The function of torch by which a loss compares two distributions."""
JOINS: Final = ("Cat", "Stack")
TAKES: Final = ("Select", "Slice", "Split", "Unbind", "Index", "Gather", "MaskedSelect")
"""Beginnings of the names of graph nodes that join tensors, and of those that take a part of one."""


def constant_terms(passed: Pass) -> int:
    """Return how many terms of a loss that is a sum have no gradient: numbers, and tensors cut off.

    The pass has to have recorded ``DIVERGENCE``, which is one term: it holds the entropy of its target, a
    constant of which nobody wants a gradient.
    """
    if passed.loss is None:
        return 0
    divergences = {call.result.grad_fn for call in passed.functions if call.name == DIVERGENCE}
    count = 0
    for node, is_linear, is_taken in _down_to_terms(passed.loss, divergences):
        saves_tensors = next(_tensors_saved_by(node), None) is not None  # as a product with a constant does
        if not is_linear or saves_tensors:
            continue
        terms = [term for term, _ in node.next_functions]
        # where joined tensors are taken apart again, those that are not taken are no terms
        is_sum = len(terms) > 1 and not (is_taken and type(node).__name__.startswith(JOINS))
        if is_sum:
            count += terms.count(None)
    return count


def terms_of(loss: Tensor) -> list[Any]:
    """Return the nodes of the graph in which the terms of a loss end, from which it is computed linearly."""
    return list(dict.fromkeys(node for node, is_linear, _ in _down_to_terms(loss) if not is_linear))


def cuts_between(trace: Trace, held_by: Mapping[str, int]) -> set[tuple[str, str]]:
    """Return the places, by module and file, that cut the gradient between what different optimizers hold.

    At such a place every term of the loss that reads what is cut off trains parameters of one holder, and
    what lies behind it has others: each would get a gradient of a loss that is not its own.

    Args:
        trace: the step.
        held_by: the holder of each parameter by its path.
    """
    paths = {id(p): path for path, p in trace.model.named_parameters()}

    def holders(nodes: Iterable[Any]) -> set[int | None]:
        """Return who holds the parameters that these nodes of the graph read."""
        variables = (getattr(node, "variable", None) for node in nodes)
        return {held_by.get(paths[id(p)]) for p in variables if id(p) in paths}

    with trace.again(undone=lambda *_: True).with_graph() as passed:
        if passed.loss is None:
            return set()
        # all cuts are undone in this pass, so that the graph shows what lies behind them
        cuts_at = {place: {x.grad_fn for x in joined} for place, joined in passed.cuts.items()}
        cuts = set().union(*cuts_at.values())
        # by cut, who holds what the terms train that read it, up to the cuts; None for nobody
        trained_across = dict[Any, set[int | None]]()
        for term in terms_of(passed.loss):
            trained = holders(nodes_behind(term, cuts - {term}))
            for cut in cuts.intersection(nodes_behind(term)):
                trained_across[cut] = trained_across.get(cut, set()) | (trained or {None})

        def is_between(cut: Any) -> bool:
            trained = trained_across.get(cut, {None})
            return None not in trained and trained.isdisjoint(holders(nodes_behind(cut)))

        return {place for place, at_place in cuts_at.items() if all(map(is_between, at_place))}


def _down_to_terms(loss: Tensor, terms: Collection[Any] = ()) -> Iterator[tuple[Any, bool, bool]]:
    """Yield the nodes of the graph of a loss down to those of its terms, of which some may be known.

    Yields:
        Each node, whether it is linear, so that terms may lie behind it, and whether only a part of it is
        taken.
    """
    waiting = [(loss.grad_fn, False)]
    while waiting:
        node, is_taken = waiting.pop()
        if node is None:
            continue
        # nothing says what somebody's own function computes
        is_known = not isinstance(node, torch.autograd.function.BackwardCFunction) and node not in terms
        # a derivative that is not the same everywhere is that of a term
        is_linear = is_known and not any(x.requires_grad for x in _tensors_saved_by(node))
        is_linear = is_linear and bool(node.next_functions)
        yield node, is_linear, is_taken
        if is_linear:
            is_taken = is_taken or type(node).__name__.startswith(TAKES)
            waiting += [(term, is_taken) for term, _ in node.next_functions]


def _tensors_saved_by(node: Any) -> Iterator[Tensor]:
    return (value for value in all_saved(node) if isinstance(value, Tensor))


def lost_results(trace: Trace) -> tuple[list[str], list[str]]:
    """Return what is computed with a graph for the loss, but is no part of it.

    Returns:
        The modules of autograd functions that play no part in the loss, and the modules that keep a number
        with a graph which plays none, such as an auxiliary loss that nobody adds.
    """
    with trace.with_graph(functions=(OWN,)) as passed:
        results = [(call.module, _with_graph(call.result)) for call in passed.functions]
        results = [(path, tensors) for path, tensors in results if tensors]
        attributes = [(path, x) for path, m in trace.model.named_modules() for x in vars(m).values()]
        numbers = [(path, x) for path, value in attributes for x in _with_graph(value) if x.numel() == 1]
        asked = [x for _, tensors in results for x in tensors] + [x for _, x in numbers]
        if passed.loss is None or not asked:
            return [], []
        gradients = gradients_in(passed.loss, asked, trace.model)
    reached = {id(x) for x, g in zip(asked, gradients, strict=True) if g is not None}
    lost = [path for path, tensors in results if reached.isdisjoint(map(id, tensors))]
    return lost, [path for path, x in numbers if id(x) not in reached]


def _with_graph(value: object) -> list[Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.grad_fn is not None]

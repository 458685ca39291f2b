"""Variational and other autoencoders, read off the graph of a pass: models that draw what they predict from,
and that predict from a code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normlab.trace.autograd import nodes_behind
from normlab.trace.facts.targets import LOOKED_UP, RECORDED, FunctionInput
from normlab.trace.facts.tokens import Tokens
from normlab.trace.facts.wiring import multiplier, parameter_behind
from normlab.trace.tensors import Tap
from normlab.trace.trace import Pass, Trace

Places = Sequence[Tap | FunctionInput]
"""The places of the logits whose cross-entropies are part of the loss."""


def scores_its_draws(trace: Trace, places: Places) -> bool:
    """Return whether the loss scores the distributions that the model draws from, as a variational bound
    does: what gives a drawn number its size is part of the loss by a way beside the logits.

    Noise that a router or a dropout adds has a size, too, but the loss does not speak of it.
    """
    trace = trace.again(taps=_taps(places))
    with trace.again(seed=1).with_graph() as other:
        others = [multiplier(node) for node in _nodes(other.loss)]
    with trace.with_graph(functions=RECORDED) as passed:
        nodes = _nodes(passed.loss)
        if passed.loss is None or len(nodes) != len(others):
            return False
        pairs = zip(nodes, others, strict=True)
        draws = [node for node, factor in pairs if _differs(multiplier(node), factor)]
        # what a draw moves may differ from run to run, too, and be held constant: only the first draws count
        first = [draw for draw in draws if set(nodes_behind(draw)).isdisjoint({*draws} - {draw})]
        beside = set(nodes_behind(passed.loss.grad_fn, [*_logits_in(passed, places, trace.model), *draws]))
        return bool(first) and all(not beside.isdisjoint(_sizes_of(draw)) for draw in first)


def predicts_from_a_code(trace: Trace, tokens: Tokens, places: Places) -> bool:
    """Return whether the logits depend on a row's tokens only by way of something that has no axis for their
    positions, and is smaller than what is looked up for them: the code of an autoencoder.
    """
    rows, width = tokens.ids.shape
    with trace.again(taps=_taps(places)).with_graph(events=True, functions=RECORDED) as passed:
        read = [call.result for call in passed.functions if call.name == LOOKED_UP]
        read = [x for x in read if x.shape[:2] == (rows, width) and x.requires_grad]
        if not read:
            return False

        def is_code(x: Tensor) -> bool:
            begins_with_rows = x.requires_grad and x.ndim > 1 and x.shape[0] == rows
            has_positions = any(abs(length - width) <= 1 for length in x.shape[1:])
            return begins_with_rows and not has_positions and x.numel() < min(y.numel() for y in read)

        codes = [x.grad_fn for event in passed.events for x in event.outputs if is_code(x)]
        looked_up = {x.grad_fn for x in read}
        logits = _logits_in(passed, places, trace.model)
        behind = (node for start in logits for node in nodes_behind(start, codes))
        return bool(logits) and bool(codes) and looked_up.isdisjoint(behind)


def _taps(places: Places) -> tuple[Tap, ...]:
    return tuple(place for place in places if isinstance(place, Tap))


def _logits_in(passed: Pass, places: Places, model: nn.Module) -> list[Any]:
    """Return the nodes of the graph that give the logits, or the features that they are products of."""
    tensors: list[Tensor] = []
    for place in places:
        if isinstance(place, Tap):
            tensors += [passed.taps[place]] if place in passed.taps else []
        else:
            tensors += place.read_by(passed, model)
    return [x.grad_fn for x in tensors if x.grad_fn is not None]


def _nodes(loss: Tensor | None) -> list[Any]:
    return [] if loss is None else list(nodes_behind(loss.grad_fn))


def _differs(factor: Tensor | None, other: Tensor | None) -> bool:
    if factor is None or other is None or factor.shape != other.shape:
        return False
    return not torch.equal(factor, other)


def _sizes_of(draw: Any) -> Iterator[Any]:
    """Yield the nodes, nearest to a draw, in which parameters make what a drawn number is multiplied by."""
    (start,) = (node for node, _ in draw.next_functions if node is not None)
    for node in nodes_behind(start, beyond=lambda node: not _reads_parameter(node)):
        if _reads_parameter(node):
            yield node


def _reads_parameter(node: Any) -> bool:
    following = (each for each, _ in node.next_functions if each is not None)
    return any(parameter_behind(each) is not None for each in following)

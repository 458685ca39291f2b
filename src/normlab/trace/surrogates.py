"""Find surrogate gradients, such as one that passes straight through a quantizer.

Where there is one, the gradient is not the derivative of the loss, and is not meant to be: some result has a
gradient in a parameter with which it does not move. With constants in place of such results, the rest can
still be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.setups.setup import Loss
from normlab.trace.autograd import gradients_in
from normlab.trace.finite_differences import FLOOR, STEPS, Along
from normlab.trace.functions import FunctionCall, Numbered, Which
from normlab.trace.tensors import tensors_in
from normlab.trace.trace import Trace


class Surrogate(NamedTuple):
    """A call of a function whose result has a gradient in a parameter, but does not move with it."""

    parameter: str
    call: Which
    value: Tensor
    """What it returned, without a graph."""


class _Result(NamedTuple):
    """What one call returned, as it was then, and the tensors that it was given."""

    result: Tensor
    value: Tensor
    read: list[Tensor]


def beyond_surrogates(
    trace: Trace, meant: Callable[[str], bool], modules: Iterable[str]
) -> tuple[Along, list[Surrogate]]:
    """Compare gradient and derivative with constants in place of all surrogates that keep them apart; return
    the comparison and these surrogates.
    """
    order, surrogates = list(modules), list[Surrogate]()
    along = Along(trace, meant)
    while along.all.disagrees:
        # the parameter at one end may lack a gradient, as a codebook does: no surrogate has a gradient in it
        more = list(_surrogates_of(along, along.last_wrong(order)))
        more = more or list(_surrogates_of(along, along.first_wrong(order)))
        if not more:
            break
        surrogates += more
        constants = {surrogate.call: surrogate.value for surrogate in surrogates}
        along = Along(_with_constants(trace, constants), meant)
    return along, surrogates


def _with_constants(trace: Trace, results: Mapping[Which, Tensor]) -> Trace:
    """Return the same step with these results in place of what these calls return."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad(), Numbered(held=results):
            return trace.loss_of(model, batch)

    return trace.again(loss_of=loss)


def _surrogates_of(along: Along, parameter: str) -> Iterator[Surrogate]:
    r"""Yield the first results in a pass that do not move with a parameter, though a gradient passes through
    them to it.

    With :math:`g` the gradient of the loss in a result :math:`y`, the graph says that y moves the loss by
    :math:`g^T (\partial y / \partial\theta)\, d` if the parameter moves by d. It does not, if y moves by
    less than that over :math:`|g|`.
    """
    trace, move = along.trace, STEPS[0] * along.scale[parameter] * along.gradients[parameter]
    moved_results: dict[Which, _Result] = {}
    moved = trace.again(weights={parameter: along.weights[parameter] + move})
    moved.again(loss_of=_recording(trace.loss_of, moved_results)).once()

    results: dict[Which, _Result] = {}
    with trace.again(loss_of=_recording(trace.loss_of, results)).with_graph() as passed:
        results = {n: r for n, r in results.items() if r.result.requires_grad and n in moved_results}
        if passed.loss is None or not results:
            return
        tensors = [result.result for result in results.values()]
        slopes = gradients_in(passed.loss, tensors, trace.model, retain_graph=True)
        p = trace.model.get_parameter(parameter)
        moving = {id(p)}  # the parameter, and the results that move with it: a surrogate reads one of them
        for (call, result), slope in zip(results.items(), slopes, strict=True):
            change = float((moved_results[call].value - result.value).norm())
            if change > FLOOR * STEPS[0] * float(result.value.norm()):
                moving.add(id(result.result))
            elif slope is not None and any(id(x) in moving for x in result.read):
                (gradient,) = torch.autograd.grad(
                    result.result, p, slope, retain_graph=True, allow_unused=True
                )
                expected = 0.0 if gradient is None else abs(float((gradient * move).sum()))
                if expected and change * float(slope.norm()) <= FLOOR * expected:
                    yield Surrogate(parameter, call, result.value)


def _recording(loss_of: Loss, results: dict[Which, _Result]) -> Loss:
    """Return the same loss, whose calls of functions leave their results here.

    Code may compute in another way where nothing is differentiated, and calls that have the same number are
    then no longer the same. So every pass whose calls are numbered runs as training does, with gradients on.
    """

    def see(which: Which, call: FunctionCall) -> None:
        result = call.result
        if isinstance(result, Tensor) and result.is_floating_point():
            read = [x for _, x in tensors_in((call.args, call.kwargs)) if x.is_floating_point()]
            results[which] = _Result(result, result.detach().clone(), read)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad(), Numbered(see=see):
            return loss_of(model, batch)

    return loss

"""Compute gradients, and copy the optimizer that makes an update of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from normlab.errors import UserError
from normlab.private_torch import gradient_hooks

Weights: TypeAlias = Mapping[str, Tensor]
"""Parameters, or what belongs to each, by path."""
OptimizerFactory: TypeAlias = Callable[[list[Parameter]], Optimizer]
"""Makes a new optimizer of parameters: ``partial(torch.optim.AdamW, lr=5e-4)``."""
FROZEN: Final = (
    "the loss has no gradient in the model: its parameters are frozen, or it runs without gradients; "
    "unfreeze the parameters to examine, as in model.requires_grad_()"
)


class Gradients(NamedTuple):
    """A loss, and its gradients in every trainable parameter by path."""

    loss: float
    gradients: Weights


def trainable(model: nn.Module) -> dict[str, Parameter]:
    """Return the parameters that need gradients, by path, without empty ones.

    Raises UserError for a frozen model.
    """
    parameters = {path: p for path, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not parameters:
        raise UserError(FROZEN)
    return parameters


def gradients_in(
    loss: Tensor, tensors: Sequence[Tensor], model: nn.Module, *, retain_graph: bool = False
) -> list[Tensor | None]:
    """Return the gradients of a loss in these tensors; None for one that it does not reach.

    A re-entrant checkpoint, whose function runs Python code in its backward pass, refuses
    ``torch.autograd.grad`` or hides parameters from it; ``loss.backward()`` then finds them.

    Raises UserError for a loss without a graph.
    """
    if not loss.requires_grad:
        raise UserError(FROZEN)
    ends = [tensors[0].grad_fn] if len(tensors) == 1 and not tensors[0].is_leaf else []
    python = torch.autograd.function.BackwardCFunction
    if any(isinstance(node, python) for node in nodes_behind(loss.grad_fn, ends)):
        return _by_backward(loss, tensors, model, retain_graph=retain_graph)
    return list(torch.autograd.grad(loss, tensors, retain_graph=retain_graph, allow_unused=True))


def nodes_behind(
    start: Any, ends: Iterable[Any] = (), *, beyond: Callable[[Any], bool] = lambda _: True
) -> Iterator[Any]:
    """Yield the graph's nodes from one on, up to those in ``ends``, and past those that ``beyond`` allows."""
    waiting, known = [start], {None, *ends}
    while waiting:
        if (node := waiting.pop()) not in known:
            known.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions if beyond(node))


def _by_backward(
    loss: Tensor, tensors: Sequence[Tensor], model: nn.Module, *, retain_graph: bool
) -> list[Tensor | None]:
    """Do the same by ``loss.backward()``, without what the user's hooks do to gradients that arrive."""
    arrived: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for x in tensors:
            if not x.is_leaf:
                stack.callback(x.register_hook(partial(arrived.__setitem__, id(x))).remove)
        for p in model.parameters():
            stack.callback(setattr, p, "grad", p.grad)
            p.grad = None
            if hooks := gradient_hooks(p):
                stack.callback(hooks.update, OrderedDict(hooks))
                hooks.clear()
        loss.backward(retain_graph=retain_graph)
        return [x.grad if x.is_leaf else arrived.get(id(x)) for x in tensors]


def made(optimizer: Optimizer | OptimizerFactory, model: nn.Module) -> tuple[Optimizer, float]:
    """Return the optimizer, or the one that a function makes from copies of the model's trainable parameters,
    and the largest rate of its groups, where None counts as 0.
    """
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer([Parameter(p.detach()) for p in trainable(model).values()])
    return optimizer, max(float(group.get("lr") or 0.0) for group in optimizer.param_groups)


def copied_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer without its hooks; ``memo``, as that of ``deepcopy``, holds what takes the place of
    its parameters. torch alone would copy only three attributes.
    """
    optimizer_copy = deepcopy(optimizer, memo)
    others = {name: value for name, value in vars(optimizer).items() if name not in vars(optimizer_copy)}
    others.pop("step", None)  # a schedule binds the object's own
    vars(optimizer_copy).update(deepcopy(others, memo))
    return optimizer_copy

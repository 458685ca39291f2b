"""Compute the weights after one update, by a new optimiser or by one in the middle of its training."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from normlab.diagnosis.probing.stepping import LossGradients, Weights, at_weights, gradients_of, trainable
from normlab.diagnosis.reading.subject import Subject, undisturbed
from normlab.errors import UserError

OptimiserFactory: TypeAlias = Callable[[list[Parameter]], Optimizer]
"""Parameters to an optimiser that begins: ``partial(torch.optim.AdamW, lr=5e-4)``."""


@contextmanager
def at_rate(optimiser: Optimizer | OptimiserFactory, factor: float) -> Iterator[Optimizer | OptimiserFactory]:
    """Yield the optimiser, or a function that makes it, with learning rates that are ``factor`` times as
    large; those of an optimiser are as before afterwards. A group whose rate is None stays as it is.
    """
    if isinstance(optimiser, Optimizer):
        known = [(group, lr) for group in optimiser.param_groups if (lr := group.get("lr")) is not None]
        _scale(optimiser, factor)
        try:
            yield optimiser
        finally:
            for group, lr in known:
                group["lr"] = lr
    else:
        make = optimiser
        yield lambda parameters: _scale(make(parameters), factor)


def _scale(optimiser: Optimizer, factor: float) -> Optimizer:
    for group in optimiser.param_groups:
        if group.get("lr") is not None:
            group["lr"] = group["lr"] * factor
    return optimiser


class Twin:
    """Copies of a model's trainable parameters, with an optimiser of their own that steps on them.

    An optimiser in the middle of its training goes on from a copy of its state, without its hooks and without
    what a schedule does after a step; a function makes a new one of the parameters that need a gradient. The
    model's weights and gradients, the optimiser's state and its groups are never written to.

    Raises UserError for a frozen model, and another model's optimiser.
    """

    def __init__(self, model: nn.Module, optimiser: Optimizer | OptimiserFactory) -> None:
        own = trainable(model)
        self._parameters = {path: Parameter(p.detach().clone()) for path, p in own.items()}
        if isinstance(optimiser, Optimizer):
            self._optimiser = _copy(optimiser, {id(p): self._parameters[path] for path, p in own.items()})
        else:
            self._optimiser = optimiser(list(self._parameters.values()))

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters as they are now, by path."""
        return {path: parameter.detach() for path, parameter in self._parameters.items()}

    def step(self, subject: Subject, known: LossGradients | None = None) -> LossGradients:
        """Take one update on the subject's loss, without dropout; return the loss and gradients before it.

        Optimisers that evaluate the loss several times, as LBFGS, do so. ``known`` is what the first
        evaluation gives, where it is known already. Raises UserError for a loss that is not finite.
        """
        first = known or find_loss_gradients(subject, self.weights)
        left = [first]

        def evaluate() -> float:
            loss, gradients = left.pop() if left else find_loss_gradients(subject, self.weights)
            if not math.isfinite(loss):
                raise UserError(f"the loss is {loss}, and no update follows; check weights and batch")
            for path, parameter in self._parameters.items():
                parameter.grad = gradients[path].clone()  # an optimiser may write to it
            return loss

        step: Callable[..., Any] = type(self._optimiser).step  # a schedule may have bound the object's own
        with undisturbed(subject.model):
            if "closure" in inspect.signature(step).parameters:
                step(self._optimiser, evaluate)
            else:
                evaluate()
                step(self._optimiser)
        return first


def updated(
    subject: Subject, optimiser: Optimizer | OptimiserFactory, loss_gradients: LossGradients | None = None
) -> dict[str, Tensor]:
    """Return the trainable parameters after one update on the subject's loss, without dropout, by path.

    See ``Twin`` for the optimiser; ``loss_gradients`` is what the first evaluation of the loss gives, at the
    model's own weights, where it is known already. Raises UserError as ``Twin`` and its steps do.
    """
    twin = Twin(subject.model, optimiser)
    twin.step(subject, loss_gradients)
    return twin.weights


def find_loss_gradients(subject: Subject, weights: Weights | None = None) -> LossGradients:
    """Run a forward and backward pass without dropout, at other weights if some are given."""
    with torch.enable_grad(), at_weights(subject.model, weights or {}), undisturbed(subject.model):
        loss = subject.loss()
        return LossGradients(loss.item(), gradients_of(loss, subject.model))


def _copy(optimiser: Optimizer, twin_of: Mapping[int, Parameter]) -> Optimizer:
    """Copy an optimiser, with twins in the place of its parameters."""
    held = [p for group in optimiser.param_groups for p in group["params"]]
    if not any(id(p) in twin_of for p in held):
        raise UserError(
            "the optimiser holds no parameter of the model; pass the one that trains it, or a function that "
            "makes one, as in partial(torch.optim.AdamW, lr=5e-4)"
        )
    left = {"step"} | {name for name, value in vars(optimiser).items() if isinstance(value, OrderedDict)}
    state = {name: value for name, value in vars(optimiser).items() if name not in left}
    copy = type(optimiser).__new__(type(optimiser))
    copy.__setstate__(deepcopy(state, dict(twin_of)))
    return copy

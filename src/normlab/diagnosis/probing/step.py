"""Compute the weights after one update, by a new optimiser or by one in the middle of its training."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from normlab.diagnosis.probing.stepping import LossGradients, Weights, at_weights, gradients_of, trainable
from normlab.diagnosis.reading.subject import Subject, undisturbed
from normlab.errors import UserError

OptimiserFactory: TypeAlias = Callable[[list[Parameter]], Optimizer]
"""Parameters to an optimiser that begins: ``partial(torch.optim.AdamW, lr=5e-4)``."""


def updated(
    subject: Subject, optimiser: Optimizer | OptimiserFactory, loss_gradients: LossGradients | None = None
) -> dict[str, Tensor]:
    """Return the trainable parameters after one update on the subject's loss, without dropout, by path.

    An optimiser in the middle of its training goes on from a copy of its state, without its hooks and without
    what a schedule does after a step; a function makes a new one of the parameters that need a gradient. The
    model's weights and gradients, the optimiser's state and its groups are never written to. Optimisers that
    evaluate the loss several times, as LBFGS, do so. ``loss_gradients`` is what the first evaluation gives,
    at the model's own weights, where it is known already.

    Raises UserError for a frozen model, a loss that is not finite, and another model's optimiser.
    """
    own = trainable(subject.model)
    twins = {path: Parameter(p.detach().clone()) for path, p in own.items()}
    if isinstance(optimiser, Optimizer):
        copy = _copy(optimiser, {id(p): twins[path] for path, p in own.items()})
    else:
        copy = optimiser(list(twins.values()))
    known = [loss_gradients] if loss_gradients else []

    def evaluate() -> float:
        loss, gradients = known.pop() if known else find_loss_gradients(subject, twins)
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss}, and no update follows; check weights and batch")
        for path, twin in twins.items():
            twin.grad = gradients[path].clone()  # an optimiser may write to it
        return loss

    step: Callable[..., Any] = type(copy).step  # not copy.step: a schedule may have bound it to the original
    with undisturbed(subject.model):
        if "closure" in inspect.signature(step).parameters:
            step(copy, evaluate)
        else:
            evaluate()
            step(copy)
    return {path: twin.detach() for path, twin in twins.items()}


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

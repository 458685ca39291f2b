"""The weights that one update leads to, by an optimiser that begins or one amid its training."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from normlab.diagnosis.stepping import at_weights, gradients_of, trainable
from normlab.diagnosis.subject import Subject, undisturbed

Make: TypeAlias = Callable[[list[Parameter]], Optimizer]
"""Parameters to an optimiser that begins: ``partial(torch.optim.AdamW, lr=5e-4)``."""


def updated(subject: Subject, optimiser: Optimizer | Make) -> dict[str, Tensor]:
    """What the trainable parameters are after one update on the subject's loss, without dropout, by path.

    An optimiser amid its training goes on from a copy of its state, without its hooks and without what a
    schedule does after a step; a function makes a new one of the parameters that need a gradient. The
    model's weights and gradients, the optimiser's state and its groups are never written to. Optimisers that
    evaluate the loss several times, as LBFGS, do so.

    Raises ValueError for a frozen model, a loss that is not finite, and another model's optimiser.
    """
    own = trainable(subject.model)
    twins = {path: Parameter(p.detach().clone()) for path, p in own.items()}
    if isinstance(optimiser, Optimizer):
        twin_of = {id(p): twins[path] for path, p in own.items()}
        copy = _copy(optimiser, twin_of)
    else:
        copy = optimiser(list(twins.values()))

    def evaluate() -> Tensor:
        with torch.enable_grad(), at_weights(subject.model, twins):
            loss = subject.loss()
            if not bool(loss.isfinite()):
                raise ValueError(f"the loss is {loss.item()}, and no update follows; check weights and batch")
            found = gradients_of(loss, subject.model)
        for path, twin in twins.items():
            twin.grad = found[path]
        return loss.detach()

    step: Callable[..., Any] = type(copy).step  # not copy.step: a schedule may have bound it to the original
    with undisturbed(subject.model):
        if "closure" in inspect.signature(step).parameters:
            step(copy, evaluate)
        else:
            evaluate()
            step(copy)
    return {path: twin.detach() for path, twin in twins.items()}


def _copy(optimiser: Optimizer, twin_of: Mapping[int, Parameter]) -> Optimizer:
    """The same optimiser on the twins of its parameters."""
    held = [p for group in optimiser.param_groups for p in group["params"]]
    if not any(id(p) in twin_of for p in held):
        raise ValueError(
            "the optimiser holds no parameter of the model; pass the one that trains it, or a function that "
            "makes one, as in partial(torch.optim.AdamW, lr=5e-4)"
        )
    left = {"step"} | {name for name, value in vars(optimiser).items() if isinstance(value, OrderedDict)}
    state = {name: value for name, value in vars(optimiser).items() if name not in left}
    copy = type(optimiser).__new__(type(optimiser))
    copy.__setstate__(deepcopy(state, dict(twin_of)))
    return copy

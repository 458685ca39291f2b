"""Compute gradients, and run a model at other weights, without writing to its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from normlab.diagnosis.reading.tokens import FROZEN
from normlab.errors import UserError

Weights: TypeAlias = Mapping[str, Tensor]
"""Trainable parameters, or what belongs to each, by path."""


class LossGradients(NamedTuple):
    """A loss, and its gradients in every trainable parameter by path."""

    loss: float
    gradients: Weights


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that need gradients, by path, without those that have no entry.

    Raises UserError for a frozen model.
    """
    found = {path: p for path, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not found:
        raise UserError(FROZEN)
    return found


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a loss in every trainable parameter; zero for one that it does not reach.

    Raises UserError for a loss without a graph.
    """
    parameters = trainable(model)
    if not loss.requires_grad:
        raise UserError(FROZEN)
    found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


@contextmanager
def at_weights(model: nn.Module, weights: Weights) -> Iterator[None]:
    """Give these parameters other values inside this block; their own storage is never written to."""
    parameters = dict(model.named_parameters())
    own = {path: parameters[path].data for path in weights}
    try:
        for path, weight in weights.items():
            parameters[path].data = weight.detach()
        yield
    finally:
        for path, data in own.items():
            parameters[path].data = data

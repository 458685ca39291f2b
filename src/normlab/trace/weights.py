"""The values of a model's parameters: kept apart from its passes, and put back after them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normlab.trace.autograd import Weights
from normlab.trace.use import storage_of


def weights_apart(model: nn.Module, other: nn.Module | None) -> dict[str, Tensor]:
    """Return the values of a model's parameters, in tensors to which no pass of the model writes.

    Those of ``other`` serve where they are equal and have storage of their own: of a large model, one more
    copy of the weights may not fit in memory. The rest is cloned.
    """
    of_other = {} if other is None else dict(other.named_parameters())
    values = dict[str, Tensor]()
    for name, p in model.named_parameters():
        value = p.detach()
        there = of_other[name].detach() if name in of_other else None
        serves = there is not None and not _share_storage(value, there) and same_values(value, there)
        values[name] = there if serves else value.clone()
    return values


def put_back_weights(model: nn.Module, weights: Weights) -> None:
    """Give parameters these values, by their paths, without writing to those that have them."""
    for name, p in model.named_parameters():
        if name in weights and not same_values(p, weights[name]):
            p.data.copy_(weights[name])


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal entries, where NaN equals NaN."""
    if torch.equal(a, b):
        return True
    if a.shape != b.shape:
        return False
    both_nan = a.isnan() & b.isnan()
    return bool(((a == b) | both_nan).all())


def _share_storage(a: Tensor, b: Tensor) -> bool:
    storage = storage_of(a)
    return storage is not None and storage == storage_of(b)

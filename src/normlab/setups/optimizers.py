"""Which parameters optimizers hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer, group after group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def ids_held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the parameters that these optimizers hold, by ``id``."""
    return {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}

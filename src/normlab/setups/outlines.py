"""Keep enough of a tensor to tell whether another one is the same, where keeping the tensor takes too much
memory.

A proof compares every activation of a step with the recorded one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from normlab.private_torch import is_functorch_wrapped

SAMPLE: Final = 64
"""How many entries are kept as they are."""


@dataclass(frozen=True)
class Outline:
    """The form of a tensor, and numbers that another tensor of this form is unlikely to have as well."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    place: int
    """Where its entries lay in memory."""
    sum: float
    norm: float
    sample: Tensor
    """The first entries of its first row."""

    @classmethod
    def of(cls, tensor: Tensor) -> Outline:
        """Return the outline of a floating-point tensor."""
        x = tensor.detach()
        # sums in float64, without a copy in it
        total = float(x.sum(dtype=torch.float64))
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
        place = tensor.untyped_storage().data_ptr()
        return cls(x.shape, x.dtype, tensor.requires_grad, place, total, norm, _first_entries(x).clone())

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def is_apart(self, tensor: Tensor, tolerance: float) -> bool:
        """Return whether a tensor differs from the outlined one by more than this share of its norm."""
        if tensor.shape != self.shape:
            return True
        other = Outline.of(tensor)
        largest_sum = self.norm * max(self.shape.numel(), 1) ** 0.5
        sample_apart = float((other.sample.double() - self.sample.double()).norm())
        return (
            abs(other.norm - self.norm) > tolerance * self.norm
            or abs(other.sum - self.sum) > tolerance * largest_sum
            or sample_apart > tolerance * self.norm
        )


def is_outlined(tensor: Tensor) -> bool:
    """Return whether a tensor is one of those that only a proof asks for: it was computed from parameters."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if is_functorch_wrapped(tensor):  # it has no entries of its own
        return False
    is_computed = tensor.requires_grad and tensor.grad_fn is not None
    return is_computed and tensor.is_floating_point() and tensor.numel() > 0


def _first_entries(x: Tensor) -> Tensor:
    return x[(0,) * (x.ndim - 1)][:SAMPLE] if x.ndim else x

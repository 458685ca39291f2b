"""How tensors of two processes differ: the first parameter, and by which factor if it is one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor

from normlab.parallel.job import Named
from normlab.setups.gradients import ROUNDINGS

LARGEST_PART: Final = 64
"""A factor is written as a fraction if its numerator and its denominator are no larger."""


@dataclass(frozen=True)
class Difference:
    """A parameter whose tensor differs from the one that it is compared with."""

    name: str
    share: float
    """The norm of the difference, as a share of that of the expected tensor."""
    factor: float | None
    """What the expected tensor is multiplied by, if that is all."""
    missing: bool = False
    """Whether there is no tensor at all."""

    def beside(self, expected: str) -> str:
        """Return what a tensor is, beside what was ``expected``: ``1/2 times that of one process``."""
        if self.missing:
            return f"missing, unlike {expected}"
        if self.factor is not None:
            return f"{factor_in_words(self.factor)} times {expected}"
        if math.isinf(self.share):
            return f"of another size than {expected}"
        return f"off by {self.share:.1%} of the norm of {expected}"


def differences(actual: Named, expected: Named) -> Iterator[Difference]:
    """Yield the parameters of two processes that differ by more than rounding, in their order.

    Half of the digits of their type must agree. A tensor that is tiny next to the largest, such as a gradient
    that is zero but for rounding, may also differ by what rounding leaves of the largest.
    """
    largest = max((float(x.double().norm()) for x in expected.values()), default=0.0)
    for name, x in expected.items():
        difference = _difference(name, actual.get(name), x, largest)
        if difference is not None:
            yield difference


def _difference(name: str, actual: Tensor | None, expected: Tensor, largest: float) -> Difference | None:
    """Return how a tensor differs from the expected one; ``largest`` is the largest norm of all of these."""
    wide = expected.double()
    norm = float(wide.norm())
    left_of_zero = rounding_of(expected) * largest
    if actual is None:
        return Difference(name, 1.0, None, missing=True) if norm > left_of_zero else None
    if actual.shape != expected.shape:
        return Difference(name, math.inf, None)
    eps = torch.finfo(expected.dtype).eps
    apart = float((actual.double() - wide).norm())
    if apart <= math.sqrt(eps) * norm + left_of_zero:  # never so for a NaN
        return None
    return Difference(name, apart / norm if norm else math.inf, _factor(actual.double(), wide, eps))


def where_known(updates: Named, gradients: Named) -> Named:
    """Return updates with 0 where the gradient is zero but for rounding.

    Adam divides a gradient by its own size, so what rounding leaves of a zero, such as the gradient of a
    key's bias in attention, may become a step of any size.
    """
    largest = max((float(x.double().norm()) for x in gradients.values()), default=0.0)
    known: Named = {}
    for name, x in updates.items():
        gradient = gradients.get(name)
        if gradient is None:
            known[name] = x
        else:
            known[name] = x * (gradient.abs() > rounding_of(gradient) * largest)
    return known


def rounding_of(x: Tensor) -> float:
    """Return how much of the largest tensor rounding may leave in one that is zero."""
    return ROUNDINGS * torch.finfo(x.dtype).eps


def first_difference(actual: Named, expected: Named) -> Difference | None:
    """Return the first of the parameters that differ; None if none does."""
    return next(differences(actual, expected), None)


def common_factor(actual: Named, expected: Named) -> float | None:
    """Return the factor of all parameters that differ; None if they have several, or none does."""
    common: float | None = None
    for difference in differences(actual, expected):
        factor = difference.factor
        if common is None:
            common = factor
        if factor is None or common is None or not math.isclose(factor, common, rel_tol=1e-3):
            return None
    return common


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """Return the norm of all tensors as one vector."""
    return math.sqrt(sum(float(x.double().pow(2).sum()) for x in tensors.values()))


def factor_in_words(factor: float) -> str:
    """Return a factor as a whole number or a small fraction if it is one to rounding: ``2``, ``1/4``."""
    near = Fraction(factor).limit_denominator(LARGEST_PART)
    if near and abs(near.numerator) <= LARGEST_PART and math.isclose(factor, float(near), rel_tol=1e-5):
        return str(near)
    return f"{factor:.4g}"


def _factor(a: Tensor, b: Tensor, eps: float) -> float | None:
    """Return k in a = k · b, if half of the digits agree; None if there is none."""
    squares = float((b * b).sum())
    if not squares or not bool(a.isfinite().all()):
        return None
    factor = float((a * b).sum()) / squares
    if factor == 0.0:
        return None
    apart = float((a - factor * b).norm())
    return factor if apart <= math.sqrt(eps) * float(a.norm()) else None

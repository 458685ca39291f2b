"""Ours against an oracle: the value, and the derivative along a random direction of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from normlab.base.registry import Registry
from normlab.nn import reference
from normlab.nn.kernels import ops
from normlab.trace.tensors import counts
from oracles.derivative import derivative

Array = np.ndarray
Oracle = Callable[[Mapping[str, Array]], Array]
TOLERANCE = 1e-11
"""The rounding of float64 forward and backward passes, relative to the largest value and to the largest
derivative; the complex step of the oracle is right to rounding. A derivative along a direction is a sum whose
terms cancel, so that its size is that of the terms: the sum of their magnitudes."""

STEPS = 1700
"""The steps that a model has made, where it counts them."""


@contextmanager
def fused() -> Iterator[None]:
    """Attention by the fused kernel, which the CPU otherwise takes in training only for long sequences."""
    kernel = torch.nn.functional.scaled_dot_product_attention
    with (
        patch.object(ops, "_PLAIN_ATTENTION_SCORES", 0),
        patch.object(ops.F, "scaled_dot_product_attention", wraps=kernel),
    ):
        yield


@contextmanager
def trained() -> Iterator[None]:
    """As in training."""
    yield


PATHS = (trained, fused, reference)


def ours_alone(registry: Registry) -> list[str]:
    """The names that the package itself registers; tests register outsiders."""
    return [name for name, variant in registry.items() if variant.__module__.startswith("normlab.")]


@torch.no_grad()
def scattered(module: nn.Module, scale: float = 1.0) -> nn.Module:
    """The module in float64 and evaluation mode, every parameter's elements of both signs and between 0.2 and
    0.8 times ``scale`` in size, after ``STEPS`` steps.
    """
    generator = torch.Generator().manual_seed(5)
    for parameter in module.double().eval().parameters():
        size = 0.2 + 0.6 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
        sign = 2 * torch.randint(2, parameter.shape, generator=generator) - 1
        parameter.copy_(scale * size * sign)
    for count in counts(module).values():
        count.fill_(STEPS)
    return module


def arrays_of(module: nn.Module) -> dict[str, Array]:
    return {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


def compare(
    module: nn.Module, ours: Callable[[], Tensor], theirs: Oracle, inputs: Mapping[str, Tensor] | None = None
) -> None:
    """Value and derivative of ``ours`` on every path against those of ``theirs``.

    ``theirs`` takes the module's parameters and the inputs, by name. All of them move at once, each along a
    random direction of its own, so that the wrong gradient of any one changes the sum; where it is off, each
    is moved by itself to name those that are wrong.
    """
    leaves = dict(module.named_parameters()) | dict(inputs or {})
    arrays = {name: leaf.detach().numpy().copy() for name, leaf in leaves.items()}
    expected = theirs(arrays)
    rng = np.random.default_rng(3)
    cotangent = rng.normal(size=expected.shape)
    directions = {name: rng.normal(size=array.shape) for name, array in arrays.items()}

    def slope(*names: str) -> float:
        def along(step: complex) -> complex:
            moved = {name: arrays[name] + step * directions[name] for name in names}
            return (cotangent * theirs({**arrays, **moved})).sum()

        return derivative(along)

    together = slope(*arrays)
    for path in PATHS:
        with path():
            value = ours()
            kernel = ops.F.scaled_dot_product_attention
            assert path is not fused or not _has_attention(module) or kernel.call_count > 0
        gradients = torch.autograd.grad((value * torch.from_numpy(cotangent)).sum(), list(leaves.values()))
        terms = {n: g.numpy() * directions[n] for n, g in zip(leaves, gradients, strict=True)}
        slopes = {name: float(term.sum()) for name, term in terms.items()}
        allowed = TOLERANCE * max(np.abs(term).sum() for term in terms.values())
        np.testing.assert_allclose(
            value.detach().numpy(), expected, rtol=0, atol=TOLERANCE * np.abs(expected).max()
        )
        if not abs(sum(slopes.values()) - together) <= allowed:
            each = [(name, own, slope(name)) for name, own in slopes.items()]
            wrong = [one for one in each if not abs(one[1] - one[2]) <= allowed]
            raise AssertionError(
                f"{path.__name__}: parameters, our derivative, the oracle's: {wrong or each}"
            )


def _has_attention(module: nn.Module) -> bool:
    return any(hasattr(m, "qk_norm") for m in module.modules())

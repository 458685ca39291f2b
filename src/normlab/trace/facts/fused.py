r"""Logits that are no tensor of the step: a function multiplies features with the head's matrix and scores
the product at once, so that the logits of a large vocabulary are never held.

For features :math:`h` `[N, D]` and the matrix :math:`W` `[V, D]`, the logits would be :math:`z = h W^T`. The
gradient of a cross-entropy at :math:`h` is that at :math:`z`, whose parts ``targets`` names, times :math:`W`:
at one position :math:`a\,p W - b \sum_v W_v - c\,W_y`. A class :math:`y` and three numbers explain the
:math:`D` features of that gradient only if it is a cross-entropy's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace.functions import OWN, FunctionCall
from normlab.trace.tensors import tensors_in

FUSED: Final = ("linear_cross_entropy", OWN)
"""Functions that may multiply and score at once."""
ROWS: Final = 512
"""How many positions are fitted at a time."""
ROUNDED: Final = 16 * torch.finfo(torch.float32).eps
"""Share of a gradient that these functions may lose by rounding: many add up in float32, come what may."""
FREE: Final = 4
"""How many numbers are free in the fit of a position; a gradient of no more features proves nothing."""


class Product(NamedTuple):
    """Features `[..., D]`, the matrix `[V, D]` that they are multiplied with, and what is added, `[V]`."""

    features: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @property
    def classes(self) -> int:
        """The number of classes, V."""
        return self.weight.shape[0]

    def logits(self) -> Tensor:
        """Return the product `[..., V]`."""
        return nn.functional.linear(self.features, self.weight, self.bias).detach()

    def slope(self, gradient: Tensor, limit: float) -> tuple[Tensor, float] | None:
        """Read the gradient at the logits off that at the features.

        Args:
            gradient: That at the features, `[..., D]`.
            limit: The share of it that rounding may leave unexplained.

        Returns:
            The gradient at the logits, `[..., V]`, and the largest share at a position that is not explained;
            None if it is no cross-entropy's.
        """
        width, limit = self.features.shape[-1], max(limit, ROUNDED)
        flat = gradient.detach().reshape(-1, width)
        places = (flat.abs().sum(-1) > 0).nonzero()[:, 0]
        if width <= FREE or not len(places) or not bool(torch.isfinite(flat).all()):
            return None
        logits, weight = self.logits().reshape(-1, self.classes), self.weight.detach().double()
        slope = torch.zeros_like(logits, dtype=torch.float64)
        residuals = list[Tensor]()
        for part in places.split(ROWS):
            slope[part], residual = _fit(logits[part].double(), flat[part].double(), weight)
            residuals.append(residual)
        unexplained = torch.cat(residuals)
        is_fitted = unexplained < limit
        if is_fitted.double().mean() < 0.98:
            return None
        return slope.reshape(*self.features.shape[:-1], self.classes), float(unexplained[is_fitted].max())


def products_of(call: FunctionCall, model: nn.Module, classes: Collection[int]) -> list[Product]:
    """Return the products that a call may have scored, in an order that depends on the shapes alone.

    Where a call is given no matrix, as a checkpoint around the head is, the model's own are taken that have
    so many rows. The result of such a call is a loss, of all positions or of each.
    """
    if call.name not in FUSED:
        return []
    arguments = [x for _, x in tensors_in((call.args, call.kwargs)) if x.is_floating_point()]
    result = next((x for _, x in tensors_in(call.result) if x.is_floating_point()), None)
    products = list[Product]()
    for features in arguments:
        if features.ndim < 2 or isinstance(features, nn.Parameter) or result is None:
            continue
        if result.numel() not in (1, features.numel() // features.shape[-1]):
            continue
        others = [x for x in arguments if x is not features]
        matrices = [x for x in others if _fits(x, features)]
        if not any(x.ndim == 2 for x in others):
            others = list(model.parameters())
            matrices = [p for p in others if _fits(p, features) and len(p) in classes]
        for matrix in matrices:
            biases = [x for x in others if x.shape == matrix.shape[:1]]
            products += [Product(features, matrix, bias) for bias in (None, *biases)]
    return products


def _fits(matrix: Tensor, features: Tensor) -> bool:
    """Return whether features may be multiplied with a matrix of one row for each class."""
    return matrix.ndim == 2 and matrix.shape[1] == features.shape[-1] and len(matrix) > 1


def _fit(z: Tensor, g: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Fit the gradients `[n, D]` at the features of positions with logits `[n, V]`. Return the gradients at
    the logits, and the share of each position's gradient that they do not explain.
    """
    p = z.softmax(-1)
    expected, uniform = p @ weight, weight.sum(0).expand_as(g)
    size = g.abs().sum(-1)
    plain, smooth = (_fitted(g, basis, weight) for basis in ([expected], [expected, uniform]))
    left_by_plain, left_by_smooth = _unexplained(g, plain), _unexplained(g, smooth)
    # label smoothing is believed only if it explains the gradient much better, as at known logits
    is_smooth = (left_by_plain > 1e-10 * size) & (left_by_smooth < 0.5 * left_by_plain)
    ids = torch.where(is_smooth, smooth.ids, plain.ids)
    on_class = torch.where(is_smooth, smooth.on_class, plain.on_class)
    a = torch.where(is_smooth, smooth.factors[:, 0], plain.factors[:, 0])
    b = torch.where(is_smooth, -smooth.factors[:, 1], torch.zeros_like(a))
    slope = a[:, None] * p - b[:, None]
    slope.scatter_add_(1, ids[:, None], on_class[:, None])
    return slope, torch.where(is_smooth, left_by_smooth, left_by_plain) / size


class _Fitted(NamedTuple):
    """The class of each position, its factor, those of the basis, and what all of them make."""

    ids: Tensor
    on_class: Tensor
    factors: Tensor
    made: Tensor


def _unexplained(g: Tensor, fitted: _Fitted) -> Tensor:
    """Return how much of each gradient is not explained."""
    return (g - fitted.made).abs().sum(-1)


def _fitted(g: Tensor, basis: list[Tensor], weight: Tensor) -> _Fitted:
    """Explain each gradient `[n, D]` by vectors `[n, D]` of a basis and by the row of one class.

    That class is the one whose row is most nearly parallel to the gradient, both without what the basis
    explains of them.
    """
    vectors = torch.stack(basis, -1)
    # what of a gradient, and of a row, is orthogonal to the basis
    orthogonal, _ = torch.linalg.qr(vectors)
    beyond = g - (orthogonal @ (orthogonal.mT @ g[..., None]))[..., 0]
    along = beyond @ weight.T
    inside = torch.stack([orthogonal[..., i] @ weight.T for i in range(len(basis))], -1)
    length = (weight.square().sum(-1) - inside.square().sum(-1)).clamp_min(1e-300)
    ids = torch.where(along < 0, along.square() / length, 0.0).argmax(-1)  # the class asked for gets less
    on_class = along.gather(1, ids[:, None]) / length.gather(1, ids[:, None])
    left = g - on_class * weight[ids]
    factors = torch.linalg.lstsq(vectors, left[..., None]).solution[..., 0]
    made = (vectors @ factors[..., None])[..., 0] + on_class * weight[ids]
    return _Fitted(ids, on_class[:, 0], factors, made)

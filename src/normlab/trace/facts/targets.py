r"""The targets of a cross-entropy, read off its gradient in the logits that it scores.

With :math:`p = \mathrm{softmax}(z)`, the gradient of :math:`w` times a cross-entropy with label smoothing
:math:`\epsilon` over :math:`V` classes, plus any function of :math:`\log\sum e^z` (a z-loss), at one position
is :math:`g = a\,p - b - c\,\mathrm{onehot}(y)` with :math:`b = w\epsilon/V`, :math:`c = w - bV`, and
:math:`a = w` without such a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 512
"""How many positions are fitted at a time."""
RESIDUAL = {torch.float64: 1e-7, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Share of a gradient that rounding may leave unexplained, by the dtype of the logits."""


class Targets(NamedTuple):
    """What a cross-entropy asks for at each position of logits `[..., V]`."""

    ids: Tensor
    """`[...]` the class asked for; 0 if there is none."""
    counted: Tensor
    """`[...]` where the loss has a gradient."""
    weight: Tensor
    """`[...]` float64: the factor on the position's cross-entropy."""
    nll: Tensor
    """`[...]` float64: -log p of the class asked for, in nats."""
    classes: int
    smoothing: float
    """Label smoothing, the median over positions."""
    excess: float
    r"""The median of :math:`|a - w| / w` over positions: above 0 where another term acts on the logits."""

    def rearranged(self, change: Callable[[Tensor], Tensor]) -> Targets:
        """Return the same targets with other leading dimensions."""
        ids, counted, weight, nll = map(change, (self.ids, self.counted, self.weight, self.nll))
        return self._replace(ids=ids, counted=counted, weight=weight, nll=nll)

    def value(self, logits: Tensor) -> float:
        """Return their cross-entropy for the logits, with its weights and label smoothing."""
        smooth = -logits.double().log_softmax(-1).mean(-1).cpu().reshape(self.weight.shape)
        mixed = (1 - self.smoothing) * self.nll + self.smoothing * smooth
        return float((self.weight * mixed)[self.counted].sum())

    def ahead(self, where: Tensor, distance: int) -> Tensor:
        """Return the mask of an entry `[B, W]` at a distance from each position, False past its edges."""
        place = torch.arange(self.ids.shape[1]) + distance
        inside = (place >= 0) & (place < where.shape[1])
        return where[:, place.clamp(0, where.shape[1] - 1)] & inside

    def by_row(self, entry: Tensor, distance: int) -> Tensor:
        """Return `[B, B]`, the share of a row's counted targets that are a row's tokens at a distance."""
        here, there = self._beside(entry, distance)
        counted = self.counted[:, None, here]
        same = (self.ids[:, None, here] == entry[None, :, there]) & counted
        return same.sum(-1) / counted.sum(-1).clamp_min(1)

    def share(self, entry: Tensor, distance: int) -> float:
        """Return the share of counted targets that are the token of an entry `[B, W]` that far ahead."""
        here, there = self._beside(entry, distance)
        if here.stop <= here.start or len(self.ids) != len(entry):
            return 0.0
        counted = self.counted[:, here]
        same = (self.ids[:, here] == entry[:, there]) & counted
        return float(same.sum() / counted.sum().clamp_min(1))

    def _beside(self, entry: Tensor, distance: int) -> tuple[slice, slice]:
        low = max(0, -distance)
        end = min(self.ids.shape[1], entry.shape[1] - distance)
        return slice(low, end), slice(low + distance, end + distance)


def read_targets(logits: Tensor, gradient: Tensor, precision: torch.dtype = torch.float64) -> Targets | None:
    """Return the targets, or None if the gradient is not a cross-entropy's at these logits `[..., V]`."""
    classes, shape = logits.shape[-1], logits.shape[:-1]
    z, g = logits.detach().reshape(-1, classes), gradient.detach().reshape(-1, classes)
    counted = g.abs().sum(-1) > 0
    if classes < 2 or not counted.any() or not torch.isfinite(g).all():
        return None
    parts = zip(z[counted].split(ROWS), g[counted].split(ROWS), strict=True)
    fitted = [torch.cat(x) for x in zip(*(_fit(z.double(), g.double()) for z, g in parts), strict=True)]
    ids, weight, p_weight, uniform, residual, nll = fitted
    good = (residual < RESIDUAL.get(precision, 5e-2)) & (weight > 0) & (p_weight > 0)
    if good.double().mean() < 0.98:
        return None

    counted = counted.cpu()

    def full(values: Tensor) -> Tensor:
        nothing = torch.zeros(len(counted), dtype=values.dtype)
        return nothing.masked_scatter(counted, values.cpu()).reshape(shape)

    weight = weight + uniform * classes
    smoothing = float((uniform * classes / weight).median())
    excess = float(((p_weight - weight).abs() / weight).median())
    return Targets(full(ids), counted.reshape(shape), full(weight), full(nll), classes, smoothing, excess)


def _fit(z: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Fit g = a p - b off the target by least squares, and take w = a p - b - g at the target, by row."""
    classes = z.shape[-1]
    p, ids = z.softmax(-1), g.argmin(-1)
    at = F.one_hot(ids, classes).bool()
    others = classes - 1
    off_p, off_g = p.masked_fill(at, 0.0), g.masked_fill(at, 0.0)
    a = (off_p * off_g).sum(-1) / (off_p * off_p).sum(-1).clamp_min(1e-300)
    b = torch.zeros_like(a)
    size = g.abs().sum(-1)

    def residual(a: Tensor, b: Tensor) -> Tensor:
        return (g - (a[:, None] * p - b[:, None])).masked_fill(at, 0.0).abs().sum(-1) / size

    plain = residual(a, b)
    if others > 1:
        mean_p, mean_g = off_p.sum(-1) / others, off_g.sum(-1) / others
        centred = (p - mean_p[:, None]).masked_fill(at, 0.0)
        slope = (centred * (g - mean_g[:, None])).sum(-1) / centred.square().sum(-1).clamp_min(1e-300)
        offset = slope * mean_p - mean_g
        smooth = residual(slope, offset)
        better = (plain > 1e-10) & (smooth < plain * 0.5)
        a, b = torch.where(better, slope, a), torch.where(better, offset, b)
        plain = torch.where(better, smooth, plain)
    here = ids[:, None]
    weight = a * p.gather(-1, here)[:, 0] - b - g.gather(-1, here)[:, 0]
    nll = -z.log_softmax(-1).gather(-1, here)[:, 0]
    if others <= 2:  # no entry is left to check the fit: the gradient of a cross-entropy adds up to 0
        plain = torch.maximum(plain, g.sum(-1).abs() / size)
    return ids, weight, a, b, plain, nll


CLOSE: Final = 1e-6
"""Relative difference allowed in sums of gradients in float64 and in what is read off them."""

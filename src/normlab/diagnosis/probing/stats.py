"""Statistics of a tensor, each a 0-d tensor on the same device, so that nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from normlab.spec.arguments import validate_arguments

Statistic = Callable[[Tensor], Tensor]


def similarity(x: Tensor) -> Tensor:
    r"""Return :math:`\frac{1}{t(t-1)} \sum_{i \ne j} \cos(x_i, x_j)` of the t rows of `[..., t, d]`, the mean
    over sequences. Not a number where t is 1.
    """
    rows = torch.nn.functional.normalize(x, dim=-1)
    t = x.shape[-2]
    together = rows.sum(-2).square().sum(-1) - rows.square().sum((-2, -1))
    return together.mean() / (t * (t - 1) or float("nan"))


STATISTICS: Final[dict[str, Statistic]] = {
    "mean": Tensor.mean,
    "variance": lambda x: x.var(correction=0),
    "mean_square": lambda x: x.square().mean(),
    "rms": lambda x: x.square().mean().sqrt(),
    "l2": torch.linalg.vector_norm,
    "max_abs": lambda x: x.abs().amax(),
    "fraction_nonfinite": lambda x: 1 - x.isfinite().to(x.dtype).mean(),
    "fraction_zero": lambda x: (x == 0).to(x.dtype).mean(),
    "entropy": lambda x: torch.special.entr(x).sum(-1).mean(),
    "similarity": similarity,
}
r"""The statistics by the names that probes use. The variance is :math:`\frac{1}{n} \sum_i (x_i - \bar x)^2`,
the mean square that of the entries: of rows of width d, their mean squared length over d. The entropy is the
mean of :math:`-\sum_i p_i \ln p_i` in nats over rows p of probabilities `[..., n]`.
"""


def whole(x: Tensor) -> Tensor:
    """Return a tensor that may be a part of one on several ranks as a plain one."""
    full: Callable[[], Tensor] | None = getattr(x, "full_tensor", None)
    return x if full is None else full()


@validate_arguments
def measure(statistic: str, x: Tensor) -> Tensor:
    """Compute a statistic of a tensor of any floating type, in float32 if the type is narrower.

    One that is spread over ranks, as the parameters under ``fully_shard`` are, is made whole first: every
    rank has to measure it.
    """
    x = whole(x.detach())
    return STATISTICS[statistic](x.to(torch.promote_types(x.dtype, torch.float32)))

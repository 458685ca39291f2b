"""Statistics of a tensor, each a 0-d tensor on the same device, so that nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normlab.spec.arguments import validate_arguments

Statistic = Callable[[Tensor], Tensor]


def mean(x: Tensor) -> Tensor:
    r"""Return :math:`\frac{1}{n} \sum_i x_i`."""
    return x.mean()


def variance(x: Tensor) -> Tensor:
    r"""Return :math:`\frac{1}{n} \sum_i (x_i - \bar x)^2`."""
    return x.var(correction=0)


def mean_square(x: Tensor) -> Tensor:
    r"""Return :math:`\frac{1}{n} \sum_i x_i^2`: the mean squared length of rows of width d, over d."""
    return x.square().mean()


def rms(x: Tensor) -> Tensor:
    r"""Return :math:`(\frac{1}{n} \sum_i x_i^2)^{1/2}`."""
    return mean_square(x).sqrt()


def l2(x: Tensor) -> Tensor:
    r"""Return :math:`(\sum_i x_i^2)^{1/2}`."""
    return torch.linalg.vector_norm(x)


def max_abs(x: Tensor) -> Tensor:
    r"""Return :math:`\max_i |x_i|`."""
    return x.abs().amax()


def fraction_nonfinite(x: Tensor) -> Tensor:
    r"""Return :math:`\frac{1}{n} |\{i : x_i \text{ is infinite or not a number}\}|`."""
    return 1 - x.isfinite().to(x.dtype).mean()


def fraction_zero(x: Tensor) -> Tensor:
    r"""Return :math:`\frac{1}{n} |\{i : x_i = 0\}|`."""
    return (x == 0).to(x.dtype).mean()


def entropy(x: Tensor) -> Tensor:
    r"""Return :math:`-\sum_i p_i \ln p_i` in nats, the mean over rows p of probabilities `[..., n]`."""
    return torch.special.entr(x).sum(-1).mean()


def similarity(x: Tensor) -> Tensor:
    r"""Return :math:`\frac{1}{t(t-1)} \sum_{i \ne j} \cos(x_i, x_j)` of the t rows of `[..., t, d]`, the mean
    over sequences. Not a number where t is 1.
    """
    rows = torch.nn.functional.normalize(x, dim=-1)
    t = x.shape[-2]
    together = rows.sum(-2).square().sum(-1) - rows.square().sum((-2, -1))
    return together.mean() / (t * (t - 1) or float("nan"))


_ALL = (mean, variance, mean_square, rms, l2, max_abs, fraction_nonfinite, fraction_zero, entropy, similarity)
STATISTICS: dict[str, Statistic] = {statistic.__name__: statistic for statistic in _ALL}
"""The statistics by the names that probes use."""


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

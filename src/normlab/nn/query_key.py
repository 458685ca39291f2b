"""Norms applied to queries and keys before their products, each with a published equation."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.base.model_config import ModelConfig
from normlab.base.registry import Registered, Registry
from normlab.nn.kernels.fused import root_mean_square_normed, scaled_to
from normlab.nn.norm import Norm


class QueryKeyNorm(Registered, nn.Module, ABC):
    """A transformation of queries `[B, H, T, w]` and keys `[B, G, S, w]` before their products, and of values
    if its source has one.
    """

    registry: ClassVar[Registry[Callable[[ModelConfig], QueryKeyNorm]]] = Registry("query-key norm")
    parameter_roles: ClassVar[str] = "norm"
    scale: ClassVar[float | None] = None
    """Factor on the products; None means :math:`1/\\sqrt{w}`."""
    after_rotation: ClassVar[bool] = False
    """Whether it comes after the rotation of rope rather than before it."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Transform both, without changing their shapes."""
        return self.queries(q), self.keys(k)

    def queries(self, q: Tensor) -> Tensor:
        """Transform queries `[B, H, T, w]` for products with keys that went through ``keys``."""
        return q

    def keys(self, k: Tensor) -> Tensor:
        """Transform keys `[B, G, S, w]`."""
        return k

    def values(self, v: Tensor) -> Tensor:
        """Transform values `[B, G, S, w]`."""
        return v


class ScaledProducts(QueryKeyNorm, name="scaled"):
    r""":math:`q \cdot k / \sqrt{w}` with heads of width w.

    Vaswani et al. 2017, Section 3.2 (arXiv 1706.03762).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()


class ScaledCosines(QueryKeyNorm, name="qknorm"):
    r"""QK-norm: :math:`g \cos(q, k)`, with one trained g (shape `[1]`) in each attention.

    Initially :math:`g = \log_2(n^2 - n)`, where n is the 97.5th percentile of the lengths of training
    sentences (``qk_norm_len``). Henry et al. 2020, Section 2 (arXiv 2010.04245).
    """

    options: ClassVar[tuple[str, ...]] = ("qk_norm_len",)
    scale: ClassVar[float | None] = 1.0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        n = config.qk_norm_len
        self.g = nn.Parameter(torch.full((1,), math.log2(n * n - n)))

    def queries(self, q: Tensor) -> Tensor:
        return scaled_to(q, self.g)

    def keys(self, k: Tensor) -> Tensor:
        return scaled_to(k, 1.0)


class NormedQueriesAndKeys(QueryKeyNorm, name="normed"):
    r""":math:`\mathrm{LN}(q) \cdot \mathrm{LN}(k) / \sqrt{w}`, with the model's norm over all heads together.

    OLMo et al. 2025, Section 2.1 (arXiv 2501.00656).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        norm, width = Norm.registry[config.norm], config.head_width
        self.query, self.key = norm(width * config.heads), norm(width * (config.kv_heads or config.heads))

    def queries(self, q: Tensor) -> Tensor:
        return _over_heads(self.query, q)

    def keys(self, k: Tensor) -> Tensor:
        return _over_heads(self.key, k)


class NormedHeads(QueryKeyNorm, name="headnormed"):
    r""":math:`\mathrm{LN}(q) \cdot \mathrm{LN}(k) / \sqrt{w}`, with the model's norm over each head, one gain
    of width w for all heads of queries and one for those of keys.

    Dehghani et al. 2023, Section 3.1 (arXiv 2302.05442); as in Qwen3 and Gemma 3, with RMSNorm before rope.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        norm, width = Norm.registry[config.norm], config.head_width
        self.query, self.key = norm(width), norm(width)

    def queries(self, q: Tensor) -> Tensor:
        return self.query(q)

    def keys(self, k: Tensor) -> Tensor:
        return self.key(k)


class NormedHeadsAndValues(NormedHeads, name="qkvnormed"):
    r""":math:`\mathrm{LN}(q) \cdot \mathrm{LN}(k) / \sqrt{w}` and values :math:`\mathrm{LN}(v)`, with the
    model's norm over each head.

    Zhuo et al. 2025, Section 3 (arXiv 2503.04598).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.value = Norm.registry[config.norm](config.head_width)

    def values(self, v: Tensor) -> Tensor:
        return self.value(v)


class RotatedThenNormed(QueryKeyNorm, name="ropenormed"):
    r""":math:`1.44 \, \hat{q} \cdot \hat{k} / \sqrt{w}` with :math:`\hat{q} = q/\mathrm{rms}(q)` over each
    head, without a gain and after the rotation of rope.

    nanochat's code, where queries and keys are multiplied by 1.2 each, after Dehghani et al. 2023,
    Section 3.1 (arXiv 2302.05442).
    """

    after_rotation: ClassVar[bool] = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def queries(self, q: Tensor) -> Tensor:
        return 1.2 * root_mean_square_normed(q, q.new_ones(q.shape[-1]), eps=1e-6)

    def keys(self, k: Tensor) -> Tensor:
        return self.queries(k)


class ScaledUnitHeads(QueryKeyNorm, name="ngptnormed"):
    r"""nGPT's :math:`\sqrt{w} \, (s \odot \hat{q}) \cdot (s \odot \hat{k})` with
    :math:`\hat{q} = q / \|q\|_2` over each head after rope, and trained s for each channel (shape `[H w]`),
    initially 1.

    s is stored as :math:`1/\sqrt{d}` and multiplied by :math:`\sqrt{d}`. Loshchilov et al. 2024, Section 2.3
    (arXiv 2410.01131). Keys that several heads share take the s of the first of them.
    """

    scale: ClassVar[float | None] = 1.0
    after_rotation: ClassVar[bool] = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.root = config.heads, config.dim**0.5
        self.s = nn.Parameter(torch.full((config.heads * config.head_width,), 1 / self.root))

    def _scaled(self, x: Tensor, factor: float) -> Tensor:
        s = self.s.view(self.heads, 1, -1)[:: self.heads // x.shape[1]]
        return scaled_to(x, 1.0) * (s * (self.root * factor))

    def queries(self, q: Tensor) -> Tensor:
        return self._scaled(q, q.shape[-1] ** 0.5)

    def keys(self, k: Tensor) -> Tensor:
        return self._scaled(k, 1.0)


def _over_heads(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a norm to the concatenated heads of x `[B, H, T, w]`."""
    return norm(x.transpose(1, 2).flatten(2)).unflatten(2, (x.shape[1], -1)).transpose(1, 2)

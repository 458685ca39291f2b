"""Norms: each maps `[..., D]` to `[..., D]` over the last axis and is built as ``norm(dim)``."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Registry


class Norm(nn.Module, ABC):
    """Base of all norms; a subclass registers itself under ``name``."""

    registry: ClassVar[Registry[Callable[[int], Norm]]] = Registry("norm")

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Norm.registry[name] = cls


class LayerNorm(Norm, name="layernorm"):
    r""":math:`\gamma \odot (x - \mu)/\sqrt{\sigma^2 + \epsilon} + \beta`, start
    :math:`\gamma = 1, \beta = 0`.

    Ba et al. 2016, Section 3 (arXiv 1607.06450).
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(Norm, name="rmsnorm"):
    r""":math:`g_i x_i / \sqrt{\mathrm{mean}(x^2) + \epsilon}`, start :math:`g = 1`.

    Zhang and Sennrich 2019, Section 4 (arXiv 1910.07467).
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class ScaleNorm(Norm, name="scalenorm"):
    r""":math:`g \, x / \|x\|_2`, one scalar :math:`g` (shape `[1]`), start :math:`\sqrt{d}`.

    :math:`\|x\|` is kept above 1e-5. Nguyen and Salazar 2019, Section 3.2 (arXiv 1910.05895).
    """

    def __init__(self, dim: int, min_norm: float = 1e-5) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.full((1,), dim**0.5))
        self.min_norm = min_norm

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.g / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=self.min_norm))

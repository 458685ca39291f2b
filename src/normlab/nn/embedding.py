"""Token embeddings, tied three ways (source, target, output), and positions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Registry


class Embedding(nn.Module, ABC):
    r"""One matrix `[V, D]` used at the input, scaled by :math:`\sqrt{d}`, and at the output, unscaled.

    Press and Wolf 2017 (arXiv 1608.05859); Vaswani et al. 2017, Section 3.4 (arXiv 1706.03762).
    """

    registry: ClassVar[Registry[Callable[[int, int], Embedding]]] = Registry("embedding")

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Embedding.registry[name] = cls

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    @abstractmethod
    def vectors(self) -> Tensor:
        """The matrix as it is used, `[V, D]`."""

    @abstractmethod
    def start_(self, generator: torch.Generator) -> None:
        """Draw the starting weights."""

    def forward(self, ids: Tensor) -> Tensor:
        """`[B, T]` to `[B, T, D]`."""
        return F.embedding(ids, self.vectors()) * self.weight.shape[1] ** 0.5

    def logits(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., V]`."""
        return F.linear(x, self.vectors())


class PlainEmbedding(Embedding, name="plain"):
    """Vectors as they are, start N(0, 1/d).

    Nguyen and Salazar 2019, Section 3 (arXiv 1910.05895).
    """

    def vectors(self) -> Tensor:
        return self.weight

    @torch.no_grad()
    def start_(self, generator: torch.Generator) -> None:
        self.weight.normal_(0.0, self.weight.shape[1] ** -0.5, generator=generator)


class FixNormEmbedding(Embedding, name="fixnorm"):
    r"""FixNorm: :math:`w / \|w\|` at every use, start U(-0.01, 0.01).

    Nguyen and Salazar 2019, Section 3.2 (arXiv 1910.05895), after Nguyen and Chiang 2018.
    """

    def vectors(self) -> Tensor:
        return F.normalize(self.weight, dim=-1)

    @torch.no_grad()
    def start_(self, generator: torch.Generator) -> None:
        self.weight.uniform_(-0.01, 0.01, generator=generator)


def sinusoids(length: int, dim: int) -> Tensor:
    r"""Positions `[length, D]`: :math:`\sin(t / 10000^{2i/d})` at 2i, :math:`\cos` of the same at 2i + 1.

    Vaswani et al. 2017, Section 3.5 (arXiv 1706.03762).
    """
    if dim % 2:
        raise ValueError(f"sinusoidal positions need an even width, got {dim}; try {dim + 1}")
    rates = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(10000.0) / dim))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()

"""Token embeddings: one matrix for source, target and output, or a separate output matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.nn.kernels.linear import linear
from normlab.nn.registry import Registered, Registry


class Embedding(Registered, nn.Module, ABC):
    r"""One matrix `[V, D]` used at the input, scaled by :math:`\sqrt{d}`, and at the output, unscaled.

    Press and Wolf 2017 (arXiv 1608.05859); Vaswani et al. 2017, Section 3.4 (arXiv 1706.03762).
    """

    registry: ClassVar[Registry[type[Embedding]]] = Registry("embedding")
    tied: ClassVar[bool] = True
    """Whether the output uses the input's matrix."""
    parameter_roles: ClassVar[str | Mapping[str, str]] = "embedding"
    """See ``nn.roles``."""
    scale_free: ClassVar[bool] = False
    """Whether the scale of the weights has no effect."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def vectors(self) -> Tensor:
        """Return the matrix as it is used, `[V, D]`."""
        return self.weight

    @abstractmethod
    def init_(self, generator: torch.Generator, *, gain: float = 1.0, classifier_gain: float = 1.0) -> None:
        """Draw the initial weights, scaled by ``gain``; a separate output matrix by ``classifier_gain``."""

    def forward(self, ids: Tensor) -> Tensor:
        """Embed token ids `[B, T]` as `[B, T, D]`."""
        return F.embedding(ids, self.vectors()) * self.weight.shape[1] ** 0.5

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits `[..., V]` of hidden states `[..., D]`."""
        return linear(x, self.vectors())


class PlainEmbedding(Embedding, name="plain"):
    """Vectors without normalisation, initially N(0, 1/d).

    Nguyen and Salazar 2019, Section 3.2 (arXiv 1910.05895).
    """

    @torch.no_grad()
    def init_(self, generator: torch.Generator, *, gain: float = 1.0, classifier_gain: float = 1.0) -> None:
        self.weight.normal_(0.0, gain * self.weight.shape[1] ** -0.5, generator=generator)


class UntiedEmbedding(Embedding, name="untied"):
    """Separate matrices for input and output, both initially N(0, 1/d).

    Vaswani et al. 2017, Section 3.4 (arXiv 1706.03762), without its tying.
    """

    tied: ClassVar[bool] = False
    parameter_roles: ClassVar[str | Mapping[str, str]] = {"weight": "embedding", "output": "head"}

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim)
        self.output = nn.Parameter(torch.empty(vocab_size, dim))

    @torch.no_grad()
    def init_(self, generator: torch.Generator, *, gain: float = 1.0, classifier_gain: float = 1.0) -> None:
        for weight, factor in ((self.weight, gain), (self.output, classifier_gain)):
            weight.normal_(0.0, factor * weight.shape[1] ** -0.5, generator=generator)

    def logits(self, x: Tensor) -> Tensor:
        return linear(x, self.output)


class FixNormEmbedding(Embedding, name="fixnorm"):
    r"""FixNorm: :math:`w / \|w\|` at every use, initially U(-0.01, 0.01).

    Nguyen and Salazar 2019, Sections 2.3 and 3.2 (arXiv 1910.05895), after Nguyen and Chiang 2018.
    """

    scale_free: ClassVar[bool] = True
    plain: ClassVar[str] = "plain"

    def vectors(self) -> Tensor:
        return F.normalize(self.weight, dim=-1)

    @torch.no_grad()
    def fold(self) -> Embedding:
        """Return the equal plain embedding, whose matrix is normalised once."""
        embedding = PlainEmbedding(*self.weight.shape)
        embedding.weight = nn.Parameter(self.vectors())
        return embedding

    @torch.no_grad()
    def init_(self, generator: torch.Generator, *, gain: float = 1.0, classifier_gain: float = 1.0) -> None:
        self.weight.uniform_(-0.01 * gain, 0.01 * gain, generator=generator)

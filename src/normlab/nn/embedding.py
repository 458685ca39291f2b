"""Token embeddings: one matrix for source, target and output, or a separate output matrix."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.model_config import ModelConfig
from normlab.base.registry import Registered, Registry
from normlab.nn.kernels.linear import linear

EMBEDDING_SCALES: Registry[Callable[[int], float]] = Registry("embedding scale")
"""The factor on the input embeddings, given the width of the stream."""


@EMBEDDING_SCALES.register("embedscale")
def root_of_width(dim: int) -> float:
    r""":math:`\sqrt{d}\, E_t` at the input.

    Vaswani et al. 2017, Section 3.4 (arXiv 1706.03762).
    """
    return dim**0.5


@EMBEDDING_SCALES.register("noembedscale")
def unscaled(dim: int) -> float:
    """:math:`E_t` at the input, without a factor.

    Press and Wolf 2017, Section 3 (arXiv 1608.05859); as in the code of GPT-2 and Llama.
    """
    return 1.0


class Embedding(Registered, nn.Module, ABC):
    r"""One matrix `[V, D]` used at the input, times ``scale``, which is :math:`\sqrt{d}` unless the model
    has its own, and at the output, unscaled.

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
        self.scale = dim**0.5

    def tables(self) -> dict[str, nn.Parameter]:
        """Return the trained matrices by name: embedding, and unembedding if the output has its own."""
        return {"embedding": self.weight}

    def vectors(self) -> Tensor:
        """Return the matrix as it is used, `[V, D]`."""
        return self.weight

    @torch.no_grad()
    def init_(self, generator: torch.Generator, *, gain: float = 1.0, classifier_gain: float = 1.0) -> None:
        """Draw the initial weights, scaled by ``gain``; a separate output matrix by ``classifier_gain``."""
        gains = {"embedding": gain, "unembedding": classifier_gain}
        for name, table in self.tables().items():
            table.normal_(0.0, gains[name] * table.shape[1] ** -0.5, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed token ids `[B, T]` as `[B, T, D]`."""
        x = F.embedding(ids, self.vectors())
        return x if self.scale == 1 else x * self.scale

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits `[..., V]` of hidden states `[..., D]`."""
        return linear(x, self.vectors())


class LogitMap(Registered, nn.Module, ABC):
    """A map applied to the logits `[..., V]` before anything reads them."""

    registry: ClassVar[Registry[Callable[[ModelConfig, int], LogitMap]]] = Registry("logits")

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()

    def forward(self, z: Tensor) -> Tensor:
        return z


class RawLogits(LogitMap, name="rawlogits"):
    """:math:`z`, as the output matrix gives them.

    Vaswani et al. 2017, Section 3.4 (arXiv 1706.03762).
    """


class SoftCap(LogitMap, name="softcap"):
    r""":math:`c \tanh(z/c)`, with c the model's ``logit_cap``.

    Gemma Team 2024, Section 2 (arXiv 2408.00118).
    """

    options: ClassVar[tuple[str, ...]] = ("logit_cap",)

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.cap = config.logit_cap

    def forward(self, z: Tensor) -> Tensor:
        return self.cap * torch.tanh(z / self.cap)


class ScaledLogits(LogitMap, name="logitscale"):
    r""":math:`s \odot z` with trained s for each vocabulary entry (shape `[V]`), initially 1.

    s is stored as :math:`1/\sqrt{d}` and multiplied by :math:`\sqrt{d}`. Loshchilov et al. 2024, Section 2.1
    (arXiv 2410.01131).
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.root = config.dim**0.5
        self.s = nn.Parameter(torch.full((vocab_size,), 1 / self.root))

    def forward(self, z: Tensor) -> Tensor:
        return z * (self.s * self.root)


class PlainEmbedding(Embedding, name="plain"):
    """Vectors without normalisation, initially N(0, 1/d).

    Nguyen and Salazar 2019, Section 3.2 (arXiv 1910.05895).
    """


class UntiedEmbedding(Embedding, name="untied"):
    """Separate matrices for input and output, both initially N(0, 1/d).

    Vaswani et al. 2017, Section 3.4 (arXiv 1706.03762), without tying them.
    """

    tied: ClassVar[bool] = False
    parameter_roles: ClassVar[str | Mapping[str, str]] = {"weight": "embedding", "output": "head"}

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim)
        self.output = nn.Parameter(torch.empty(vocab_size, dim))

    def tables(self) -> dict[str, nn.Parameter]:
        return {"embedding": self.weight, "unembedding": self.output}

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
        """Return the equivalent plain embedding, whose matrix is normalised once."""
        embedding = PlainEmbedding(*self.weight.shape)
        embedding.weight, embedding.scale = nn.Parameter(self.vectors()), self.scale
        return embedding

    @torch.no_grad()
    def init_(self, generator: torch.Generator, *, gain: float = 1.0, classifier_gain: float = 1.0) -> None:
        self.weight.uniform_(-0.01 * gain, 0.01 * gain, generator=generator)


def build_embedding(kind: type[Embedding], config: ModelConfig, vocab_size: int) -> Embedding:
    """Build an embedding with the scale of the config."""
    embedding = kind(vocab_size, config.dim)
    embedding.scale = EMBEDDING_SCALES[config.embedding_scale](config.dim)
    return embedding

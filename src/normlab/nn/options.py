"""Choices inside a branch: biases of its weights, norms of queries and keys, gains of heads, activation.

Each has a registry of small definitions. A placement names those of its source; a model may choose others.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.config.model import ModelConfig
from normlab.nn.kernels.fused import scaled_to
from normlab.nn.kernels.linear import Linear, linear
from normlab.nn.norm import Norm
from normlab.nn.registry import Registered, Registry

Packed = Callable[[int, Sequence[int]], nn.Linear]
"""``linear(in, (out, …))`` with one packed weight `[sum of outs, in]` for one or several matrices."""

BIASES: Registry[Packed] = Registry("bias")
INNER_NORMS: Registry[Callable[[str], bool]] = Registry("inner norm")
"""Whether a branch has a norm before its last matrix, given its role."""
HEAD_GAINS: Registry[Callable[[int], nn.Module]] = Registry("head gain")
"""The module that scales the heads `[B, H, T, w]`, given their number."""


@BIASES.register("bias")
def vector_bias(n_in: int, n_out: Sequence[int]) -> nn.Linear:
    """:math:`W x + b` with a vector b, initially 0.

    Vaswani et al. 2017, Section 3.3 (arXiv 1706.03762).
    """
    return Linear(n_in, sum(n_out))


@BIASES.register("nobias")
def no_bias(n_in: int, n_out: Sequence[int]) -> nn.Linear:
    """:math:`W x`, no bias in any branch.

    Touvron et al. 2023, Section 2.2 (arXiv 2302.13971).
    """
    return Linear(n_in, sum(n_out), bias=False)


@BIASES.register("scalarbias")
class ScalarBiasLinear(nn.Linear):
    r""":math:`W (x + b_1) + b_2` with two scalars for each matrix, initially 0.

    ``before`` and ``after`` have shape `[matrices]`. Zhang et al. 2019, Section 3 (arXiv 1901.09321).
    """

    plain: ClassVar[str] = "bias"
    parameter_roles: ClassVar[Mapping[str, str]] = {"weight": "hidden", "before": "bias", "after": "bias"}

    def __init__(self, n_in: int, n_out: Sequence[int]) -> None:
        super().__init__(n_in, sum(n_out), bias=False)
        self.n_out = tuple(n_out)
        self.before = nn.Parameter(torch.zeros(len(self.n_out)))
        self.after = nn.Parameter(torch.zeros(len(self.n_out)))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.Linear's argument
        return linear(input, self.weight, self.biases())

    def biases(self) -> Tensor:
        """Return the equal bias vector of the packed matrices, `[sum of outs]`."""
        weights = enumerate(self.weight.split(self.n_out))
        return torch.cat([w.sum(1) * self.before[i] + self.after[i] for i, w in weights])

    @torch.no_grad()
    def fold(self) -> nn.Linear:
        """Return the equal map with a bias vector."""
        plain = Linear(self.in_features, self.out_features)
        plain.weight, plain.bias = self.weight, nn.Parameter(self.biases())
        return plain


@INNER_NORMS.register("noinnernorm")
def nowhere(role: str) -> bool:
    """No norm inside a branch.

    Vaswani et al. 2017, Section 3 (arXiv 1706.03762).
    """
    return False


@INNER_NORMS.register("innernorm")
def except_in_cross_attention(role: str) -> bool:
    r""":math:`W_{out} \mathrm{LN}(\phi(W_{in} x))` except in cross-attention; in self-attention before the
    output matrix, over all heads.

    Wang et al. 2022, Section 3.1 (arXiv 2210.06423).
    """
    return role != "cross_attention"


@INNER_NORMS.register("ffn_innernorm")
def in_feed_forward(role: str) -> bool:
    r""":math:`W_{out} \mathrm{LN}(\phi(W_{in} x))` in the feed-forward only.

    Shleifer et al. 2021, Section 2 (arXiv 2110.09456).
    """
    return role == "ffn"


@HEAD_GAINS.register("noheadgain")
class NoHeadGain(nn.Identity):
    """Heads without gains.

    Vaswani et al. 2017, Section 3.2 (arXiv 1706.03762).
    """


@HEAD_GAINS.register("headgain")
class HeadGain(nn.Module):
    r""":math:`\gamma_h \, \mathrm{head}_h` with a trained gain for each head (shape `[H]`), initially 1.

    Shleifer et al. 2021, Section 2 (arXiv 2110.09456). The gains stand before the output matrix, as in the
    paper; fairseq multiplies slices of the output behind that matrix instead.
    """

    plain: ClassVar[str] = "noheadgain"

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(heads))

    def forward(self, y: Tensor) -> Tensor:
        return y * self.gain[:, None, None]


class QueryKeyNorm(Registered, nn.Module, ABC):
    """A transformation of queries `[B, H, T, w]` and keys `[B, G, S, w]` before their products."""

    registry: ClassVar[Registry[Callable[[ModelConfig], QueryKeyNorm]]] = Registry("query-key norm")
    parameter_roles: ClassVar[str] = "norm"
    scale: ClassVar[float | None] = None
    """Factor on the products; None stands for :math:`1/\\sqrt{w}`."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Transform both, without changing their shapes."""
        return self.queries(q), self.keys(k)

    def queries(self, q: Tensor) -> Tensor:
        """Transform queries `[B, H, T, w]` for products with keys that went through ``keys``."""
        return q

    def keys(self, k: Tensor) -> Tensor:
        """Transform keys `[B, G, S, w]`."""
        return k


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
        norm, width = Norm.registry[config.norm], config.dim // config.heads
        self.query, self.key = norm(config.dim), norm(width * (config.kv_heads or config.heads))

    def queries(self, q: Tensor) -> Tensor:
        return over_heads(self.query, q)

    def keys(self, k: Tensor) -> Tensor:
        return over_heads(self.key, k)


def over_heads(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a norm to the concatenated heads of x `[B, H, T, w]`."""
    return norm(x.transpose(1, 2).flatten(2)).unflatten(2, (x.shape[1], -1)).transpose(1, 2)


class Activation(Registered, nn.Module, ABC):
    """The function between the matrices of a feed-forward branch."""

    registry: ClassVar[Registry[Callable[[], Activation]]] = Registry("activation")
    matrices: ClassVar[tuple[str, ...]] = ("ffn_in",)
    """Names of the matrices in the packed inner projection, `[D_ff, D]` each."""


class ReLU(Activation, name="relu"):
    r""":math:`\max(0, x)`.

    Vaswani et al. 2017, Section 3.3 (arXiv 1706.03762).
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class GELU(Activation, name="gelu"):
    r""":math:`x \, \Phi(x)` with the normal distribution function.

    Hendrycks and Gimpel 2016, Section 2 (arXiv 1606.08415).
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class SwiGLU(Activation, name="swiglu"):
    r""":math:`\mathrm{silu}(W_g x) \odot W_{in} x`, with a third matrix of the same inner width.

    Shazeer 2020, Section 2 (arXiv 2002.05202), where the inner width is 2/3 of that of an ungated branch, for
    an equal number of parameters.
    """

    matrices: ClassVar[tuple[str, ...]] = ("ffn_in", "ffn_gate")

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = x.chunk(2, -1)
        return F.silu(gate) * inner


def inner_norm(config: ModelConfig, role: str, width: int) -> nn.Module:
    """Build the norm before the last matrix of a branch, or an identity where the config has none there."""
    return Norm.registry[config.norm](width) if INNER_NORMS[config.inner_norm](role) else nn.Identity()

"""Choices inside a branch: biases of its weights, inner norms, gains and gates of heads, values of earlier
layers and the activation; ``query_key`` has the norms of queries and keys.

Each has a registry of small definitions. A placement names those of its source; a model may choose others.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.model_config import ModelConfig
from normlab.base.registry import Registered, Registry
from normlab.nn.kernels.linear import Linear, linear
from normlab.nn.norm import Norm

Packed = Callable[[int, Sequence[int]], nn.Linear]
"""``linear(in, (out, …))`` with one packed weight `[sum of outs, in]` for one or several matrices."""

BIASES: Registry[Packed] = Registry("bias")
INNER_NORMS: Registry[Callable[[str], bool]] = Registry("inner norm")
"""Whether a branch has a norm before its last matrix, given its role."""
HEAD_GAINS: Registry[Callable[[int], nn.Module]] = Registry("head gain")
"""The module that scales the heads `[B, H, T, w]`, given their number."""

GATES: Registry[Callable[[int], int]] = Registry("attention gate")
"""The number of gates of each head, given its width."""


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
        """Return the equivalent bias vector of the packed matrices, `[sum of outs]`."""
        weights = enumerate(self.weight.split(self.n_out))
        return torch.cat([w.sum(1) * self.before[i] + self.after[i] for i, w in weights])

    @torch.no_grad()
    def fold(self) -> nn.Linear:
        """Return the equivalent map with a bias vector."""
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

    Shleifer et al. 2021, Section 2 (arXiv 2110.09456). The gains come before the output matrix, as in the
    paper; fairseq multiplies slices of the output after that matrix instead.
    """

    plain: ClassVar[str] = "noheadgain"

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(heads))

    def forward(self, y: Tensor) -> Tensor:
        return y * self.gain[:, None, None]


@GATES.register("ungated")
def without_gates(width: int) -> int:
    """Heads without gates.

    Vaswani et al. 2017, Section 3.2 (arXiv 1706.03762).
    """
    return 0


@GATES.register("headgate")
def gate_of_head(width: int) -> int:
    r""":math:`\sigma(w_h x) \, \mathrm{head}_h` with one gate for each head and position, which reads what
    the queries read.

    Qiu et al. 2025, Section 3 (arXiv 2505.06708), headwise. The gates' rows start like those of the queries,
    so a gate is near 1/2 at first.
    """
    return 1


@GATES.register("elementgate")
def gates_of_elements(width: int) -> int:
    r""":math:`\sigma(W_h x) \odot \mathrm{head}_h` with a gate for each element of a head, which reads what
    the queries read.

    Qiu et al. 2025, Section 3 (arXiv 2505.06708), elementwise. The gates' rows start like those of the
    queries, so a gate is near 1/2 at first.
    """
    return width


class ValueResidual(Registered, nn.Module, ABC):
    """What a self-attention uses as its values, given those of the stack's first layer."""

    registry: ClassVar[Registry[Callable[[], ValueResidual]]] = Registry("value residual")
    reads_first: ClassVar[bool] = True

    def forward(self, own: Tensor, first: Tensor) -> Tensor:
        """Mix the values of a layer and of the first, `[B, G, T, w]` each; in the first layer they agree."""
        return own


class OwnValues(ValueResidual, name="novalueresidual"):
    r""":math:`W_V x`, each layer's own values.

    Vaswani et al. 2017, Section 3.2 (arXiv 1706.03762).
    """

    reads_first: ClassVar[bool] = False


class MeanWithFirst(ValueResidual, name="valueresidual"):
    r"""Value residual: :math:`v_l \leftarrow \frac{1}{2} v_1 + \frac{1}{2} v_l` in every self-attention of a
    stack but the first.

    Zhou et al. 2024, Section 3 (arXiv 2410.17897), with the weights of the authors' code.
    """

    def forward(self, own: Tensor, first: Tensor) -> Tensor:
        return 0.5 * (first + own)


class Activation(Registered, nn.Module, ABC):
    """The function between the matrices of a feed-forward branch."""

    registry: ClassVar[Registry[type[Activation]]] = Registry("activation")
    matrices: ClassVar[tuple[str, ...]] = ("ffn_in",)
    """Names of the matrices in the packed inner projection, `[D_ff, D]` each."""

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """Build the activation of a model."""
        return cls()


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


class TanhGELU(Activation, name="gelu_tanh"):
    r""":math:`\frac{x}{2} \left(1 + \tanh\left(\sqrt{2/\pi} \, (x + 0.044715 \, x^3)\right)\right)`, close to
    GELU.

    Hendrycks and Gimpel 2016, Section 2 (arXiv 1606.08415); GPT-2's activation, ``gelu_new`` elsewhere.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class SquaredReLU(Activation, name="relu2"):
    r""":math:`\max(0, x)^2`.

    So et al. 2021, Section 4.1 (arXiv 2109.08668).
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


class _Gated(Activation, ABC):
    """An activation of one matrix times the output of another, of the same inner width."""

    matrices: ClassVar[tuple[str, ...]] = ("ffn_in", "ffn_gate")


class GatedTanhGELU(_Gated, name="geglu"):
    r""":math:`\mathrm{gelu}(W_g x) \odot W_{in} x`, with a third matrix of the same inner width.

    Shazeer 2020, Section 2 (arXiv 2002.05202), with the tanh form of GELU, as in Gemma.
    """

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * inner


class ScaledSwiGLU(_Gated, name="ngptswiglu"):
    r"""nGPT's SwiGLU: :math:`u \odot \mathrm{silu}(v)` with
    :math:`[u, v] = \sqrt{d} \, s \odot [W_{in} x, W_g x]`, trained s (shape `[2 D_ff]`), initially 1.

    Loshchilov et al. 2024, Section 2.4 (arXiv 2410.01131). In the authors' code the second half of s and its
    matrix are the ones inside silu, as here.
    """

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.s, self.root = nn.Parameter(torch.ones(2 * ffn_dim)), dim**0.5

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        return cls(config.dim, config.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = (x * (self.s * self.root)).chunk(2, -1)
        return F.silu(gate) * inner


class SwiGLU(_Gated, name="swiglu"):
    r""":math:`\mathrm{silu}(W_g x) \odot W_{in} x`, with a third matrix of the same inner width.

    Shazeer 2020, Section 2 (arXiv 2002.05202), where the inner width is 2/3 of an ungated branch's, which
    keeps the number of parameters equal.
    """

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = x.chunk(2, -1)
        return F.silu(gate) * inner


def inner_norm(config: ModelConfig, role: str, width: int) -> nn.Module:
    """Build the norm before the last matrix of a branch, or an identity if the config has none there."""
    return Norm.registry[config.norm](width) if INNER_NORMS[config.inner_norm](role) else nn.Identity()

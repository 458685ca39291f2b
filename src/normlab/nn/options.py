"""Choices inside a branch: biases of its weights, norms of queries and keys, gains and gates of heads, values
of earlier layers, activation.

Each has a registry of small definitions. A placement names those of its source; a model may choose others.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.config.model import ModelConfig
from normlab.nn.kernels.fused import scaled_to
from normlab.nn.kernels.linear import Linear, linear
from normlab.nn.norm import Norm, RMSNormWithoutGain
from normlab.nn.registry import Registered, Registry

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

    Qiu et al. 2025, Section 3 (arXiv 2505.06708), headwise. The gates' rows start as those of the queries do,
    so that a gate is near 1/2 at first.
    """
    return 1


@GATES.register("elementgate")
def gates_of_elements(width: int) -> int:
    r""":math:`\sigma(W_h x) \odot \mathrm{head}_h` with a gate for each element of a head, which reads what
    the queries read.

    Qiu et al. 2025, Section 3 (arXiv 2505.06708), elementwise. The gates' rows start as those of the queries
    do, so that a gate is near 1/2 at first.
    """
    return width


class ValueResidual(Registered, nn.Module, ABC):
    """What a self-attention takes for its values, given those of the stack's first layer."""

    registry: ClassVar[Registry[Callable[[], ValueResidual]]] = Registry("value residual")
    reads_first: ClassVar[bool] = True

    def forward(self, own: Tensor, first: Tensor) -> Tensor:
        """Mix the values of a layer and of the first one, `[B, G, T, w]` each; the first has them alike."""
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


class QueryKeyNorm(Registered, nn.Module, ABC):
    """A transformation of queries `[B, H, T, w]` and keys `[B, G, S, w]` before their products, and of values
    if its source has one.
    """

    registry: ClassVar[Registry[Callable[[ModelConfig], QueryKeyNorm]]] = Registry("query-key norm")
    parameter_roles: ClassVar[str] = "norm"
    scale: ClassVar[float | None] = None
    """Factor on the products; None stands for :math:`1/\\sqrt{w}`."""
    after_rotation: ClassVar[bool] = False
    """Whether it stands behind the rotation of rope, and not before it."""

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
        return over_heads(self.query, q)

    def keys(self, k: Tensor) -> Tensor:
        return over_heads(self.key, k)


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
    head, without a gain and behind the rotation of rope.

    nanochat's code, where queries and keys are multiplied by 1.2 each, after Dehghani et al. 2023,
    Section 3.1 (arXiv 2302.05442).
    """

    after_rotation: ClassVar[bool] = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNormWithoutGain(config.head_width)

    def queries(self, q: Tensor) -> Tensor:
        return 1.2 * self.norm(q)

    def keys(self, k: Tensor) -> Tensor:
        return 1.2 * self.norm(k)


class ScaledUnitHeads(QueryKeyNorm, name="ngptnormed"):
    r"""nGPT's :math:`\sqrt{w} \, (s \odot \hat{q}) \cdot (s \odot \hat{k})` with
    :math:`\hat{q} = q / \|q\|_2` over each head behind rope, and trained s for each channel (shape `[H w]`),
    initially 1.

    s is stored as :math:`1/\sqrt{d}` and multiplied by :math:`\sqrt{d}`. Loshchilov et al. 2024, Section 2.3
    (arXiv 2410.01131). Keys that several heads share take the s of the first of these.
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


def over_heads(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a norm to the concatenated heads of x `[B, H, T, w]`."""
    return norm(x.transpose(1, 2).flatten(2)).unflatten(2, (x.shape[1], -1)).transpose(1, 2)


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


class GatedTanhGELU(Activation, name="geglu"):
    r""":math:`\mathrm{gelu}(W_g x) \odot W_{in} x`, with a third matrix of the same inner width.

    Shazeer 2020, Section 2 (arXiv 2002.05202), with the tanh form of GELU, as in Gemma.
    """

    matrices: ClassVar[tuple[str, ...]] = ("ffn_in", "ffn_gate")

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * inner


class ScaledSwiGLU(Activation, name="ngptswiglu"):
    r"""nGPT's SwiGLU: :math:`u \odot \mathrm{silu}(v)` with
    :math:`[u, v] = \sqrt{d} \, s \odot [W_{in} x, W_g x]`, trained s (shape `[2 D_ff]`), initially 1.

    Loshchilov et al. 2024, Section 2.4 (arXiv 2410.01131). In the authors' code the second half of s and its
    matrix are those inside silu, as here.
    """

    matrices: ClassVar[tuple[str, ...]] = ("ffn_in", "ffn_gate")

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.s, self.root = nn.Parameter(torch.ones(2 * ffn_dim)), dim**0.5

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        return cls(config.dim, config.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = (x * (self.s * self.root)).chunk(2, -1)
        return F.silu(gate) * inner


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

"""Placements that differ in the position of their norms."""

from __future__ import annotations

import math
from abc import ABC
from typing import ClassVar

from torch import Tensor, nn

from normlab.base.model_config import ModelConfig
from normlab.nn.options import INNER_NORMS
from normlab.nn.placement.base import INSIDE, XAVIER, Placement, Plain, Stream
from normlab.nn.site import Site

NORMED_BRANCH = "the norm behind a branch divides by a statistic of each token, which no weights can hold"


class OneNorm(Placement, ABC):
    """A placement with one norm per sublayer."""

    def build(self, site: Site) -> None:
        self.norm = site.norm(site.dim)


class NormedInput(OneNorm, ABC):
    """A placement whose branch reads the normalised stream, while the stream itself is a plain sum."""

    final_norm: ClassVar[bool] = True
    sums: ClassVar[bool] = True

    def read(self, stream: Stream) -> Tensor:
        return self.norm(stream)

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return stream + y


class _TwoNorms(Placement, ABC):
    """A placement with a norm before the branch and one after it."""

    def build(self, site: Site) -> None:
        self.norm_in, self.norm_out = site.norm(site.dim), site.norm(site.dim)

    def read(self, stream: Stream) -> Tensor:
        return self.norm_in(stream)


class TwoStreams(Placement, ABC):
    """A stream of two tensors that both begin as the embeddings; by default the branch reads the first."""

    no_fold: ClassVar[str] = "its stream has two tensors, and no plainer stream holds both"

    def read(self, stream: Stream) -> Tensor:
        return stream[0]

    @classmethod
    def begin(cls, site: Site) -> nn.Module:
        return _Twice()


class PostNorm(OneNorm, name="post"):
    r"""Post-LN: :math:`x \leftarrow \mathrm{LN}(x + f(x))`.

    Vaswani et al. 2017, Section 3.1 (arXiv 1706.03762).
    """

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self.norm(stream + y)

    def fold(self) -> Plain:
        return Plain("post", norm=self.norm)


class PreNorm(NormedInput, name="pre"):
    r"""Pre-LN: :math:`x \leftarrow x + f(\mathrm{LN}(x))`, and a final norm.

    Xiong et al. 2020, Table 1 (arXiv 2002.04745).
    """

    def fold(self) -> Plain:
        return Plain("pre")


class SandwichNorm(_TwoNorms, name="sandwich"):
    r"""Sandwich-LN: :math:`x \leftarrow x + \mathrm{LN}(f(\mathrm{LN}(x)))`, and a final norm.

    Ding et al. 2021, Section 2.4 (arXiv 2105.13290).
    """

    final_norm: ClassVar[bool] = True
    no_fold: ClassVar[str] = NORMED_BRANCH

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return stream + self.norm_out(y)


class PeriNorm(SandwichNorm, name="periln"):
    r"""Peri-LN: :math:`x \leftarrow x + \mathrm{LN}(f(\mathrm{LN}(x)))`, a norm on the embeddings and a
    final norm.

    Kim et al. 2025, Section 3 (arXiv 2502.02732).
    """

    @classmethod
    def begin(cls, site: Site) -> nn.Module:
        return site.norm(site.dim)


class OLMo2Norm(OneNorm, name="olmo2"):
    r"""OLMo 2's order: :math:`x \leftarrow x + \mathrm{LN}(f(x))`, a final norm, and the model's norm on
    queries and keys.

    OLMo et al. 2025, Section 2.1 (arXiv 2501.00656).
    """

    final_norm: ClassVar[bool] = True
    no_fold: ClassVar[str] = NORMED_BRANCH
    qk_norm: ClassVar[str] = "normed"

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return stream + self.norm(y)


class SubNorm(NormedInput, name="subln"):
    r"""Sub-LN: :math:`x \leftarrow x + W_{out} \mathrm{LN}(\phi(W_{in} \mathrm{LN}(x)))`, and a final norm.

    In self-attention the inner norm comes before the output matrix; cross-attention has neither inner norm
    nor gain. Gain on the value, output and feed-forward matrices of the other branches:
    :math:`\sqrt{\ln 3M \cdot \ln 2N / 3}` in the encoder and :math:`\sqrt{\ln 3M}` in the decoder of an
    encoder-decoder, :math:`\sqrt{\ln 2L}` in a single stack. Wang et al. 2022, Section 3 (arXiv 2210.06423).
    """

    inner_norm: ClassVar[str] = "innernorm"

    @classmethod
    def gain(cls, site: Site, matrix: str) -> float:
        if matrix in INSIDE or not INNER_NORMS[cls.inner_norm](site.role):
            return 1.0
        if site.alone:
            return math.log(2 * site.layers) ** 0.5
        decoder = math.log(3 * site.decoder_layers)
        if site.stack == "encoder":
            return (decoder * math.log(2 * site.encoder_layers) / 3) ** 0.5
        return decoder**0.5

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        if config.is_hybrid:
            return "Sub-LN's gains are derived for an encoder and a decoder that both use it"
        if config.scheme not in XAVIER:
            return f"Sub-LN's gains are on Xavier initialisation; with {config.scheme} they are not defined"
        return None

    def fold(self) -> Plain:
        return Plain("pre")


class NormFormer(NormedInput, name="normformer"):
    r"""NormFormer: :math:`x \leftarrow x + \mathrm{LN}(f(\mathrm{LN}(x)))` for attention,
    :math:`x + f(\mathrm{LN}(x))` for the feed-forward, and a final norm.

    Each head has a gain, initially 1, and the feed-forward a norm after its activation. Shleifer et al. 2021,
    Section 2 (arXiv 2110.09456); ``headgain`` says how fairseq differs.
    """

    sums: ClassVar[bool] = False
    inner_norm: ClassVar[str] = "ffn_innernorm"
    head_gain: ClassVar[str] = "headgain"
    no_fold: ClassVar[str] = NORMED_BRANCH

    def build(self, site: Site) -> None:
        super().build(site)
        attends = site.role.endswith("attention")
        self.norm_out = site.norm(site.dim) if attends else nn.Identity()

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return stream + self.norm_out(y)


class MixNorm(Placement, name="mixln"):
    r"""Mix-LN: Post-LN in the first quarter of the layers, Pre-LN in the others, and a final norm.

    The first quarter is :math:`\lfloor L/4 \rfloor` layers of a stack, at least one. Li et al. 2024,
    Section 3 (arXiv 2412.13795).
    """

    final_norm: ClassVar[bool] = True
    no_fold: ClassVar[str] = "its layers are Post-LN and Pre-LN already, and a plain stack has one of them"
    SHARE: ClassVar[float] = 0.25

    def build(self, site: Site) -> None:
        early = site.layer < max(1, int(self.SHARE * site.layers))
        self.place = PostNorm(site) if early else PreNorm(site)

    def read(self, stream: Stream) -> Tensor:
        return self.place.read(stream)

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self.place.write(stream, y)


class LayerNormScaling(NormedInput, name="lnscale"):
    r"""LayerNorm Scaling: :math:`x \leftarrow x + f(\mathrm{LN}(x)/\sqrt{l})` in layer l, counted from 1, and
    a final norm.

    Sun et al. 2025, Section 4 (arXiv 2502.05795).
    """

    deep: ClassVar[bool] = True

    def build(self, site: Site) -> None:
        super().build(site)
        self.scale = (site.layer + 1) ** -0.5

    def read(self, stream: Stream) -> Tensor:
        return self.norm(stream) * self.scale

    def fold(self) -> Plain:
        return Plain("pre", read=self.scale)


class Keel(_TwoNorms, name="keel"):
    r"""KEEL: :math:`x \leftarrow \mathrm{LN}(S x + f(\mathrm{LN}(x)))` with S sublayers in the stack.

    Chen and Wei 2026, Section 3 (arXiv 2601.19895), where models of more than 1,000 layers train. Their
    Section 3.1 leaves S out of the first layer, the outer norm out of its attention and :math:`\beta` out of
    every norm; here the equation holds in every sublayer.
    """

    deep: ClassVar[bool] = True
    no_fold: ClassVar[str] = (
        "S, the number of sublayers, leaves the stream only if the outer norm has its epsilon divided by the "
        "square of S, or the inner one its own multiplied by it, and a norm's epsilon is a constant"
    )

    def build(self, site: Site) -> None:
        super().build(site)
        self.a = float(site.sublayers)

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self.norm_out(self.a * stream + y)


class B2T(TwoStreams, OneNorm, name="b2t"):
    r"""Bottom-to-top: Post-LN whose last norm of a layer also adds the layer's input,
    :math:`x \leftarrow \mathrm{LN}(x + f(x) + x_{in})`.

    The stream is :math:`(x, x_{in})`. Takase et al. 2022, Section 4 (arXiv 2206.00330), whose text names no
    factor on the initial weights; ``b2t_code`` has the one in the authors' code.
    """

    def build(self, site: Site) -> None:
        super().build(site)
        self.ends_layer = site.ends_layer

    def write(self, stream: Stream, y: Tensor) -> Stream:
        x, layer_input = stream
        if not self.ends_layer:
            return self.norm(x + y), layer_input
        x = self.norm(x + y + layer_input)
        return x, x

    def fold(self) -> Plain:
        return Plain("b2t")

    @classmethod
    def end(cls, site: Site) -> nn.Module:
        return _First()


class B2TAsCoded(B2T, name="b2t_code"):
    r"""Bottom-to-top as its authors' code initialises it:
    :math:`x \leftarrow \mathrm{LN}(x + f(x) + x_{in})` at the end of a layer, and every matrix of a branch
    initially multiplied by :math:`N^{-1/2}` in the encoder and :math:`M^{-1/2}` in the decoder.

    Otherwise as ``b2t``. Takase et al. 2022, the released code of Section 4 (arXiv 2206.00330).
    """

    @classmethod
    def gain(cls, site: Site, matrix: str) -> float:
        return site.layers**-0.5


class ResiDual(TwoStreams, OneNorm, name="residual"):
    r"""ResiDual, two streams: :math:`x \leftarrow \mathrm{LN}(x + f(x)),\; d \leftarrow d + f(x)`.

    Both begin as the embeddings; the stack's output is :math:`x + \mathrm{LN}(d)`.
    Xie et al. 2023, Section 3 (arXiv 2304.14802). In the authors' code the final norm has an
    :math:`\epsilon` of 1e-7; here it is the model's norm, whose own :math:`\epsilon` is 1e-5 in LayerNorm.
    """

    def write(self, stream: Stream, y: Tensor) -> Stream:
        x, d = stream
        return self.norm(x + y), d + y

    @classmethod
    def end(cls, site: Site) -> nn.Module:
        return _SumWithNormedSecond(site.final_norm())


class _Twice(nn.Module):
    """Duplicates x as the stream (x, x)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class _First(nn.Module):
    """Returns the first of two tensors."""

    def forward(self, stream: tuple[Tensor, Tensor]) -> Tensor:
        return stream[0]


class _SumWithNormedSecond(nn.Module):
    """Maps the stream (x, d) to x + LN(d)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, stream: tuple[Tensor, Tensor]) -> Tensor:
        x, d = stream
        return x + self.norm(d)

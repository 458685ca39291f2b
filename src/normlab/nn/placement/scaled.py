"""Placements that scale the stream or the branch."""

from __future__ import annotations

import math
from abc import ABC
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.base.model_config import ModelConfig
from normlab.nn.embedding import Embedding
from normlab.nn.placement.base import INSIDE, XAVIER, Placement, Plain, ProfiledPlacement, Stream
from normlab.nn.placement.normed import NormedInput, OneNorm, PostNorm
from normlab.nn.site import Site


class _WeightedShortcut(OneNorm, ABC):
    r""":math:`x \leftarrow \mathrm{LN}(\omega \odot x + f(x))` with a trained vector :math:`\omega` `[D]`."""

    deep: ClassVar[bool] = True

    def build(self, site: Site) -> None:
        super().build(site)
        self.omega = nn.Parameter(torch.ones(site.dim))

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self.norm(stream * self.omega + y)

    def fold(self) -> Plain:
        return Plain("post", stream=self.omega, norm=self.norm)

    @torch.no_grad()
    def init_(self, variance: float) -> None:
        self.omega.fill_(variance**0.5)


class Admin(_WeightedShortcut, ProfiledPlacement, name="admin"):
    r"""Admin: :math:`x \leftarrow \mathrm{LN}(\omega \odot x + f(x))` with a trained vector :math:`\omega`
    `[D]`.

    Initially, profiled on one batch with :math:`\omega = 1`:
    :math:`\omega_i^2 = \mathrm{Var}[x_0] + \sum_{1 \le j < i} \mathrm{Var}[f_j(x_{j-1})]`.
    Liu et al. 2020, Section 4 (arXiv 2004.08249); taken literally, the published sum leaves out
    :math:`\mathrm{Var}[x_0]` and :math:`\omega_1 = 0` would erase the embeddings.
    """

    @staticmethod
    def first(stream: Tensor) -> Tensor:
        return stream

    @staticmethod
    def carry(carried: Tensor, stream: Tensor, branch: Tensor) -> Tensor:
        return carried + branch


class AdminAsCoded(_WeightedShortcut, ProfiledPlacement, name="admin_code"):
    r"""Admin as its authors' code initialises it: :math:`x \leftarrow \mathrm{LN}(\omega \odot x + f(x))`,
    :math:`\omega_1 = 1,\; \omega_{i+1}^2 = \mathrm{Var}[\omega_i x_{i-1}] + \mathrm{Var}[f_i(x_{i-1})]`.

    One forward pass sets each :math:`\omega_i` just before sublayer i runs. Unlike the code, this leaves
    padding and dropout out of the variances. Liu et al. 2020, the released code of Section 4
    (arXiv 2004.08249).
    """

    in_order: ClassVar[bool] = True

    @staticmethod
    def first(stream: Tensor) -> Tensor:
        return torch.ones_like(stream)

    @staticmethod
    def carry(carried: Tensor, stream: Tensor, branch: Tensor) -> Tensor:
        return carried * stream + branch


class AdminDataFree(_WeightedShortcut, name="admin_free"):
    r"""Admin without data: :math:`x \leftarrow \mathrm{LN}(\omega \odot x + f(x))`,
    initially :math:`\omega^2 = (S+1)/\ln(S+1) - 1` with S sublayers in the stack.

    The initialisation of the authors' later package, after Liu et al. 2020, Section 4 (arXiv 2004.08249).
    """

    def build(self, site: Site) -> None:
        super().build(site)
        self.init_(self.variance(site))

    @staticmethod
    def variance(site: Site) -> float:
        r"""Return the initial :math:`\omega^2` of every sublayer of the stack."""
        terms = site.sublayers + 1
        return terms / math.log(terms) - 1


class AdminRescaled(PostNorm, name="admin_rescaled"):
    r"""Admin with initial weights instead of :math:`\omega`: :math:`x \leftarrow \mathrm{LN}(x + f(x))`, the
    last matrix of every branch initially divided by the :math:`\omega` of ``admin_free``.

    A norm removes the scale of its input, so both begin as the same function. Liu et al. 2020, Appendix C
    (arXiv 2004.08249).
    """

    @classmethod
    def gain(cls, site: Site, matrix: str) -> float:
        return AdminDataFree.variance(site) ** -0.5 if matrix in ("output", "ffn_out") else 1.0


class DeepNorm(OneNorm, name="deepnorm"):
    r"""DeepNorm: :math:`x \leftarrow \mathrm{LN}(\alpha x + f(x))`.

    Xavier gain :math:`\beta` on value, output and feed-forward matrices, 1 on query and key. Encoder of an
    encoder-decoder: :math:`\alpha = 0.81 (N^4 M)^{1/16}, \beta = 0.87 (N^4 M)^{-1/16}`; decoder:
    :math:`\alpha = (3M)^{1/4}, \beta = (12M)^{-1/4}`; a single stack of L layers:
    :math:`\alpha = (2L)^{1/4}, \beta = (8L)^{-1/4}`. Wang et al. 2022, Figure 2 (arXiv 2203.00555).
    """

    deep: ClassVar[bool] = True

    def build(self, site: Site) -> None:
        super().build(site)
        self.alpha, _ = self.constants(site)

    @staticmethod
    def constants(site: Site) -> tuple[float, float]:
        """Return alpha and beta of the stack that the site belongs to."""
        n, m = site.encoder_layers, site.decoder_layers
        if site.alone:
            return (2 * site.layers) ** 0.25, (8 * site.layers) ** -0.25
        if site.stack == "encoder":
            return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
        return (3 * m) ** 0.25, (12 * m) ** -0.25

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self.norm(self.alpha * stream + y)

    def fold(self) -> Plain:
        return Plain("post", stream=self.alpha, norm=self.norm)

    @classmethod
    def gain(cls, site: Site, matrix: str) -> float:
        return 1.0 if matrix in INSIDE else cls.constants(site)[1]

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        if config.is_hybrid:
            return "DeepNorm's alpha and beta are derived for an encoder and a decoder that both use it"
        if config.scheme in XAVIER:
            return None
        return f"DeepNorm's beta is a gain on Xavier initialisation; with {config.scheme} it is not defined"


class _ScaledBranch(Placement, ABC):
    r""":math:`x \leftarrow x + \alpha f(x)` with a trained :math:`\alpha` (shape `[1]`), and no norm."""

    normed: ClassVar[bool] = False
    deep: ClassVar[bool] = True
    initial_alpha: ClassVar[float] = 0.0

    def build(self, site: Site) -> None:
        self.alpha = nn.Parameter(torch.full((1,), self.initial_alpha))

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return stream + self.alpha * y

    def fold(self) -> Plain:
        return Plain("tfixup", branch=self.alpha)


class ReZero(_ScaledBranch, name="rezero"):
    r"""ReZero: :math:`x \leftarrow x + \alpha f(x)`, no norm, initially :math:`\alpha = 0`.

    Each layer has one :math:`\alpha` (shape `[1]`), shared by its sublayers. Bachlechner et al. 2020,
    Equation 1 (arXiv 2003.04887).
    """

    silent: ClassVar[bool] = True

    def build(self, site: Site) -> None:
        self.alpha = _layer_alpha(site)


class ReZeroPostNorm(OneNorm, name="rezero_post"):
    r"""ReZero with Post-LN: :math:`x \leftarrow \mathrm{LN}(x + \alpha f(x))`, initially
    :math:`\alpha = 0`.

    Each layer has one :math:`\alpha` (shape `[1]`), shared by its sublayers. Liu et al. 2020, Table 3
    (arXiv 2004.08249).
    """

    silent: ClassVar[bool] = True

    def build(self, site: Site) -> None:
        super().build(site)
        self.alpha = _layer_alpha(site)

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self.norm(stream + self.alpha * y)

    def fold(self) -> Plain:
        return Plain("post", branch=self.alpha, norm=self.norm)


def _layer_alpha(site: Site) -> nn.Parameter:
    """Return ReZero's scalar of a layer, initially 0."""
    return site.shared.setdefault("rezero.alpha", nn.Parameter(torch.zeros(1)))


class SkipInit(_ScaledBranch, name="skipinit"):
    r"""SkipInit: :math:`x \leftarrow x + \alpha f(x)`, no norm, one :math:`\alpha` per sublayer, initially 0.

    De and Smith 2020, Section 3 (arXiv 2002.10444).
    """

    silent: ClassVar[bool] = True


class FixUp(_ScaledBranch, name="fixup"):
    r"""FixUp: :math:`x \leftarrow x + \alpha f(x)`, no norm, initially :math:`\alpha = 1`, a scalar bias
    before and after each weight.

    In a model of K branches with m weights in series each, the weights of a branch are scaled by
    :math:`K^{-1/(2m-2)}`, except the last one, which is initially 0, as is the classifier. Value and output
    are the m = 2 weights of attention; query and key, inside the softmax, keep the scale of the scheme. Zhang
    et al. 2019, Section 3 (arXiv 1901.09321).
    """

    initial_alpha: ClassVar[float] = 1.0
    bias: ClassVar[str] = "scalarbias"

    @classmethod
    def gain(cls, site: Site, matrix: str) -> float:
        if matrix in INSIDE:
            return 1.0
        return 0.0 if matrix in ("output", "ffn_out") else site.branches**-0.5

    @classmethod
    def classifier_gain(cls, site: Site) -> float:
        return 0.0

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        if config.is_hybrid:
            return "FixUp counts the branches of an encoder and a decoder that both use it"
        if Embedding.registry[config.embedding].tied:
            return "FixUp initialises the classifier with 0, which a tied embedding does not allow"
        return None


class TFixup(Placement, name="tfixup"):
    r"""T-Fixup: :math:`x \leftarrow x + f(x)`, no norm.

    The factor on Xavier for value, output and feed-forward matrices is :math:`0.67 N^{-1/4}` in the encoder
    and :math:`(9M)^{-1/4}` in the decoder, and :math:`1/\sqrt{2}` for query and key; that on the embeddings,
    which both stacks share, is :math:`(9N)^{-1/4}`. A single stack of L layers takes its own formula, with
    its embeddings. Huang et al. 2020, Section 3.2 (ICML 2020), after Zhang et al. 2019, Section 3 (arXiv
    1901.09321). The paper has one depth for both stacks and Xavier for query and key; N in the embeddings and
    :math:`1/\sqrt{2}` are those of the authors' code, which trained its models.
    """

    normed: ClassVar[bool] = False
    deep: ClassVar[bool] = True

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return stream + y

    def fold(self) -> Plain:
        return Plain("tfixup")

    @classmethod
    def gain(cls, site: Site, matrix: str) -> float:
        if matrix in INSIDE:
            return 0.5**0.5
        if site.stack == "encoder":
            return 0.67 * site.layers**-0.25
        return (9 * site.layers) ** -0.25

    @classmethod
    def embedding_gain(cls, site: Site) -> float:
        return cls.gain(site, "embedding") if site.alone else (9 * site.encoder_layers) ** -0.25

    @classmethod
    def conflict(cls, config: ModelConfig) -> str | None:
        if config.is_hybrid:
            return "T-Fixup's factors are derived for an encoder and a decoder that both use it"
        if Embedding.registry[config.embedding].scale_free:
            return f"T-Fixup scales the embeddings, and scaling has no effect on {config.embedding}"
        if config.scheme in XAVIER:
            return None
        return f"T-Fixup's factors are on Xavier initialisation; with {config.scheme} they are not defined"


class LayerScale(NormedInput, name="layerscale"):
    r"""LayerScale: :math:`x \leftarrow x + \lambda \odot f(\mathrm{LN}(x))` with a trained vector
    :math:`\lambda` `[D]`, and a final norm.

    Initially :math:`\lambda` is 0.1 in stacks of up to 18 layers, 1e-5 up to 24, and 1e-6 beyond. Touvron et
    al. 2021, Section 2 (arXiv 2103.17239).
    """

    deep: ClassVar[bool] = True

    def build(self, site: Site) -> None:
        super().build(site)
        if site.layers <= 18:
            initial = 0.1
        elif site.layers <= 24:
            initial = 1e-5
        else:
            initial = 1e-6
        self.lam = nn.Parameter(torch.full((site.dim,), initial))

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return stream + self.lam * y

    def fold(self) -> Plain:
        return Plain("pre", branch=self.lam)

"""Placements of recent language models that are more than a norm before or after the branch."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.nn.kernels.fused import scaled_to
from normlab.nn.placement.base import Placement, Plain, Stream
from normlab.nn.placement.normed import NormedInput, OneNorm, TwoStreams
from normlab.nn.site import Site


class ResidualLambdas(TwoStreams, OneNorm, name="x0lambdas"):
    r"""Pre-LN with x0 and residual lambdas: :math:`x \leftarrow r_l x + \mu_l x_0` before layer l, then
    :math:`x \leftarrow x + f(\mathrm{LN}(x))`, and a final norm.

    The stream is :math:`(x, x_0)`. Initially :math:`r_l` goes from 1.15 in the first layer to 1.05 in the
    last one, and :math:`\mu_l` from 0.2 to 0.05, as in nanochat's code (gpt.py at 92d63d4), where r learns a
    hundredth as fast. Trained factors on the stream are those of Bachlechner et al. 2020, Equation 1
    (arXiv 2003.04887).
    """

    def build(self, site: Site) -> None:
        super().build(site)
        self.begins_layer = site.index % len(site.roles) == 0
        depth = site.layer / max(1, site.layers - 1)  # 0 in the first layer, 1 in the last one
        r = nn.Parameter(torch.full((1,), 1.15 - 0.1 * depth))
        mu = nn.Parameter(torch.full((1,), 0.2 - 0.15 * depth))
        self.r = site.shared.setdefault("x0.r", r)
        self.mu = site.shared.setdefault("x0.mu", mu)

    def _entered(self, stream: Stream) -> Tensor:
        x, first = stream
        return self.r * x + self.mu * first if self.begins_layer else x

    def read(self, stream: Stream) -> Tensor:
        return self.norm(self._entered(stream))

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self._entered(stream) + y, stream[1]

    @classmethod
    def end(cls, site: Site) -> nn.Module:
        return _NormedFirst(site.final_norm())


class _NormedFirst(nn.Module):
    """Maps the stream (x, ...) to LN(x)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, stream: tuple[Tensor, ...]) -> Tensor:
        return self.norm(stream[0])


class GPAS(NormedInput, name="gpas"):
    r"""GPAS on Pre-LN: :math:`x \leftarrow x + f(\mathrm{LN}(x))`, then
    :math:`x \leftarrow x - \mathrm{silu}(a) \, \mathrm{sg}(x)`, and a final norm.

    sg stops the gradient: activations shrink and gradients do not. No function has these gradients, so
    a Hessian says nothing here. Each layer has one a (shape `[1]`), initially 0, shared by its sublayers.
    Chen et al. 2025, Section 3 (arXiv 2506.22049), as in the authors' code.
    """

    no_fold: ClassVar[str] = "its factor holds for activations and not for gradients, and changes with depth"

    def build(self, site: Site) -> None:
        super().build(site)
        self.a = site.shared.setdefault("gpas.a", nn.Parameter(torch.zeros(1)))

    def write(self, stream: Stream, y: Tensor) -> Stream:
        x = stream + y
        return x - F.silu(self.a) * x.detach()


class HybridNorm(Placement, name="hybridnorm"):
    r"""HybridNorm: :math:`x \leftarrow x + f(x)` for attention, whose queries, keys and values are normed,
    and :math:`x \leftarrow \mathrm{LN}(x) + f(\mathrm{LN}(x))` for the feed-forward; a final norm.

    Zhuo et al. 2025, Section 3 (arXiv 2503.04598), as in the authors' code. Here the attention before the
    feed-forward writes :math:`\mathrm{LN}(x + f(x))`, which is the same.
    """

    final_norm: ClassVar[bool] = True
    no_fold: ClassVar[str] = "the norms of queries, keys and values divide by statistics of each token"
    qk_norm: ClassVar[str] = "qkvnormed"

    def build(self, site: Site) -> None:
        following = site.roles[(site.index + 1) % len(site.roles)]
        self.norm = site.norm(site.dim) if following == "ffn" else nn.Identity()

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self.norm(stream + y)


class NGPT(Placement, name="ngpt"):
    r"""nGPT: :math:`x \leftarrow n(n(x) + |\alpha| \odot (n(f(x)) - n(x)))` with :math:`n(x) = x/\|x\|_2`, no
    other norm, trained :math:`\alpha` (shape `[D]`), initially 0.05.

    :math:`\alpha` is stored as :math:`1/\sqrt{d}` and multiplied by :math:`0.05 \sqrt{d}`. Loshchilov et al.
    2024, Section 2.2 (arXiv 2410.01131), whose model also has ``unitweights``, ``ngptnormed``, ``ngptswiglu``
    and ``logitscale``: ``like:ngpt``.
    """

    normed: ClassVar[bool] = False
    no_fold: ClassVar[str] = "its stream is divided by its own length behind every branch"

    def build(self, site: Site) -> None:
        self.factor = 0.05 * site.dim**0.5
        self.alpha = nn.Parameter(torch.full((site.dim,), site.dim**-0.5))

    def write(self, stream: Stream, y: Tensor) -> Stream:
        x = scaled_to(stream, 1.0)
        return scaled_to(x + (self.alpha * self.factor).abs() * (scaled_to(y, 1.0) - x), 1.0)


class SiameseNorm(TwoStreams, name="siamese"):
    r"""SiameseNorm, two streams: :math:`z = f(\mathrm{LN}_3(\mathrm{LN}_1(x) + \mathrm{LN}_2(y)))`,
    :math:`x \leftarrow \mathrm{LN}_1(x) + z/\sqrt{2l},\; y \leftarrow y + z` in layer l, counted from 1.

    Both begin as the embeddings; the stack's output is :math:`\mathrm{LN}(x) + \mathrm{LN}(y)`. Li et al.
    2026, Section 3 (arXiv 2602.08064), as in the authors' code for images; their language model's attention
    reads another sum.
    """

    def build(self, site: Site) -> None:
        self.norm_x, self.norm_y, self.norm_in = (site.norm(site.dim) for _ in range(3))
        self.scale = (2 * (site.layer + 1)) ** -0.5

    def read(self, stream: Stream) -> Tensor:
        x, y = stream
        return self.norm_in(self.norm_x(x) + self.norm_y(y))

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self.norm_x(stream[0]) + self.scale * y, stream[1] + y

    @classmethod
    def end(cls, site: Site) -> nn.Module:
        return _SumOfNormed(site.final_norm(), site.final_norm())


class _SumOfNormed(nn.Module):
    """Maps the stream (x, y) to LN(x) + LN(y)."""

    def __init__(self, norm_x: nn.Module, norm_y: nn.Module) -> None:
        super().__init__()
        self.norm_x, self.norm_y = norm_x, norm_y

    def forward(self, stream: tuple[Tensor, Tensor]) -> Tensor:
        return self.norm_x(stream[0]) + self.norm_y(stream[1])


class ProRes(NormedInput, name="prores"):
    r"""ProRes on Pre-LN: :math:`x \leftarrow x + \min(t/(Tl), 1) \, f(\mathrm{LN}(x))` after t steps of the
    optimizer, in layer l, counted from 1; a final norm.

    T is ``residual_warmup_steps``, 1,000 as in the authors' example; the last of L layers is open after TL
    steps. Every branch is shut at the start, and training must call ``nn.after_step``. Chen et al. 2026,
    Progressive Residual Warmup (arXiv 2603.05369), as in the authors' code.
    """

    options: ClassVar[tuple[str, ...]] = ("residual_warmup_steps",)
    steps: Tensor

    def build(self, site: Site) -> None:
        super().build(site)
        self.open_after = site.residual_warmup_steps * (site.layer + 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @property
    def alpha(self) -> Tensor:
        """The factor on the branch, a scalar, so that a tensor multiplied by it keeps its precision."""
        return (self.steps.double() / self.open_after).clamp(max=1)

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return stream + self.alpha * y

    def after_step(self) -> None:
        self.steps += 1

    def fold(self) -> Plain:
        return Plain("pre", branch=self.alpha)

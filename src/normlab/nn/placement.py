"""Where the normalisation sits: how a sublayer reads the residual stream and writes to it.

One class a placement, each with its published equation. A placement owns the facts that its paper states
together: read, write, how the stream begins and ends, its own parameters, the gain on the initialisation
of the branch, and what it may not be combined with. Everything else (the branch, the norm, the scheme)
is chosen elsewhere, and no other file knows a placement by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .registry import Registry

Stream = Any
"""What flows from sublayer to sublayer: a tensor `[B, T, D]`, or a tuple of them."""


@dataclass(frozen=True)
class Site:
    """Where one sublayer sits: everything that a placement may depend on.

    ``index`` counts sublayers of the stack from 0, ``layer`` counts layers from 0; ``encoder_layers`` and
    ``decoder_layers`` are N and M of the papers, 0 where the model has no such stack.
    """

    stack: str
    role: str
    index: int
    layer: int
    dim: int
    encoder_layers: int
    decoder_layers: int
    norm: Callable[[int], nn.Module]
    shared: dict[str, nn.Parameter] = field(default_factory=dict, compare=False)
    """Parameters that the sublayers of one layer have in common, by name."""


class Placement(nn.Module, ABC):
    """Base of all placements; a subclass registers itself under ``name``."""

    registry: ClassVar[Registry[type[Placement]]] = Registry("placement")
    name: ClassVar[str]
    normed: ClassVar[bool] = True
    """Whether it uses the norm of its site: where no placement of a model does, a norm cannot be chosen."""
    profiled: ClassVar[bool] = False
    """Whether its start depends on data: ``init.profile_`` then calls ``start_``."""

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Placement.registry[name] = cls
        cls.name = name

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.build(site)

    def build(self, site: Site) -> None:
        """Create the modules and parameters that belong to this placement."""

    @abstractmethod
    def read(self, stream: Stream) -> Tensor:
        """What the branch sees, `[B, T, D]`."""

    @abstractmethod
    def write(self, stream: Stream, y: Tensor) -> Stream:
        """The stream after the branch's output y, `[B, T, D]`."""

    @classmethod
    def begin(cls, site: Site) -> nn.Module:
        """Turns the embeddings `[B, T, D]` into the stream."""
        return nn.Identity()

    @classmethod
    def end(cls, site: Site) -> nn.Module:
        """Turns the stream into the stack's output `[B, T, D]`."""
        return nn.Identity()

    def gain(self, matrix: str) -> float:
        """Factor on the scheme's standard deviation of the branch's ``matrix`` (query, key, value, …)."""
        return 1.0

    def start_(self, variance: Tensor) -> None:
        """Set the data-dependent start from the variance of what has been summed up before this sublayer."""
        raise NotImplementedError(f"placement {self.name!r} has no data-dependent start")

    @classmethod
    def conflict(cls, *, norm: str, scheme: str) -> str | None:
        """The reason why this placement is not defined with the model's norm or scheme, or None."""
        return None


class PostNorm(Placement, name="post"):
    r"""Post-LN: :math:`x \leftarrow \mathrm{LN}(x + f(x))`.

    Vaswani et al. 2017, Section 3.1 (arXiv 1706.03762).
    """

    def build(self, site: Site) -> None:
        self.norm = site.norm(site.dim)

    def read(self, stream: Stream) -> Tensor:
        return stream

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self.norm(stream + y)


class PreNorm(Placement, name="pre"):
    r"""Pre-LN: :math:`x \leftarrow x + f(\mathrm{LN}(x))`, and a final norm where the stream ends.

    Xiong et al. 2020, Table 1 (arXiv 2002.04745).
    """

    def build(self, site: Site) -> None:
        self.norm = site.norm(site.dim)

    def read(self, stream: Stream) -> Tensor:
        return self.norm(stream)

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return stream + y

    @classmethod
    def end(cls, site: Site) -> nn.Module:
        return site.norm(site.dim)


class Admin(Placement, name="admin"):
    r"""Admin: :math:`x \leftarrow \mathrm{LN}(\omega \odot x + f(x))` with a trained vector :math:`\omega`
    `[D]`.

    Start, profiled on one batch with :math:`\omega = 1`:
    :math:`\omega_i^2 = \mathrm{Var}[x_0] + \sum_{1 \le j < i} \mathrm{Var}[f_j(x_{j-1})]`.
    Liu et al. 2020, Section 4 (arXiv 2004.08249); taken literally, the published sum leaves out
    :math:`\mathrm{Var}[x_0]` and :math:`\omega_1 = 0` would erase the embeddings.
    """

    profiled: ClassVar[bool] = True

    def build(self, site: Site) -> None:
        self.norm = site.norm(site.dim)
        self.omega = nn.Parameter(torch.ones(site.dim))

    def read(self, stream: Stream) -> Tensor:
        return stream

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self.norm(stream * self.omega + y)

    @torch.no_grad()
    def start_(self, variance: Tensor) -> None:
        self.omega.fill_(float(variance) ** 0.5)


class ReZero(Placement, name="rezero"):
    r"""ReZero: :math:`x \leftarrow x + \alpha f(x)`, no norm, :math:`\alpha = 0` at the start.

    One :math:`\alpha` (shape `[1]`) a layer, shared by its sublayers. Bachlechner et al. 2020,
    Section 4 (arXiv 2003.04887).
    """

    normed: ClassVar[bool] = False

    def build(self, site: Site) -> None:
        self.alpha = site.shared.setdefault("rezero.alpha", nn.Parameter(torch.zeros(1)))

    def read(self, stream: Stream) -> Tensor:
        return stream

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return stream + self.alpha * y


class DeepNorm(Placement, name="deepnorm"):
    r"""DeepNorm: :math:`x \leftarrow \mathrm{LN}(\alpha x + f(x))`.

    Xavier gain :math:`\beta` on value, output and feed-forward matrices, 1 on query and key. Encoder of an
    encoder-decoder: :math:`\alpha = 0.81 (N^4 M)^{1/16}, \beta = 0.87 (N^4 M)^{-1/16}`; decoder:
    :math:`\alpha = (3M)^{1/4}, \beta = (12M)^{-1/4}`; a single stack of L layers:
    :math:`\alpha = (2L)^{1/4}, \beta = (8L)^{-1/4}`. Wang et al. 2022, Figure 2 (arXiv 2203.00555).
    """

    def build(self, site: Site) -> None:
        self.norm = site.norm(site.dim)
        self.alpha, self.beta = self.constants(site)

    @staticmethod
    def constants(site: Site) -> tuple[float, float]:
        """alpha and beta of the stack that the site belongs to."""
        n, m = site.encoder_layers, site.decoder_layers
        if not n or not m:
            layers = n + m
            return (2 * layers) ** 0.25, (8 * layers) ** -0.25
        if site.stack == "encoder":
            return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
        return (3 * m) ** 0.25, (12 * m) ** -0.25

    def read(self, stream: Stream) -> Tensor:
        return stream

    def write(self, stream: Stream, y: Tensor) -> Stream:
        return self.norm(self.alpha * stream + y)

    def gain(self, matrix: str) -> float:
        return 1.0 if matrix in ("query", "key") else self.beta

    @classmethod
    def conflict(cls, *, norm: str, scheme: str) -> str | None:
        if scheme == "xavier":
            return None
        return f"DeepNorm's beta is a gain on Xavier initialisation; with {scheme} it is not defined"


class ResiDual(Placement, name="residual"):
    r"""ResiDual, two streams: :math:`x \leftarrow \mathrm{LN}(x + f(x)),\; d \leftarrow d + f(x)`.

    Both start at the embeddings; the stack's output is :math:`x + \mathrm{LN}(d)`.
    Xie et al. 2023, Section 3 (arXiv 2304.14802).
    """

    def build(self, site: Site) -> None:
        self.norm = site.norm(site.dim)

    def read(self, stream: Stream) -> Tensor:
        return stream[0]

    def write(self, stream: Stream, y: Tensor) -> Stream:
        x, d = stream
        return self.norm(x + y), d + y

    @classmethod
    def begin(cls, site: Site) -> nn.Module:
        return _Twice()

    @classmethod
    def end(cls, site: Site) -> nn.Module:
        return _SumWithNormedSecond(site.norm(site.dim))


class _Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class _SumWithNormedSecond(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, stream: tuple[Tensor, Tensor]) -> Tensor:
        x, d = stream
        return x + self.norm(d)

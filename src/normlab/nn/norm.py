"""Norms, which map `[..., D]` to `[..., D]` over the last axis and are built as ``norm(dim)``."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.registry import Registered, Registry
from normlab.errors import UserError
from normlab.nn.kernels.fused import erf_scaled, root_mean_square_normed, scaled_to, tanh_scaled


class Norm(Registered, nn.Module, ABC):
    """Base of all norms; a subclass registers itself under ``name``, an abstract one has none."""

    registry: ClassVar[Registry[Callable[[int], Norm]]] = Registry("norm")
    parameter_roles: ClassVar[str] = "norm"
    no_fold: ClassVar[str] = ""
    """The reason why no plainer norm is equal, for a norm that is close to a plainer one."""

    @classmethod
    def final(cls, dim: int) -> nn.Module:
        """Build the norm at the end of a stream."""
        return cls(dim)

    @torch.no_grad()
    def scale_(self, factor: Tensor) -> None:
        """Multiply the output by ``factor`` `[D]` through the norm's gain and bias.

        Raises UserError for a norm without a gain for each channel.
        """
        parameters = dict(self.named_parameters())
        if "weight" not in parameters:
            raise UserError(f"{self.name} has no gain for each channel that could take over a factor")
        for name in ("weight", "bias"):
            if name in parameters:
                parameters[name].mul_(factor)


class LayerNorm(Norm, name="layernorm"):
    r""":math:`\gamma \odot (x - \mu)/\sqrt{\sigma^2 + \epsilon} + \beta`, initially
    :math:`\gamma = 1, \beta = 0`.

    Ba et al. 2016, Section 3 (arXiv 1607.06450).
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(Norm, name="rmsnorm"):
    r""":math:`g_i x_i / \sqrt{\mathrm{mean}(x^2) + \epsilon}`, initially :math:`g = 1`.

    Zhang and Sennrich 2019, Section 4 (arXiv 1910.07467).
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return root_mean_square_normed(x, self.weight, self.eps)


class ZeroCentredRMSNorm(Norm, name="rmsnorm1p"):
    r""":math:`(1 + w_i) \, x_i / \sqrt{\mathrm{mean}(x^2) + \epsilon}`, initially :math:`w = 0`, so
    decay pulls the gain towards 1.

    Gemma Team 2024, Section 2 (arXiv 2403.08295), after Zhang and Sennrich 2019.
    """

    plain: ClassVar[str] = "rmsnorm"

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return root_mean_square_normed(x, 1 + self.offset, self.eps)

    @torch.no_grad()
    def fold(self) -> Norm:
        """Return the equivalent RMSNorm, in float64."""
        norm = RMSNorm(len(self.offset), self.eps).double()
        norm.weight.copy_(1 + self.offset)
        return norm


class RMSNormWithoutGain(Norm, name="rmsnorm_nogain"):
    r""":math:`x_i / \sqrt{\mathrm{mean}(x^2) + \epsilon}`, nothing trained.

    nanochat's code, after Zhang and Sennrich 2019, Section 4 (arXiv 1910.07467).
    """

    plain: ClassVar[str] = "rmsnorm"

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x: Tensor) -> Tensor:
        return root_mean_square_normed(x, x.new_ones(self.dim), self.eps)

    def fold(self) -> Norm:
        """Return the equivalent trained norm in float64, with gains of 1."""
        return RMSNorm(self.dim, self.eps).double()


class ScaleNorm(Norm, name="scalenorm"):
    r""":math:`g \, x / \|x\|_2`, with one scalar :math:`g` (shape `[1]`), initially :math:`\sqrt{d}`.

    :math:`\|x\|` is kept above 1e-5. Nguyen and Salazar 2019, Sections 2.3 and 3.2 (arXiv 1910.05895).
    """

    no_fold: ClassVar[str] = (
        "RMSNorm with gains of g / sqrt(d) adds an epsilon to the mean square, so it is close, not equal"
    )

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.full((1,), dim**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return scaled_to(x, self.g)

    @torch.no_grad()
    def scale_(self, factor: Tensor) -> None:
        if not torch.equal(factor, factor[:1].expand_as(factor)):
            raise UserError(f"{self.name} has one g for all channels, and the factor differs among them")
        self.g.mul_(factor[:1])


class FixedScaleNorm(Norm, name="fixedscalenorm"):
    r""":math:`\sqrt{d} \, x / \|x\|_2`, not trained; the final norm of a stack is a trained ScaleNorm.

    :math:`\|x\|` is kept above 1e-5. Nguyen and Salazar 2019, Table 7 (arXiv 1910.05895).
    """

    plain: ClassVar[str] = "scalenorm"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.g = dim, dim**0.5

    def forward(self, x: Tensor) -> Tensor:
        return scaled_to(x, self.g)

    @classmethod
    def final(cls, dim: int) -> nn.Module:
        return ScaleNorm(dim)

    def fold(self) -> Norm:
        """Return the equivalent trained norm in float64, with g set to the fixed factor."""
        norm = ScaleNorm(self.dim).double()
        nn.init.constant_(norm.g, self.g)
        return norm


class DyT(Norm, name="dyt"):
    r"""Dynamic tanh: :math:`\gamma \odot \tanh(\alpha x) + \beta`, initially
    :math:`\alpha = 0.5, \gamma = 1, \beta = 0`.

    Each norm has one :math:`\alpha` (shape `[1]`). Zhu et al. 2025, Section 4 (arXiv 2503.10622).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return tanh_scaled(x, self.alpha, self.weight, self.bias)


class Derf(Norm, name="derf"):
    r"""Dynamic erf: :math:`\gamma \odot \mathrm{erf}(\alpha x + s) + \beta`, initially
    :math:`\alpha = 0.5, s = 0, \gamma = 1, \beta = 0`.

    Each norm has one :math:`\alpha` and one s (shape `[1]`). Chen et al. 2025, Equation 10 (arXiv
    2512.10938).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return erf_scaled(x, self.alpha, self.shift, self.weight, self.bias)

"""The setting in which Xiong et al. 2020 prove their theorem (Section 3.3): single-head attention that is
uniform because queries and keys are initialised to 0, every matrix d x d, Gaussian inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.nn import Placement, Stack, stack_of
from normlab.papers.lab import generator

ROLES = ("self_attention", "ffn")


class UniformAttention(nn.Module):
    r""":math:`\frac{1}{n} \sum_j x_j W_V`, the same for every position; :math:`W_V \sim N(0, 1/d)`."""

    def __init__(self, dim: int, random: torch.Generator) -> None:
        super().__init__()
        self.value = _xavier(dim, dim, random)

    def forward(self, x: Tensor) -> Tensor:
        return (x.mean(-2, keepdim=True) @ self.value).expand_as(x)


class FeedForward(nn.Module):
    r""":math:`\mathrm{ReLU}(x W_1) W_2`, both drawn from :math:`N(0, 2/(d + d_{ff}))`."""

    def __init__(self, dim: int, ffn_dim: int, random: torch.Generator) -> None:
        super().__init__()
        self.inner, self.outer = _xavier(dim, ffn_dim, random), _xavier(ffn_dim, dim, random)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.inner) @ self.outer


def _xavier(n_in: int, n_out: int, random: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(n_in, n_out, generator=random) * (2 / (n_in + n_out)) ** 0.5)


class Setting(nn.Module):
    """A network of the theory with inputs `[1, T, D]`, a target for each position, and an output matrix."""

    def __init__(
        self,
        placement: str,
        *,
        layers: int,
        dim: int,
        tokens: int,
        seed: int,
        ffn_dim: int = 0,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        random = generator(seed=seed)
        branches: list[nn.Module] = []
        for _ in range(layers):
            branches += [UniformAttention(dim, random), FeedForward(dim, ffn_dim or dim, random)]
        first = next(stack_of(ROLES, layers, dim))
        self.stack = Stack.of(branches, Placement.registry[placement], first)
        self.output = torch.randn(dim, classes, generator=random) * dim**-0.5
        self.x = torch.randn(1, tokens, dim, generator=random)
        self.target = torch.randint(classes, (tokens,), generator=random)

    def forward(self) -> Tensor:
        """The mean over positions of the negative log-likelihood."""
        return F.cross_entropy((self.stack(self.x) @ self.output)[0], self.target)

    def outer(self) -> list[nn.Parameter]:
        r""":math:`W^{2,l}` of every layer, the first one first."""
        return [sublayer.f.outer for sublayer in self.stack if isinstance(sublayer.f, FeedForward)]

    @torch.no_grad()
    def totals(self) -> list[Tensor]:
        """x + f(x) `[T, D]` of every feed-forward sublayer: in Post-LN what its norm is given, in Pre-LN the
        stream behind it.
        """
        found: list[Tensor] = []
        stream = self.stack.begin(self.x)
        for sublayer in self.stack:
            y = sublayer.f(sublayer.place.read(stream))
            found.append((stream + y)[0])
            stream = sublayer.place.write(stream, y)
        return found[1::2]


def mean_field_scales(tokens: int, depths: Sequence[int]) -> list[float]:
    r"""The mean square of the stream of a Pre-LN behind each of ``depths`` layers, for wide networks.

    With the mean square s and the overlap c of two tokens, :math:`\rho = c/s`, uniform attention over n
    tokens adds :math:`(1 + (n - 1)\rho)/n` to both, since every token gets the same; a feed-forward adds 1/2
    to s and half of ReLU's arc-cosine kernel, :math:`(\sqrt{1 - \rho^2} + \rho(\pi - \arccos\rho))/\pi`,
    to c (Cho and Saul 2009, Section 2).
    """
    square, overlap = 1.0, 0.0
    found: dict[int, float] = {}
    for layer in range(1, max(depths) + 1):
        added = (1 + (tokens - 1) * overlap / square) / tokens
        square, overlap = square + added, overlap + added
        rho = min(1.0, overlap / square)
        kernel = (math.sqrt(1 - rho**2) + rho * (math.pi - math.acos(rho))) / math.pi
        square, overlap = square + 0.5, overlap + 0.5 * kernel
        found[layer] = square
    return [found[depth] for depth in depths]

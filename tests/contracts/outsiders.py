"""Variants and a model of somebody else's, written as a user would, outside the package.

They are taken out of the registries again, so that a list of what is registered shows the package alone;
``enrolled()`` puts them back while a model is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.lab.config import ModelConfig
from normlab.nn import (
    HEAD_GAINS,
    INNER_NORMS,
    Activation,
    Context,
    Norm,
    Placement,
    PositionEncoding,
    QueryKeyNorm,
    Site,
    Stack,
    TokenModel,
)
from normlab.nn.init import SCHEMES, Scheme


class Lanes(Placement, name="lanes"):
    """Two streams, all trained: f reads LN(r a + (1 - r) b), a <- a + w_1 y, b <- b + w_2 y."""

    normed: ClassVar[bool] = True
    bias: ClassVar[str] = "nobias"

    def build(self, site: Site) -> None:
        self.norm = site.norm(site.dim)
        self.reading = nn.Parameter(torch.tensor([0.7]))
        self.writing = nn.Parameter(torch.tensor([1.0, 0.5]))

    def read(self, stream: tuple[Tensor, Tensor]) -> Tensor:
        a, b = stream
        return self.norm(torch.lerp(b, a, self.reading))

    def write(self, stream: tuple[Tensor, Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = stream
        return a + self.writing[:1] * y, b + self.writing[1:] * y

    @classmethod
    def begin(cls, site: Site) -> nn.Module:
        return Split(site.dim)

    @classmethod
    def end(cls, site: Site) -> nn.Module:
        return Join(site.final_norm())

    @classmethod
    def gain(cls, site: Site, matrix: str) -> float:
        return 1.0 if matrix in ("query", "key") else site.sublayers**-0.25


class Split(nn.Module):
    """x to (x, v x) with a trained vector v."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.linspace(0.5, 1.5, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.v * x


class Join(nn.Module):
    """(a, b) to LN(a + b)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, stream: tuple[Tensor, Tensor]) -> Tensor:
        return self.norm(stream[0] + stream[1])


class PowerNorm(Norm, name="powernorm"):
    """g x / (mean(x^4) + eps)^(1/4), start g = 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * x / (x.pow(4).mean(-1, keepdim=True) + 1e-5).pow(0.25)


class FanIn(Scheme, name="fan_in"):
    """N(0, g^2 / n_in)."""

    @staticmethod
    def fill_(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
        weight.normal_(0.0, gain * weight.shape[1] ** -0.5, generator=generator)


class SquaredReLU(Activation, name="squared_relu"):
    """max(0, x)^2."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


class Slopes(QueryKeyNorm, name="slopes"):
    """A trained gain for each element of the queries."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(config.dim // config.heads))

    def queries(self, q: Tensor) -> Tensor:
        return q * self.gain

    def keys(self, k: Tensor) -> Tensor:
        return k


class Ramp(PositionEncoding, name="ramp"):
    """One trained vector times log(1 + t)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.direction = nn.Parameter(torch.linspace(-1, 1, config.dim))

    def forward(self, x: Tensor, decode_index: int | None = None) -> Tensor:
        first, count = (0, x.shape[1]) if decode_index is None else (decode_index, 1)
        t = torch.arange(first, first + count, device=x.device, dtype=x.dtype)
        return x + torch.log1p(t)[:, None] * self.direction


@INNER_NORMS.register("attention_innernorm")
def in_attention(role: str) -> bool:
    """A norm before the output matrix of an attention."""
    return role.endswith("attention")


@HEAD_GAINS.register("head_softplus")
class SoftplusHeads(nn.Module):
    """softplus(s_h) head_h."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.zeros(heads))

    def forward(self, y: Tensor) -> Tensor:
        return y * F.softplus(self.s)[:, None, None]


class RunningMean(nn.Module):
    """A branch that is no ``Branch`` of the package: y_t = W mean of x_0 to x_t."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        seen = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        return self.out(x.cumsum(1) / seen[:, None])


class TwoLines(nn.Module):
    """A branch with torch's own modules, V tanh(W x)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.net(x)


class ForeignModel(TokenModel):
    """A causal language model of foreign branches under a placement of the package."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        roles = ("mixer", "ffn")
        norm = Norm.registry[config.norm]
        first = Site("decoder", "mixer", 0, 0, config.dim, 0, config.decoder_layers, norm, roles)
        branches = [
            kind(config.dim) for _ in range(config.decoder_layers) for kind in (RunningMean, TwoLines)
        ]
        self.decoder = Stack.of(branches, Placement.registry[config.decoder_placement], first)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding.logits(self.decoder(self.embed(ids), Context(padding_mask=ids != 0)))


class ForeignConfig(ModelConfig):
    """The description of a ``ForeignModel``."""

    kind: ClassVar[type[TokenModel]] = ForeignModel


_REGISTRIES = {
    "placement": Placement.registry,
    "norm": Norm.registry,
    "scheme": SCHEMES,
    "activation": Activation.registry,
    "qk_norm": QueryKeyNorm.registry,
    "position_encoding": PositionEncoding.registry,
    "inner_norm": INNER_NORMS,
    "head_gain": HEAD_GAINS,
}
NAMES = {
    "placement": "lanes",
    "norm": "powernorm",
    "scheme": "fan_in",
    "activation": "squared_relu",
    "qk_norm": "slopes",
    "position_encoding": "ramp",
    "inner_norm": "attention_innernorm",
    "head_gain": "head_softplus",
}
"""The variants defined here, by axis."""
_TAKEN_OUT: dict[str, Any] = {axis: _REGISTRIES[axis].pop(name) for axis, name in NAMES.items()}


@contextmanager
def enrolled() -> Iterator[None]:
    """Within this block the variants of this file are registered, as a user's would be."""
    absent = {axis: name for axis, name in NAMES.items() if name not in _REGISTRIES[axis]}
    for axis, name in absent.items():
        _REGISTRIES[axis][name] = _TAKEN_OUT[axis]
    try:
        yield
    finally:
        for axis, name in absent.items():
            del _REGISTRIES[axis][name]

"""Positions: added to the embeddings, or turned into queries and keys."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.nn.registry import Registry
from normlab.spec.model import ModelConfig


class PositionEncoding(nn.Module, ABC):
    """Base of all positions; a subclass registers itself under ``name``.

    ``position`` None stands for 0 to T - 1, a number for one position that all T places share (the beams of a
    search).
    """

    registry: ClassVar[Registry[type[PositionEncoding]]] = Registry("position encoding")

    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        PositionEncoding.registry[name] = cls

    longest: int | None = None
    """Positions that there are, where they end."""

    @abstractmethod
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, x: Tensor, decode_index: int | None = None) -> Tensor:
        """Embeddings `[B, T, D]` with their positions added."""

    @staticmethod
    def apply_rotary(x: Tensor, decode_index: int | None) -> Tensor:
        """Queries or keys of self-attention `[B, H, T, w]` with their positions in them."""
        return x

    def init_(self, generator: torch.Generator) -> None:
        """Draw the starting weights, if there are any."""


class Sinusoidal(PositionEncoding, name="sinusoidal"):
    r""":math:`\sin(t / 10000^{2i/d})` at 2i, :math:`\cos` of the same at 2i + 1, added to the embeddings.

    Vaswani et al. 2017, Section 3.5 (arXiv 1706.03762).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.register_buffer("table", sinusoids(256, config.dim), persistent=False)
        self.table: Tensor

    def forward(self, x: Tensor, decode_index: int | None = None) -> Tensor:
        places = _places(x.shape[1], decode_index)
        if places.stop > len(self.table):
            self.table = sinusoids(2 * places.stop, x.shape[2]).to(self.table)
        return x + self.table[places]


class Learned(PositionEncoding, name="learned"):
    r"""A trained vector for each position (`[max_positions, D]`), start N(0, 1/d), added to the embeddings.

    Gehring et al. 2017, Section 3.1 (arXiv 1705.03122).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.longest = config.max_positions
        self.weight = nn.Parameter(torch.empty(config.max_positions, config.dim))

    def forward(self, x: Tensor, decode_index: int | None = None) -> Tensor:
        places = _places(x.shape[1], decode_index)
        if places.stop > len(self.weight):
            raise UserError(
                f"an input of {places.stop} positions, and the model has learned positions for "
                f"{len(self.weight)}; shorten it, or train with a larger max_positions"
            )
        return x + self.weight[places]

    @torch.no_grad()
    def init_(self, generator: torch.Generator) -> None:
        self.weight.normal_(0.0, self.weight.shape[1] ** -0.5, generator=generator)


class Rotary(PositionEncoding, name="rope"):
    r"""RoPE: queries and keys of self-attention, turned in each plane (2i, 2i + 1) by
    :math:`t / 10000^{2i/w}`.

    Nothing is added to the embeddings. Su et al. 2021, Section 3.2 (arXiv 2104.09864).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if config.dim // config.heads % 2:
            fewer = [heads for heads in range(1, config.heads) if config.dim % (2 * heads) == 0]
            raise UserError(
                f"rope turns pairs, so heads need an even width, got {config.dim // config.heads} "
                f"({config.dim} wide, {config.heads} heads); "
                + (f"fewer heads that have one: {fewer}" if fewer else f"try a width of {config.dim + 1}")
            )

    def forward(self, x: Tensor, decode_index: int | None = None) -> Tensor:
        return x

    @staticmethod
    def apply_rotary(x: Tensor, decode_index: int | None) -> Tensor:
        places = _places(x.shape[2], decode_index)
        sin, cos = angles(places.start, places.stop, x.shape[3], x).unbind(-1)
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _places(length: int, decode_index: int | None) -> slice:
    return slice(0, length) if decode_index is None else slice(decode_index, decode_index + 1)


def angles(start: int, stop: int, width: int, like: Tensor) -> Tensor:
    r"""Sine and cosine `[stop - start, width/2, 2]` of :math:`t / 10000^{2i/w}`, on the device and in the
    type of ``like``.
    """
    rates = torch.exp(
        torch.arange(0, width, 2, dtype=torch.float64, device=like.device) * (-math.log(10000.0) / width)
    )
    turned = torch.arange(start, stop, dtype=torch.float64, device=like.device)[:, None] * rates
    return torch.stack((turned.sin(), turned.cos()), dim=-1).to(like.dtype)


def sinusoids(length: int, dim: int) -> Tensor:
    """The table of ``Sinusoidal``, `[length, dim]` in float32."""
    if dim % 2:
        raise UserError(f"sinusoidal positions need an even width, got {dim}; try {dim + 1}")
    table = angles(0, length, dim, torch.empty(0, device="cpu")).flatten(1)
    return table.to(torch.empty(0).device)

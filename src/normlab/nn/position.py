"""Position encodings: added to the embeddings, or applied to queries and keys."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.base.model_config import ModelConfig
from normlab.base.registry import Registered, Registry
from normlab.errors import UserError

THETA = 10000.0
"""Base of the wavelengths of sinusoids, and of rotations unless the config has its own."""


class PositionEncoding(Registered, nn.Module, ABC):
    """Base of all position encodings; a subclass registers itself under ``name``.

    ``decode_index`` is None for positions 0 to T - 1, or the position of all T tokens (beams of a search), or
    in ``forward`` also the positions `[B, T]` of tokens in their documents, all below T.
    """

    registry: ClassVar[Registry[type[PositionEncoding]]] = Registry("position encoding")

    parameter_roles: ClassVar[str] = "embedding"
    longest: int | None = None
    """The number of positions, if limited."""

    @abstractmethod
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor, decode_index: int | Tensor | None = None) -> Tensor:
        """Add positions to embeddings `[B, T, D]`."""
        return x

    @staticmethod
    def apply_rotary(x: Tensor, decode_index: int | None, theta: float = THETA) -> Tensor:
        """Rotate queries or keys of self-attention `[B, H, T, w]` by their positions."""
        return x

    def tables(self) -> dict[str, nn.Parameter]:
        """Return the trained table of positions, if there is one."""
        return {}

    def init_(self, generator: torch.Generator) -> None:
        """Draw the initial weights, if there are any."""


class Sinusoidal(PositionEncoding, name="sinusoidal"):
    r""":math:`\sin(t / 10000^{2i/d})` at 2i, :math:`\cos` of the same at 2i + 1, added to the embeddings.

    Vaswani et al. 2017, Section 3.5 (arXiv 1706.03762).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.register_buffer("table", sinusoids(256, config.dim), persistent=False)
        self.table: Tensor

    def forward(self, x: Tensor, decode_index: int | Tensor | None = None) -> Tensor:
        positions, longest = _looked_up(x.shape[1], decode_index)
        if longest > len(self.table):
            self.table = sinusoids(2 * longest, x.shape[2]).to(self.table)
        return x + self.table[positions]


class Learned(PositionEncoding, name="learned"):
    r"""A trained vector for each position (`[max_positions, D]`), initially N(0, 1/d), added to the
    embeddings.

    Gehring et al. 2017, Section 3.1 (arXiv 1705.03122).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.longest = config.max_positions
        self.weight = nn.Parameter(torch.empty(config.max_positions, config.dim))

    def forward(self, x: Tensor, decode_index: int | Tensor | None = None) -> Tensor:
        positions, longest = _looked_up(x.shape[1], decode_index)
        if longest > len(self.weight):
            raise UserError(
                f"the input has {longest} positions, and the model has learned {len(self.weight)}; "
                "shorten the input, or train with a larger max_positions"
            )
        return x + self.weight[positions]

    def tables(self) -> dict[str, nn.Parameter]:
        return {"positions": self.weight}

    @torch.no_grad()
    def init_(self, generator: torch.Generator) -> None:
        self.weight.normal_(0.0, self.weight.shape[1] ** -0.5, generator=generator)


class Rotary(PositionEncoding, name="rope"):
    r"""RoPE: queries and keys of self-attention, rotated in each plane (2i, 2i + 1) by
    :math:`t / \theta^{2i/w}`, :math:`\theta = 10000` unless ``rope_theta`` is set.

    Nothing is added to the embeddings. Su et al. 2021, Section 3.2 (arXiv 2104.09864).
    """

    options: ClassVar[tuple[str, ...]] = ("rope_theta",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if config.head_width % 2:
            fewer = [heads for heads in range(1, config.heads) if config.dim % (2 * heads) == 0]
            wider = (config.dim // (2 * config.heads) + 1) * 2 * config.heads
            advice = f"numbers of heads that fit: {fewer}" if fewer else f"try a width of {wider}"
            wrong = f"{config.head_width} ({config.dim} wide, {config.heads} heads); {advice}"
            if config.head_dim:
                wrong = f"{config.head_dim}; try --head-dim {config.head_dim + 1}"
            raise UserError(f"rope rotates pairs, so that heads need an even width, got {wrong}")

    @staticmethod
    def apply_rotary(x: Tensor, decode_index: int | None, theta: float = THETA) -> Tensor:
        if decode_index is None:
            cos, sin = _rotation(x.shape[2], x.shape[3], x, theta)
        else:
            room = max(256, 1 << decode_index.bit_length())  # powers of two: a few tables serve all positions
            cos, sin = _kept_rotation(room, x.shape[3], theta, x.dtype, x.device)
            cos, sin = cos[decode_index], sin[decode_index]
        across = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return x * cos + across * sin


def _looked_up(length: int, index: int | Tensor | None) -> tuple[slice | Tensor, int]:
    """Return the rows of a table that are added, and how many rows the table needs."""
    if isinstance(index, Tensor):
        return index, length
    positions = slice(0, length) if index is None else slice(index, index + 1)
    return positions, positions.stop


def _rotation(length: int, width: int, like: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Return rope's factors on each coordinate and on its neighbour in the plane, `[length, width]` each."""
    sin, cos = angles(length, width, like, theta).unbind(-1)
    return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)


@lru_cache(maxsize=8)
def _kept_rotation(
    length: int, width: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return ``_rotation`` and keep it for the next steps of decoding, which would otherwise spend most of
    their time on it.
    """
    # A table made in inference mode could not be used later where gradients are recorded.
    with torch.inference_mode(mode=False):
        return _rotation(length, width, torch.empty(0, dtype=dtype, device=device), theta)


def angles(length: int, width: int, like: Tensor, theta: float = THETA) -> Tensor:
    r"""Return sine and cosine `[length, width/2, 2]` of :math:`t / \theta^{2i/w}`, with the device and dtype
    of ``like``.
    """
    planes = torch.arange(0, width, 2, dtype=torch.float64, device=like.device)
    rates = torch.exp(planes * (-math.log(theta) / width))
    rotated = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * rates
    return torch.stack((rotated.sin(), rotated.cos()), dim=-1).to(like.dtype)


def sinusoids(length: int, dim: int) -> Tensor:
    """Return the table of ``Sinusoidal``, `[length, dim]` in float32."""
    if dim % 2:
        raise UserError(f"sinusoidal positions need an even width, got {dim}; try {dim + 1}")
    device = torch.empty(0).device  # the numbers are the CPU's on every device that has memory
    like = torch.empty(0, device="meta" if device.type == "meta" else "cpu")
    return angles(length, dim, like).flatten(1).to(device)

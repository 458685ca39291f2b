"""A decoder of the Llama kind: rotary positions, grouped heads, RMSNorm, gated feed-forwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import VOCAB

from .parts import draw, heads_of

Rotations = tuple[Tensor, Tensor]
"""Cosines and sines `[T, w / 2]`, or `[B, 1, T, w / 2]` where rows have positions of their own."""
HEADS = 4


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + w/2) of `[..., T, w]` by their position's angles."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class Rms(nn.Module):
    """Root-mean-square normalisation of each token."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """The rotations of positions, from a table that no state dict holds."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("rates", self.computed(width), persistent=False)

    def computed(self, width: int) -> Tensor:
        """Return the angle by which each pair of features turns from one position to the next."""
        return 10000.0 ** (-torch.arange(0, width, 2).float() / width)

    def angles(self, positions: Tensor) -> Tensor:
        """Return the angles `[..., T, w / 2]` of positions `[..., T]`, always in float32."""
        return positions[..., None] * self.rates.float()

    def forward(self, positions: Tensor) -> Rotations:
        angles = self.angles(positions)
        if positions.dim() == 2:
            angles = angles[:, None]  # the heads of a row have the same positions
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Causal self-attention whose four heads share two of keys and values."""

    def __init__(self, dim: int, groups: int = 2):
        super().__init__()
        self.groups = groups
        narrow = groups * dim // HEADS
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = nn.Linear(dim, narrow, bias=False), nn.Linear(dim, narrow, bias=False)

    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        """Return queries and keys with their positions."""
        return rotate(q, *rotations), rotate(k, *rotations)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """Return the mean value of each query, over the tokens that it sees."""
        return F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=True)

    def forward(self, x: Tensor, rotations: Rotations, seen: Tensor | None = None) -> Tensor:
        q = heads_of(self.q(x), HEADS)
        k, v = heads_of(self.k(x), self.groups), heads_of(self.v(x), self.groups)
        q, k = self.place(q, k, rotations)
        return self.o(self.attend(q, k, v, seen).transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    """A gated feed-forward."""

    def __init__(self, dim: int, hidden: int | None = None):
        super().__init__()
        hidden = hidden or 2 * dim
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


Part = Callable[[int], nn.Module]
"""Makes a part of a block of this width."""


class Block(nn.Module):
    """A Pre-LN layer."""

    def __init__(self, dim: int, *, norm: Part = Rms, attention: Part = Attention, mlp: Part = SwiGlu):
        super().__init__()
        self.norm_1, self.attn = norm(dim), attention(dim)
        self.norm_2, self.mlp = norm(dim), mlp(dim)

    def forward(self, x: Tensor, rotations: Rotations, seen: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm_1(x), rotations, seen)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    """A decoder that returns logits, and their loss beside them where it is given targets."""

    def __init__(self, dim: int = 64, layers: int = 4, *, tied: bool = False, block: Part = Block):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim)
        self.rotary = Rotary(dim // HEADS)
        self.blocks = nn.ModuleList(block(dim) for _ in range(layers))
        self.norm, self.head = Rms(dim), nn.Linear(dim, VOCAB, bias=False)
        self.apply(draw)
        if tied:
            self.head.weight = self.tokens.weight

    def positions(self, ids: Tensor) -> Tensor:
        """Return the positions `[T]`, or `[B, T]`, of the tokens."""
        return torch.arange(ids.shape[1], device=ids.device)

    def seen(self, ids: Tensor) -> Tensor | None:
        """Return which pairs see each other, or nothing where the attention is only causal."""
        return None

    def run(self, x: Tensor, rotations: Rotations, seen: Tensor | None) -> Tensor:
        """Return what leaves the last block."""
        for block in self.blocks:
            x = block(x, rotations, seen)
        return x

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        rotations = self.rotary(self.positions(ids))
        logits = self.head(self.norm(self.run(self.tokens(ids), rotations, self.seen(ids))))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama_of(attention: Part = Attention, **options: Part) -> Callable[[], Llama]:
    """Return a maker of the model with other attention, or with another ``norm`` or ``mlp``."""
    return partial(Llama, block=partial(Block, attention=attention, **options))

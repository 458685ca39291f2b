"""A small Llama-like decoder, in which faults that people met are planted."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .english import VOCAB


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + w/2) of each head `[B, H, T, w]`."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def split(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values `[B, H, T, w]`."""
        return [f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)]

    def merge(self, y: Tensor) -> Tensor:
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None))


class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.gate = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1, self.attn = RMSNorm(dim), Attention(dim, heads)
        self.norm2, self.mlp = RMSNorm(dim), MLP(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A Pre-LN decoder with rotary positions, drawn with a start scaled by its depth."""

    def __init__(self, layers: int = 4, dim: int = 128, heads: int = 4, *, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.dim, self.heads = layers, dim, heads
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.register_buffer("inv_freq", self.computed_frequencies(), persistent=False)
        for path, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=self.deviation(path))
        if tied:
            self.head.weight = self.embed.weight

    def deviation(self, path: str) -> float:
        """Return the standard deviation with which a matrix is drawn."""
        if path.startswith(("embed", "head")):
            return 0.02
        writes = path.endswith(("o.weight", "down.weight"))
        return 0.5 * self.dim**-0.5 / (math.sqrt(2 * self.layers) if writes else 1.0)

    def computed_frequencies(self) -> Tensor:
        width = self.dim // self.heads
        return 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[B, 1, T, w/2]` of positions `[B, T]`."""
        angles = positions.float()[..., None] * self.inv_freq.float()
        return angles.cos()[:, None], angles.sin()[:, None]

    def decode(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return the residual stream `[B, T, D]` behind the last block."""
        if positions is None:
            positions = torch.arange(x.shape[1], dtype=torch.float32)[None]
        cos, sin = self.angles(positions)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.decode(self.embed(ids))))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of the token after each, where its label is not -100."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def model_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of a decoder on a batch of token ids."""
    return next_token_loss(model(ids), ids)

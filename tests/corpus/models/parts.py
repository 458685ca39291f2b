"""Parts that models of several kinds share."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def becomes(module: nn.Module, kind: type[nn.Module]) -> None:
    """Let a module behave as if it had been written as this subclass of its own class."""
    if not issubclass(kind, type(module)):
        raise TypeError(f"{kind.__name__} is no subclass of {type(module).__name__}")
    module.__class__ = kind


def draw(module: nn.Module) -> None:
    """Draw the weights of one module as GPT-2 does: a normal with a deviation of 0.02, biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def heads_of(x: Tensor, heads: int) -> Tensor:
    """Split the features into heads: `[B, T, D]` to `[B, H, T, D / H]`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class LoRA(nn.Module):
    """A frozen map with an adapter of low rank."""

    def __init__(self, frozen: nn.Linear, rank: int = 4):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + x @ self.down.T @ self.up.T


class FourierPositions(nn.Module):
    """Positions as a projection of waves with random frequencies."""

    def __init__(self, dim: int):
        super().__init__()
        self.keep(torch.randn(24))
        self.project = nn.Linear(48, dim)
        draw(self.project)

    def keep(self, frequencies: Tensor) -> None:
        """Make the frequencies part of the module."""
        self.register_buffer("frequencies", frequencies)

    def forward(self, positions: Tensor) -> Tensor:
        phases = positions.float()[:, None] * self.frequencies
        return self.project(torch.cat((phases.sin(), phases.cos()), -1))


class MaskedAttention(nn.Module):
    """Attention with separate projections and a mask of the pairs that may see each other."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        q = heads_of(self.query(x), self.heads)
        k, v = heads_of(self.key(memory), self.heads), heads_of(self.value(memory), self.heads)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(2))


class MaskedLayer(nn.Module):
    """A Pre-LN layer of masked self-attention, with attention to a memory if it is a crossing one."""

    def __init__(self, dim: int, heads: int = 4, *, crossing: bool = False):
        super().__init__()
        self.norm_attn, self.attn = nn.LayerNorm(dim), MaskedAttention(dim, heads)
        if crossing:
            self.norm_cross, self.cross = nn.LayerNorm(dim), MaskedAttention(dim, heads)
        self.norm_mlp = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(
        self, x: Tensor, seen: Tensor, memory: Tensor | None = None, memory_seen: Tensor | None = None
    ) -> Tensor:
        normed = self.norm_attn(x)
        x = x + self.attn(normed, normed, seen)
        if memory is not None:
            x = x + self.cross(self.norm_cross(x), memory, memory_seen)
        return x + self.mlp(self.norm_mlp(x))


def causal(length: int, device: torch.device) -> Tensor:
    """Return which tokens `[T, T]` see which: none sees a later one."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def capped(x: Tensor, bound: float) -> Tensor:
    """Bound values smoothly."""
    return bound * torch.tanh(x / bound)

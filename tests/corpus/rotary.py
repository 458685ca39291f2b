"""A decoder of the Llama kind in one file: rotary positions, grouped heads, gated or mixed feed-forwards."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .gpt import VOCAB


def rotate(x: Tensor) -> Tensor:
    """Rotate the pairs (i, i + w/2) of `[..., T, w]` by their position's angles."""
    length, width = x.shape[-2:]
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class RMS(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.g, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.g


class RotaryBlock(nn.Module):
    """A Pre-LN layer whose four heads share two heads of keys and values."""

    def __init__(self, dim: int, heads: int, *, mixed: bool = True):
        super().__init__()
        self.heads, self.mixed = heads, mixed
        self.q, self.kv, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.norm1, self.norm2 = RMS(dim), RMS(dim)
        if mixed:
            self.r = nn.Linear(dim, 4, bias=False)
            self.w1 = nn.Parameter(torch.randn(4, dim, 2 * dim) * 0.02)
            self.w2 = nn.Parameter(torch.randn(4, 2 * dim, dim) * 0.02)
        else:
            self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
            self.w2 = nn.Linear(2 * dim, dim, bias=False)

    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys with their positions."""
        return rotate(q), rotate(k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def attention(self, x: Tensor) -> Tensor:
        key, value = self.kv(x).chunk(2, -1)
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (y.unflatten(-1, (self.heads // 2, -1)).transpose(1, 2) for y in (key, value))
        return self.o(self.attend(*self.place(q, k), v).transpose(1, 2).flatten(2))

    def shares(self, x: Tensor) -> Tensor:
        """Return each expert's share `[B, T, E]` before the choice of two."""
        return self.r(x).softmax(-1)

    def feed_forward(self, x: Tensor) -> Tensor:
        if not self.mixed:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))
        shares = self.shares(x)
        weights, chosen = shares.topk(2, -1)
        gates = torch.zeros_like(shares).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        inner = F.silu(torch.einsum("btd,edf->btef", x, self.w1))
        return torch.einsum("bte,btef,efd->btd", gates, inner, self.w2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class RotaryGPT(nn.Module):
    """A decoder of such layers, which returns logits and loss."""

    def __init__(
        self, *, mixed: bool = False, checkpointed: bool = False, block: type[RotaryBlock] = RotaryBlock
    ):
        super().__init__()
        self.checkpointed = checkpointed
        self.te = nn.Embedding(VOCAB, 64)
        self.layers = nn.ModuleList(block(64, 4, mixed=mixed) for _ in range(4))
        self.norm = RMS(64)
        self.head = nn.Linear(64, VOCAB, bias=False)
        for p in self.parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.te(ids)
        for layer in self.layers:
            again = self.checkpointed and self.training
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mixture() -> RotaryGPT:
    """Return the model with a mixture of experts in each layer."""
    return RotaryGPT(mixed=True)


def made_of(block: type[RotaryBlock], *, mixed: bool = False) -> Callable[[], RotaryGPT]:
    """Return a maker of the model with layers of another class."""
    return lambda: RotaryGPT(mixed=mixed, block=block)

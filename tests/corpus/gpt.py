"""A decoder of the GPT-2 kind in one file, made of small methods that a fault replaces one by one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 211


class Block(nn.Module):
    """A layer, Pre-LN or Post-LN, with one packed map for queries, keys and values."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.1, *, post: bool = False):
        super().__init__()
        self.heads, self.dropout, self.post = heads, dropout, post
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.m = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the mean value `[B, H, T, w]` of each query, over the tokens up to its own."""
        length, width = q.shape[-2:]
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(width)
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        return F.dropout(weights, self.dropout, self.training) @ v

    def merge(self, y: Tensor) -> Tensor:
        """Return the output `[B, T, D]` of heads `[B, H, T, w]`."""
        return self.o(y.transpose(1, 2).flatten(2))

    def attention(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in packed)
        return self.merge(self.attend(q, k, v))

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.n1(x + self.attention(x))
            return self.n2(x + self.m(x))
        x = x + self.attention(self.n1(x))
        return x + self.m(self.n2(x))


class GPT(nn.Module):
    """A decoder with learned positions and a tied head, which returns logits and loss."""

    def __init__(
        self,
        dim: int = 128,
        layers: int = 6,
        *,
        dropout: float = 0.1,
        tied: bool = True,
        block: Callable[..., nn.Module] = Block,
    ):
        super().__init__()
        self.te, self.pe = nn.Embedding(VOCAB, dim), nn.Embedding(64, dim)
        self.h = nn.ModuleList(block(dim, 4, dropout) for _ in range(layers))
        self.nf = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.drop = nn.Dropout(dropout)
        self.apply(self.draw)
        for path, p in self.named_parameters():
            if path.endswith(("o.weight", "m.2.weight")):
                nn.init.normal_(p, 0, 0.02 / math.sqrt(2 * layers))
        if tied:
            self.head.weight = self.te.weight

    def draw(self, module: nn.Module) -> None:
        """Draw the start of one module."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0, 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def embed(self, ids: Tensor) -> Tensor:
        return self.drop(self.te(ids) + self.pe(torch.arange(ids.shape[1], device=ids.device)))

    def blocks(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.nf(x))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.logits(self.blocks(self.embed(ids)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def small() -> GPT:
    """Return the model of most cases."""
    return GPT(64, 4)


def untied() -> GPT:
    """Return the same model with a head of its own."""
    return GPT(64, 4, tied=False)


def made_of(block: type[Block]) -> Callable[[], GPT]:
    """Return a maker of the small model with blocks of another class."""
    return lambda: GPT(64, 4, block=block)


def with_one(block: type[Block], index: int) -> Callable[[], GPT]:
    """Return a maker of the small model in which one block behaves as another class."""

    def make() -> GPT:
        model = small()
        model.h[index].__class__ = block
        return model

    return make


class LoRA(nn.Module):
    """A frozen map with an adapter of low rank."""

    def __init__(self, frozen: nn.Linear, rank: int = 4):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + x @ self.down.T @ self.up.T

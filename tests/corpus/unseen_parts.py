"""Parts that the cases of ``unseen`` share: text-like ids, parameter groups and a plain decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, BOS, EOS = 0, 1, 2
FIRST = 3
"""The first id that stands for a word; those below are special."""


def text(rows: int, length: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Draw ids whose frequencies fall like those of words."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(2, vocabulary - FIRST + 2)
    drawn = torch.multinomial(weights, rows * length, replacement=True, generator=generator)
    order = torch.randperm(vocabulary - FIRST, generator=generator)
    return order[drawn].reshape(rows, length) + FIRST


def padded(lengths: list[int], length: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows that end with EOS and are padded on the right, and the mask of their real tokens."""
    ids = text(len(lengths), length, vocabulary, seed)
    ends = torch.tensor(lengths)[:, None]
    at = torch.arange(length)[None]
    ids = ids.masked_fill(at == ends - 1, EOS).masked_fill(at >= ends, PAD)
    return ids, (at < ends).long()


def left_padded(lengths: list[int], length: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows that are padded on the left, and the mask of their real tokens."""
    starts = length - torch.tensor(lengths)[:, None]
    mask = torch.arange(length)[None] >= starts
    return text(len(lengths), length, vocabulary, seed).masked_fill(~mask, PAD), mask.long()


def groups(model: nn.Module, decay: float = 0.1) -> list[dict[str, Any]]:
    """Split the trainable parameters: matrices are decayed, vectors are not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(lr: float, decay: float = 0.1) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that builds AdamW for a model."""
    return lambda model: torch.optim.AdamW(groups(model, decay), lr=lr, betas=(0.9, 0.95))


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token."""
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def next_real_token(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of the next token over the real tokens of padded rows."""
    logits = model(batch["ids"])[:, :-1]
    targets = batch["ids"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)


def draw(module: nn.Module) -> None:
    """Draw weights as GPT-2 does: a normal with a deviation of 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def heads_of(x: Tensor, heads: int) -> Tensor:
    """Split the features into heads: [B, T, D] to [B, H, T, D / H]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class CausalAttention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, d: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A feed-forward with GELU."""

    def __init__(self, d: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(d, 4 * d)
        self.proj = nn.Linear(4 * d, d)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.proj(F.gelu(self.up(x))))


class Block(nn.Module):
    """A Pre-LN block."""

    def __init__(self, d: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(d)
        self.attn = CausalAttention(d, heads, dropout)
        self.ln_2 = nn.LayerNorm(d)
        self.mlp = Mlp(d, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """A small GPT-2: learned positions, Pre-LN, a head that is tied to the embedding."""

    block: type[nn.Module] = Block

    def __init__(self, vocabulary: int = 200, d: int = 64, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, d)
        self.wpe = nn.Embedding(64, d)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(self.block(d, 4, dropout) for _ in range(depth))
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocabulary, bias=False)
        self.apply(draw)
        for name, weight in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth))
        self.lm_head.weight = self.wte.weight

    def embed(self, ids: Tensor) -> Tensor:
        """Return the sum of the embeddings of tokens and positions."""
        return self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of features by the angles of their positions."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def angles(length: int, width: int, base: float = 10000.0) -> Tensor:
    """Return the angles [length, width / 2] of rotary positions."""
    rates = base ** (-torch.arange(0, width, 2).float() / width)
    return torch.arange(length).float()[:, None] * rates[None]


class SwiGlu(nn.Module):
    """A gated feed-forward without biases."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d, hidden, bias=False)
        self.up = nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MaskedAttention(nn.Module):
    """Attention with separate projections and a mask of the pairs that may see each other."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        q = heads_of(self.query(x), self.heads)
        k, v = heads_of(self.key(memory), self.heads), heads_of(self.value(memory), self.heads)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(2))


class MaskedLayer(nn.Module):
    """A Pre-LN layer of masked self-attention, with attention to a memory if it is a crossing one."""

    def __init__(self, d: int, heads: int = 4, *, crossing: bool = False) -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(d)
        self.attn = MaskedAttention(d, heads)
        if crossing:
            self.norm_cross = nn.LayerNorm(d)
            self.cross = MaskedAttention(d, heads)
        self.norm_mlp = nn.LayerNorm(d)
        self.mlp = Mlp(d)

    def forward(
        self, x: Tensor, seen: Tensor, memory: Tensor | None = None, memory_seen: Tensor | None = None
    ) -> Tensor:
        normed = self.norm_attn(x)
        x = x + self.attn(normed, normed, seen)
        if memory is not None:
            x = x + self.cross(self.norm_cross(x), memory, memory_seen)
        return x + self.mlp(self.norm_mlp(x))

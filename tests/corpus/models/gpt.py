"""A decoder of the GPT-2 kind: learned positions, Pre-LN, a head that is tied to the embedding."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import VOCAB

from .parts import causal, draw, heads_of

HEADS = 4


class Attention(nn.Module):
    """Causal self-attention with one packed map for queries, keys and values."""

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores `[B, H, T, T]` of keys for queries `[B, H, T, w]`."""
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])

    def sees(self, length: int, device: torch.device) -> Tensor:
        """Return which tokens `[T, T]` see which."""
        return causal(length, device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the mean value `[B, H, T, w]` of each query, over the tokens that it sees."""
        hidden = ~self.sees(q.shape[-2], q.device)
        weights = self.scores(q, k).masked_fill(hidden, -math.inf).softmax(-1)
        return F.dropout(weights, self.dropout, self.training) @ v

    def merge(self, y: Tensor) -> Tensor:
        """Return the output `[B, T, D]` of heads `[B, H, T, w]`."""
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(part, HEADS) for part in self.qkv(x).chunk(3, -1))
        return self.merge(self.attend(q, k, v))


class Mlp(nn.Module):
    """The feed-forward branch."""

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.act(self.up(x))))


class Block(nn.Module):
    """A Pre-LN layer."""

    def __init__(self, dim: int, dropout: float, attention: type[nn.Module] = Attention):
        super().__init__()
        self.norm_1, self.attn = nn.LayerNorm(dim), attention(dim, dropout)
        self.norm_2, self.mlp = nn.LayerNorm(dim), Mlp(dim, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class PostBlock(Block):
    """A Post-LN layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(x + self.attn(x))
        return self.norm_2(x + self.mlp(x))


class Gpt(nn.Module):
    """A decoder that returns logits, and their loss beside them where it is given targets.

    Radford et al. 2019, Section 2.3 (Language Models are Unsupervised Multitask Learners).
    """

    def __init__(
        self,
        dim: int = 64,
        layers: int = 4,
        *,
        vocab: int = VOCAB,
        dropout: float = 0.1,
        tied: bool = True,
        block: Callable[..., nn.Module] = Block,
    ):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(64, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(block(dim, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.apply(draw)
        for path, parameter in self.named_parameters():
            if path.endswith(("out.weight", "down.weight")):  # what writes to the stream
                nn.init.normal_(parameter, 0, 0.02 / math.sqrt(2 * layers))
        if tied:
            self.head.weight = self.tokens.weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))

    def run(self, x: Tensor) -> Tensor:
        """Return what leaves the last block."""
        for block in self.blocks:
            x = block(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        logits = self.logits(self.run(self.embed(ids)))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


untied = partial(Gpt, tied=False)
"""Makes the same model with a head of its own."""
steady = partial(Gpt, layers=3, dropout=0.0)
"""Makes a smaller model without dropout."""


def gpt_of(part: type[nn.Module]) -> Callable[[], Gpt]:
    """Return a maker of the model with blocks, or with attention, of another class."""
    if issubclass(part, Block):
        return partial(Gpt, block=part)
    return partial(Gpt, block=partial(Block, attention=part))

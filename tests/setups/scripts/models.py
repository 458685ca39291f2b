"""Models of the scripts in this folder."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS = 40


class Block(nn.Module):
    def __init__(self, dim, *, causal=True, reads_memory=False):
        super().__init__()
        self.causal = causal
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )
        if reads_memory:
            self.cross_norm, self.query = nn.LayerNorm(dim), nn.Linear(dim, dim)
            self.memory, self.cross_out = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x, memory=None):
        q, k, v = (heads(t) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(merged(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))
        if memory is not None:
            k, v = (heads(t) for t in self.memory(memory).chunk(2, -1))
            q = heads(self.query(self.cross_norm(x)))
            x = x + self.cross_out(merged(F.scaled_dot_product_attention(q, k, v)))
        return x + self.mlp(x)


def heads(x):
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    def __init__(self, dim=16, layers=2):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, dim), nn.Embedding(32, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, WORDS, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.words(ids) + self.places.weight[: ids.shape[1]])))


class Encoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, dim), nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(Block(dim, causal=False) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Generator(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, dim), nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(Block(dim, reads_memory=True) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids, memory):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, memory)
        return self.norm(x)


def next_token_loss(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def text(rows, width=13, seed=0):
    return torch.randint(1, WORDS, (rows, width), generator=torch.Generator().manual_seed(seed))

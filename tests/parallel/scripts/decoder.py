"""The model and the data of the scripts in this folder."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS = 40
ROWS = 48


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, dim=16, layers=2, *, tied=True):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, dim), nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, WORDS, bias=False)
        self.drop = nn.Dropout(0.1)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids, places=None):
        places = torch.arange(ids.shape[1]) if places is None else places
        x = self.drop(self.words(ids) + self.places(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text(seed=0):
    return torch.randint(1, WORDS, (ROWS, 13), generator=torch.Generator().manual_seed(seed))


def next_token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

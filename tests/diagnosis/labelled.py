"""A small GPT of plain modules, whose batch holds the labels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, VOCAB, LAYERS, TIME = 32, 50, 6, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.scale, self.causal = (DIM // 2) ** -0.5, True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.drop = Attention(), nn.Dropout(0.1)
        self.up, self.act, self.down = nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


TEXT = torch.randint(0, VOCAB, (2, TIME + 1), generator=torch.Generator().manual_seed(1))
BATCH = {"ids": TEXT[:, :-1], "labels": TEXT[:, 1:]}


class Labelled(nn.Module):
    """Takes the labels too, so that they are in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.gpt(ids)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**batch).flatten(0, 1), batch["labels"].flatten())

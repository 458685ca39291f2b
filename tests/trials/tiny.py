"""A tiny model of pairs of tokens, which learns a Markov chain in some ten steps, and its setups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.setups.setup import Setup

VOCAB, DIM, ROWS, LENGTH = 11, 8, 8, 9


class Pairs(nn.Module):
    """Each token predicts the next, through a hidden layer."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embed, self.up = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, 16)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.up(self.embed(ids)))))


def chain() -> Tensor:
    """`[V, V]`: the probabilities of the next token, far from uniform, with frequencies that are not."""
    draw = torch.Generator().manual_seed(0)
    return torch.softmax(2 * torch.randn(VOCAB, VOCAB, generator=draw) + torch.arange(VOCAB) / 3, -1)


class Text:
    """Batches of a Markov chain, the same ones whenever they are read."""

    def __init__(self, number: int = 40):
        draw, p = torch.Generator().manual_seed(1), chain()
        self.batches = []
        for _ in range(number):
            ids = torch.randint(0, VOCAB, (ROWS, 1), generator=draw)
            for _ in range(LENGTH - 1):
                ids = torch.cat([ids, torch.multinomial(p[ids[:, -1]], 1, generator=draw)], 1)
            self.batches.append(ids)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


def entropy(text: Text) -> float:
    """The entropy of the frequencies of the tokens that are predicted."""
    counts = torch.cat([ids[:, 1:].flatten() for ids in text.batches]).bincount().double()
    p = counts[counts > 0] / counts.sum()
    return -float((p * p.log()).sum())


def setup(rate: float = 0.01, *, dropout: float = 0.0, model_class: Any = Pairs, **parts: Any) -> Setup:
    """A model that is drawn the same each time, and AdamW."""
    torch.manual_seed(0)
    model = model_class(dropout) if model_class is Pairs else model_class()
    parts.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=rate))
    return Setup(model, **{"batches": Text(), "loss": loss_of, **parts})


def warmed(optimizer: Any, steps: int = 500) -> torch.optim.lr_scheduler.LambdaLR:
    """A warm-up, then a decay by the cosine."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * t / steps))
    )


def stepped(model: nn.Module, batch: Tensor, optimizer: Any, scheduler: Any) -> Tensor:
    """A step of one's own, which clips."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss

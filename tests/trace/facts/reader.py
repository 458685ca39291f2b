"""A model that reads tokens, and the facts of a step on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from normlab.setups.setup import Declaration
from normlab.trace.facts.facts import Facts
from normlab.trace.trace import Trace

VOCAB, WIDTH = 23, 8


class Residual(nn.Linear):
    """A block that adds a map of its input to it."""

    def forward(self, x):
        return x + super().forward(x)


class Reader(nn.Module):
    """Looks tokens up, adds what a mask or segments give, and puts out logits."""

    def __init__(self, *, rows_second=False, padding_idx=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=padding_idx)
        self.segments = nn.Embedding(2, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Residual(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.rows_second = rows_second

    def forward(self, ids, mask=None, segments=None, documents=None, positions=None):
        ids = ids.T if self.rows_second else ids
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for extra in (mask, documents):
            x = x if extra is None else x + 0.01 * extra.to(x)[..., None]
        x = x if segments is None else x + self.segments(segments)
        x = x if positions is None else x + 0.1 * positions.to(x)[..., None]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits.transpose(0, 1) if self.rows_second else logits


def ids(*, rows=4, width=12, seed=0):
    return torch.randint(3, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


def next_token(model, batch):
    batch = batch if isinstance(batch, dict) else {"ids": batch}
    logits = model(**batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def facts(batch, *, loss=next_token, model=None, **declared):
    return Facts(Trace(model or Reader(), batch, loss), Declaration.of(declared))

"""Small models that several files of tests use, so that each is defined once.

The decoders that a room of tests breaks in one place live beside it: ``checks/tiny.py``, ``seam/decoder.py``,
``nasty/base.py``, ``diagnosis/labelled.py`` and ``trials/tiny.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PreNorm(nn.Module):
    """x + f(norm(x)) with a feed-forward of two matrices."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.f = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


class PostNorm(nn.Module):
    """norm(x + W x + b)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.branch, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.branch(x))


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Bigrams(nn.Module):
    """Logits `[B, T, V]` of the next token, from each token alone."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, dim), nn.Linear(dim, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Scalar(nn.Module):
    """One number, by which the states of a model are told apart."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((1,), float(value)))


class ManyOutputs(nn.Module):
    """Integers, a tensor of the input's shape, and more of them in a tuple."""

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"ids": torch.arange(3), "hidden": x * 2, "more": (x * 3, torch.tensor(1.0))}

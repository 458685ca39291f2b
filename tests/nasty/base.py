"""A small Transformer that misbehaves in one way or another, with the step that it is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import PreNorm

IDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(1))


class Tiny(nn.Module):
    """Two residual blocks between an embedding and a head; subclasses misbehave before and in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(PreNorm(8) for _ in range(2))
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.1)

    def before(self, ids: Tensor) -> None:
        """What happens as the model is called."""

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, ids: Tensor) -> Any:
        self.before(ids)
        x = self.middle(self.dropout(self.embedding(ids)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cross_entropy(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass
class Case:
    model: nn.Module
    batch: Any = field(default_factory=IDS.clone)
    loss: Callable[..., Tensor] = cross_entropy
    optimizer: Any = None
    scheduler: Any = None
    others: tuple[Any, ...] = ()
    """What the loss uses beside the model."""
    call: Callable[..., Any] | None = None


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def doing(**methods: Any) -> Tiny:
    """A model whose methods do something else."""
    return type("Nasty", (Tiny,), methods)()


@dataclass
class Batch:
    ids: Tensor
    seen: int = 0

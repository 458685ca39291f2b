"""A tiny decoder and its training step, which tests break in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from normlab.checks.check import examine, properties
from normlab.checks.report import Report
from normlab.setups.setup import Setup
from normlab.trace.restore import restored, same_globals, same_random_state
from normlab.trace.step_under_test import StepUnderTest

VOCAB, DIM, ROWS, LENGTH = 23, 16, 4, 8


class Block(nn.Module):
    """A Pre-LN feed-forward block with a causal mean over tokens."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(F.gelu(self.up(y)))


class Decoder(nn.Module):
    """Four blocks between an embedding and a head."""

    def __init__(self, dropout: float = 0.1):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


def tokens() -> Tensor:
    return torch.randint(1, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def groups(model: nn.Module, rate: float = 1e-3) -> torch.optim.AdamW:
    """AdamW that decays matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=rate)


def report_of(*names: str, **setup: Any) -> Report:
    """Test the properties of these names on a tiny training step, parts of which may be replaced."""
    torch.manual_seed(0)
    whole_setup = Setup(**{"model": Decoder(), "batches": tokens(), "loss": loss_of, **setup})
    with restored(whole_setup), same_globals(), same_random_state(0):
        return examine(StepUnderTest(whole_setup), [p for p in properties() if p.name in names])


def first(report: Report) -> tuple[str, str]:
    """Return the property and the place of the first failure."""
    return (report.failures[0].property, report.failures[0].module) if report.failures else ("", "")


StepFunction = Callable[[nn.Module, Any, Any, Any], Any]


def sound(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> Tensor:
    """Two micro-batches, clipped, and a step of the scheduler."""
    model.train()
    optimizer.zero_grad()
    for part in ids.chunk(2):
        (loss_of(model, part) / 2).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return torch.zeros(())

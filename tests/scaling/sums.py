"""A model whose best rate is known to go with one over its width, exactly.

It adds up its weights, so that a step of SGD moves the sum by ``width`` times that of one weight: at equal
rate times width, models of all widths go the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normlab.setups.setup import Setup

STEPS = 16


class Sum(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), torch.randn(()).item() / 4 / width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).pow(2).mean()


def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Targets about 4, above and below it in turn: too low a rate does not arrive, too high a one follows."""
    draw = torch.Generator().manual_seed(seed)
    y = 4 + 0.7 * (-1.0) ** torch.arange(STEPS) + 0.1 * torch.randn(STEPS, generator=draw)
    return [(torch.ones(1), own.reshape(1)) for own in y]


def setup(width: int = 8, seed: int = 0, **parts: Any) -> Setup:
    """The rate is the same at every width."""
    torch.manual_seed(seed)
    model = Sum(width)
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1 / 8, weight_decay=0.0), **parts}
    return Setup(model, batches(seed), squared, **given)


def scaled(width: int = 8, seed: int = 0) -> Setup:
    """The rate goes with one over the width."""
    return setup(width, seed, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1 / width))


def decaying(width: int = 8, seed: int = 0) -> Setup:
    """As scaled, with weight decay."""
    return setup(
        width, seed, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1 / width, weight_decay=0.1)
    )


def slowly(clock: Callable[[float], None]) -> Callable[..., Setup]:
    """A setup whose step takes 0.1 s for each unit of width, on a clock that is handed over."""

    def sized(width: int = 8, seed: int = 0) -> Setup:
        def step(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> Tensor:
            clock(0.1 * width)
            optimizer.zero_grad()
            loss = squared(model, batch)
            loss.backward()
            optimizer.step()
            return loss

        return setup(width, seed, step=step)

    return sized

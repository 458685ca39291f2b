"""A model that calls its only part twice, with a keyword and an output of several fields."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


@dataclass
class Out:
    hidden: Tensor
    more: tuple[Tensor, ...] = ()


class Part(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor) -> Out:
        return Out(x * scale, (x + 1,))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        for _ in range(2):
            x = self.part(x, scale=torch.tensor(2.0)).hidden
        return {"out": x if y is None else x + y}

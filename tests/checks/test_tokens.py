"""The order of tokens is seen, and every input matters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .test_structure import Attending
from .tiny import DIM, LENGTH, Decoder, first, report_of, tokens


class Deaf(Decoder):
    """Reads the ids alone of what it is given."""

    def forward(self, ids: Tensor, high: Tensor, low: Tensor) -> Tensor:
        return super().forward(ids)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**batch)[:, :-1].transpose(1, 2), batch["ids"][:, 1:])


def test_every_input_that_moves_nothing_is_named():
    batch = {"ids": tokens(), "high": torch.rand(4, 3), "low": torch.rand(4, 3)}
    report = report_of("inputs", model=Deaf(), batches=batch, loss=loss_of)
    assert [v.module for v in report.failures] == ["high", "low"]


class Windowed(Attending):
    """Scores that a mask adds minus infinity to, outside of a window."""

    falls = False

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        distance = torch.arange(q.shape[-2])[:, None] - torch.arange(q.shape[-2])
        far = torch.zeros(distance.shape).masked_fill((distance < 0) | (distance > 3), -torch.inf)
        scores = super().scores(q, k) + far
        return scores - distance if self.falls else scores


def windowed(*, falls: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Decoder()
    for i in range(4):
        model.blocks[i] = Windowed()
        model.blocks[i].falls = falls
    return model


def test_a_window_hides_no_lack_of_positions():
    assert first(report_of("order", model=windowed(falls=False))) == ("order", "blocks.0")
    assert report_of("order", model=windowed(falls=True)).holds == ("order",)


class Flat(nn.Module):
    """Attention on a stream of another layout."""

    def __init__(self, layout: str):
        super().__init__()
        self.layout, self.inner = layout, Attending()

    def forward(self, x: Tensor) -> Tensor:
        if self.layout == "streams":
            return x + self.inner(x.sum(2))[:, :, None]
        return self.inner(x.view(-1, LENGTH - 1, DIM)).flatten(0, 1)


class Laid(Decoder):
    """A stream `[B·T, D]` or `[B, T, n, D]`, with learned positions."""

    def __init__(self, layout: str):
        super().__init__()
        self.layout = layout
        self.blocks = nn.ModuleList(Flat(layout) for _ in range(3))
        self.places = nn.Parameter(torch.randn(LENGTH - 1, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places
        x = x.flatten(0, 1) if self.layout == "flat" else x[:, :, None].repeat(1, 1, 2, 1)
        for block in self.blocks:
            x = block(x)
        x = x.view(*ids.shape, DIM) if self.layout == "flat" else x.sum(2)
        return self.head(self.norm(x))


@pytest.mark.parametrize("layout", ["flat", "streams"])
def test_positions_in_a_stream_of_another_layout_are_seen(layout: str):
    torch.manual_seed(0)
    assert report_of("order", model=Laid(layout)).holds == ("order",)

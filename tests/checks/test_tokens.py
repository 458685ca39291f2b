"""The order of tokens is seen, and every input matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .test_called_parts import Blind
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


class InChunks(Decoder):
    """Puts out its loss alone, computed in chunks of positions."""

    size = 11

    def forward(self, ids: Tensor) -> Tensor:
        logits, targets = super().forward(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        pairs = zip(logits.split(self.size), targets.split(self.size), strict=True)
        return torch.stack([F.cross_entropy(*pair, reduction="sum") for pair in pairs]).sum() / len(targets)


class InOne(InChunks):
    size = 10**6


class ByColumns(Decoder):
    """Puts out its loss alone, computed in chunks of columns."""

    def forward(self, ids: Tensor) -> Tensor:
        logits, targets = super().forward(ids)[:, :-1].transpose(1, 2), ids[:, 1:]
        pairs = zip(logits.split(3, -1), targets.split(3, -1), strict=True)
        return (
            torch.stack([F.cross_entropy(*pair, reduction="sum") for pair in pairs]).sum() / targets.numel()
        )


class OneShorter(Decoder):
    """Puts out no logits at the last token."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)[:, :-1]


def shifted(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).transpose(1, 2), ids[:, 1:])


def blind(model: nn.Module) -> nn.Module:
    """Let no token see another."""
    model.blocks = nn.ModuleList(Blind() for _ in range(3))
    return model


def looking_ahead(model: nn.Module) -> nn.Module:
    model.embed.register_forward_hook(lambda _, __, x: x + 0.1 * x.roll(-1, 1))
    return model


KINDS = [(InChunks, None), (InOne, None), (ByColumns, None), (OneShorter, shifted)]


@pytest.mark.parametrize(("kind", "loss"), KINDS)
def test_logits_in_parts_or_one_shorter_are_logits(kind: type[nn.Module], loss: Any):
    names = ("targets", "rows", "causality", "reach")
    assert report_of(*names, model=kind(), loss=loss).holds == names
    assert first(report_of("reach", model=blind(kind()), loss=loss))[0] == "reach"
    assert first(report_of("causality", model=looking_ahead(kind()), loss=loss))[0] == "causality"

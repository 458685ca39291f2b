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


class PackedAttention(Attending):
    """Attention within documents, whose numbers the model sets before it runs."""

    apart: Tensor

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k).masked_fill(self.apart[:, None], -torch.inf)


class Packed(Decoder):
    """Keeps apart what positions or numbers say is packed, and takes more than it reads."""

    def __init__(self, by: str):
        super().__init__()
        self.by = by
        self.blocks = nn.ModuleList(PackedAttention() for _ in range(2))

    def forward(self, ids: Tensor, **given: Tensor) -> Tensor:
        documents = torch.zeros_like(ids)
        if self.by == "positions":
            documents = (given["positions"] == 0).cumsum(1)
        elif self.by == "numbers":
            documents = given["numbers"]
        for block in self.blocks:
            block.apart = documents[:, :, None] != documents[:, None]
        return super().forward(ids)


LENGTHS = (5, 3, 4, 4, 2, 6, 5, 3)
"""Of the documents in four rows of eight."""
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS]).view(4, 8)
NUMBERS = torch.arange(8).repeat_interleave(torch.tensor(LENGTHS)).view(4, 8)
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0)


def packed(by: str, **more: Tensor) -> Any:
    torch.manual_seed(0)
    batch = {"ids": tokens(), "positions": POSITIONS, "numbers": NUMBERS, **more}
    return report_of("documents", "inputs", model=Packed(by), batches=batch, loss=loss_of)


@pytest.mark.parametrize("by", ["positions", "numbers"])
def test_what_repeats_the_bounds_of_documents_is_a_note(by: str):
    report = packed(by, lengths_q=ENDS, lengths_k=ENDS.int(), mask=torch.ones(4, 8, dtype=torch.long))
    assert report.ok
    spare = {"positions", "numbers"} - {by}
    assert [n.module for n in report.notes] == [*spare, "lengths_q", "lengths_k", "mask"]


def test_where_documents_see_each_other_nothing_is_spare():
    report = packed("nothing", lengths=ENDS)
    assert first(report)[0] == "documents"
    assert [v.module for v in report.failures[0].follows] == ["positions", "numbers", "lengths"]


def test_what_says_something_else_than_the_bounds_is_named():
    other = torch.tensor([0, 4, 8, 16, 24, 32])
    report = packed("positions", lengths=other, mask=torch.ones(4, 8).triu(1).long())
    assert [v.module for v in report.failures] == ["lengths", "mask"]


def test_a_mask_of_ones_that_is_not_read_is_named_where_nothing_is_packed():
    batch = {"ids": tokens(), "mask": torch.ones(4, 8, dtype=torch.long)}
    report = report_of("inputs", model=Packed("nothing"), batches=batch, loss=loss_of)
    assert [v.module for v in report.failures] == ["mask"]


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

"""The order of tokens is seen, and every input matters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.trace.repeated import repeated
from normlab.trace.trace import Trace

from .test_called_parts import Blind
from .test_structure import HEADS, Attending, rotated
from .tiny import DIM, LENGTH, ROWS, VOCAB, Decoder, first, report_of, tokens


class Deaf(Decoder):
    """Reads nothing but the ids of what it is given."""

    def forward(self, ids: Tensor, high: Tensor, low: Tensor) -> Tensor:
        return super().forward(ids)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**batch)[:, :-1].transpose(1, 2), batch["ids"][:, 1:])


def test_every_input_that_moves_nothing_is_named():
    batch = {"ids": tokens(), "high": torch.rand(4, 3), "low": torch.rand(4, 3)}
    report = report_of("inputs", model=Deaf(), batches=batch, loss=loss_of)
    assert [v.module for v in report.failures] == ["high", "low"]


class Table(nn.Module):
    """Maps columns of features, which lie side by side, each by a matrix of its own."""

    def __init__(self, *starts: int, by_sum: bool = False):
        super().__init__()
        self.starts, self.by_sum = starts, by_sum
        self.maps = nn.ModuleList(nn.Linear(4, DIM) for _ in starts)
        self.head = nn.Linear(DIM, 3)

    def forward(self, features: Tensor) -> Tensor:
        parts = (features[..., i : i + 4] for i in self.starts)
        x = sum(f(part) for f, part in zip(self.maps, parts, strict=True))
        x = x + features.sum(-1, keepdim=True) if self.by_sum else x
        x = x.mean(1) if x.ndim > 2 else x
        return self.head(x.tanh())


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: Table(0, 4, 8), False),
        (lambda: Table(0, 0, 0), True),
        (lambda: Table(0, 8), True),
        (lambda: Table(0, by_sum=True), False),  # what no map reads may be read in another way
    ],
)
@pytest.mark.parametrize("frames", [(), (5,)])
def test_features_that_nothing_reads_beside_others_are_named(model: Any, named: Any, frames: tuple[int, ...]):
    draw = torch.Generator().manual_seed(0)
    batch = {"features": torch.randn(6, *frames, 12, generator=draw), "labels": torch.arange(6) % 3}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["features"]), batch["labels"])

    report = report_of("inputs", model=model(), batches=batch, loss=loss)
    assert [v.module for v in report.failures] == (["features"] if named else [])


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
    of_batch = [note.module for note in report.notes if note.module != "loss"]
    assert of_batch == [*spare, "lengths_q", "lengths_k", "mask"]


def test_lengths_of_documents_by_row_repeat_their_bounds():
    lengths = torch.tensor([[5, 3, 0], [4, 4, 0], [2, 6, 0], [5, 3, 0]])
    report = packed("positions", lengths=lengths)
    assert report.ok
    assert "lengths" in [n.module for n in report.notes]
    report = packed("positions", lengths=lengths.flip(0))
    assert [v.module for v in report.failures] == ["lengths"]


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


def within_documents(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Ask no document for the beginning of the next one."""
    targets = batch["ids"].masked_fill(batch["positions"] == 0, -100)
    return F.cross_entropy(model(**batch)[:, :-1].transpose(1, 2), targets[:, 1:])


@pytest.mark.parametrize(("loss", "noted"), [(loss_of, ["loss"]), (within_documents, [])])
def test_a_loss_that_asks_for_the_beginning_of_the_next_document_is_noted(loss: Any, noted: list[str]):
    torch.manual_seed(0)
    batch = {"ids": tokens(), "positions": POSITIONS}
    report = report_of("documents", model=Packed("positions"), batches=batch, loss=loss)
    assert report.holds == ("documents",)
    assert [note.module for note in report.notes] == noted


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


class Sunk(Attending):
    """Beside its tokens each query sees a sink that is learnt, and its largest score is taken off."""

    first, way = False, ""

    def __init__(self):
        super().__init__()
        self.sink = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        if self.way == "rotated":
            q = rotated(q)
        if self.way:
            k = rotated(k)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.scores(q, k).masked_fill(later, -torch.inf)
        parts = [scores, self.sink[:, None, None].expand(*scores.shape[:3], 1)]
        together = torch.cat(parts[::-1] if self.first else parts, -1)
        weights = (together - together.amax(-1, keepdim=True)).softmax(-1)
        weights = weights[..., 1:] if self.first else weights[..., :-1]
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


def sunk(way: str, *, is_first: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(0.0)
    for i in range(4):
        model.blocks[i] = Sunk()
        model.blocks[i].way, model.blocks[i].first = way, is_first
    return model


@pytest.mark.parametrize("is_first", [False, True])
def test_positions_are_seen_beside_sinks(*, is_first: bool):
    assert report_of("order", model=sunk("rotated", is_first=is_first)).holds == ("order",)
    report = report_of("order", model=sunk("keys alone", is_first=is_first))
    assert first(report) == ("order", "blocks.0")


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("way", ["", "rotated"])
def test_scores_beside_sinks_are_those_of_tokens(way: str, *, is_first: bool):
    repeated_ids = torch.full((2, LENGTH), 3)
    trace = Trace(
        sunk(way, is_first=is_first).double(), repeated_ids, lambda m, ids: m(ids).mean(), exact=True
    )
    layers = list(repeated(trace, LENGTH))
    assert [layer.scores.shape[-2:] for layer in layers] == [(LENGTH, LENGTH)] * 4
    assert (layers[0].slope > 1e-9) is (way == "rotated")


class Recurrence(nn.Module):
    """Adds what a decaying sum over earlier tokens holds."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for token in self.norm(x).unbind(1):
            state = 0.5 * state + token
            states.append(state)
        return x + self.out(torch.stack(states, 1))


@pytest.mark.parametrize("attention", [(0,), (0, 2), (0, 1, 3)])
def test_attention_may_leave_the_order_to_a_recurrence(attention: tuple[int, ...]):
    torch.manual_seed(0)
    model = Decoder()
    for i in range(4):
        model.blocks[i] = Attending() if i in attention else Recurrence()
    report = report_of("order", model=model)
    assert report.holds == ("order",)
    assert report.notes == ()


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


def test_a_token_that_is_seen_ahead_in_training_alone_is_named():
    model = Decoder()
    model.embed.register_forward_hook(
        lambda module, _, x: x + 0.1 * x.roll(-1, 1) if module.training else None
    )
    assert first(report_of("causality", model=model))[0] == "causality"


class Turning(Attending):
    """A fused attention that rotates queries, or keys, or both."""

    rotates = "qk"

    def branch(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q = rotated(q) if "q" in self.rotates else q
        k = rotated(k) if "k" in self.rotates else k
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MixedWithTheTokenBefore(Decoder):
    """Its mixing tells the first token from the others, and so hides that attention may see no order."""

    def __init__(self, rotates: str):
        super().__init__(0.0)
        self.blocks = nn.ModuleList(Turning() for _ in range(2))
        for block in self.blocks:
            block.rotates = rotates

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1]
        for block in self.blocks:
            x = block(x / x.norm(dim=-1, keepdim=True)) + x
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("rotates", "failing"), [("qk", ("", "")), ("q", ("order", "blocks.0")), ("k", ("order", "blocks.0"))]
)
def test_queries_and_keys_are_turned_alike(rotates: str, failing: tuple[str, str]):
    assert first(report_of("order", model=MixedWithTheTokenBefore(rotates))) == failing


class Gated(Attending):
    """An attention that holds one parameter more."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(DIM))

    def branch(self, x: Tensor) -> Tensor:
        return super().branch(x) * self.gate


@pytest.mark.parametrize(("odd", "failing"), [(Attending, ("order", "blocks.3")), (Gated, ("", ""))])
def test_a_layer_of_another_kind_may_see_no_positions(odd: type[nn.Module], failing: tuple[str, str]):
    torch.manual_seed(0)
    model = Decoder()
    model.blocks = nn.ModuleList([Turning(), Turning(), Turning(), odd()])
    report = report_of("order", model=model)
    assert first(report) == failing
    assert [note.module for note in report.notes] == ([] if failing[0] else ["blocks.3"])


class ImageClasses(Decoder):
    """Cuts images into squares by moving their numbers, and gives each a row of a table, or all one row."""

    SIDE = 4

    def __init__(self, rows_used: int):
        super().__init__(0.0)
        self.rows_used = rows_used
        self.cut, self.read = nn.PixelUnshuffle(self.SIDE), nn.Linear(3 * self.SIDE**2, DIM)
        self.places = nn.Parameter(torch.randn(1, 4, DIM))
        self.blocks = nn.ModuleList(Seeing() for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        x = self.read(self.cut(images).flatten(2).mT) + self.places[:, : self.rows_used]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


class Seeing(Attending):
    """An attention without a mask."""

    def branch(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("rows_used", "failing"), [(4, ("", "")), (1, ("order", "read"))])
def test_patches_that_all_get_one_position_have_no_order(rows_used: int, failing: tuple[str, str]):
    torch.manual_seed(1)
    batch = (torch.rand(5, 3, 8, 8), torch.randint(0, 23, (5,)))
    report = report_of(
        "order",
        model=ImageClasses(rows_used),
        batches=batch,
        loss=lambda model, given: F.cross_entropy(model(given[0]), given[1]),
    )
    assert not report.untestable
    assert first(report) == failing


class InPairs(nn.Module):
    """Tokens that attend by a distance to each other, and no positions."""

    def __init__(self, *, counts: bool = False):
        super().__init__()
        self.embed, self.far, self.head = nn.Embedding(VOCAB, DIM), nn.Embedding(4, 1), nn.Linear(DIM, VOCAB)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.places, self.counts = nn.Embedding(LENGTH, DIM), counts

    def forward(self, ids: Tensor, distances: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.counts:
            x = x + self.places.weight
        bias = self.far(distances)[..., 0]
        return self.head(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=bias))


@pytest.mark.parametrize(("counts", "failing"), [(False, ""), (True, "order")])
def test_what_belongs_to_two_tokens_is_exchanged_with_them(*, counts: bool, failing: str):
    ids = tokens()
    draw = torch.Generator().manual_seed(1)
    distances = torch.randint(0, 4, (ROWS, LENGTH, LENGTH), generator=draw)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(**batch).transpose(1, 2), batch["ids"] * 7 % VOCAB)

    batch = {"ids": ids, "distances": distances}
    setup = {"model": InPairs(counts=counts), "batches": batch, "loss": loss}
    assert first(report_of("order", declare={"positions": False}, **setup))[0] == failing


class SeesWhatCounts(Decoder):
    """Tokens that are not counted see themselves alone, as padding at the end of a packed row does."""

    def forward(self, ids: Tensor) -> Tensor:
        y, alone = super().forward(ids), self.head(self.norm(self.embed(ids)))
        return torch.where((torch.arange(ids.shape[1]) < LENGTH - 3)[:, None], y, alone)


def test_what_the_loss_does_not_ask_for_need_not_see_anything():
    def loss(model: nn.Module, ids: Tensor, *, counted: int) -> Tensor:
        labels = ids[:, 1:].masked_fill(torch.arange(LENGTH - 1) >= counted, -100)
        return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), labels)

    for counted, failing in ((LENGTH - 3, ""), (LENGTH - 1, "reach")):
        report = report_of("reach", model=SeesWhatCounts(0.0), loss=partial(loss, counted=counted))
        assert first(report)[0] == failing

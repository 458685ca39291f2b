"""What stands under padding, how much of it there is and at which end, changes nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import each

from .test_gradients import Attach
from .tiny import DIM, ROWS, VOCAB, Decoder, first, report_of

LENGTH = 10
LENGTHS = (10, 7, 5, 8)


def batch(side: str = "right") -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    places, lengths = torch.arange(LENGTH), torch.tensor(LENGTHS)[:, None]
    mask = places < lengths if side == "right" else places >= LENGTH - lengths
    return {"ids": ids.masked_fill(~mask, 0), "mask": mask.long()}


class Reader(nn.Module):
    """One layer of attention that looks both ways, with positions by a rule."""

    def __init__(self, positions: Any = None, *, masked: bool = True):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(2 * LENGTH, DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB)
        self.positions, self.masked = positions, masked

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.places(self.positions(mask))
        shown = mask[:, None].bool() if self.masked else torch.ones(1, dtype=torch.bool)
        y = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=shown)
        return self.head(x + y)


def columns(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[1])


def tokens_so_far(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp_min(0)


def off_by_one_on_the_left(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - mask[:, :1]).clamp_min(0)


def from_the_end(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[1]).flip(0)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    labels = (batch["ids"] * 7 % VOCAB).masked_fill(batch["mask"] == 0, -100)
    return F.cross_entropy(model(**batch).transpose(1, 2), labels)


def padding_of(model: nn.Module, side: str = "right") -> Any:
    return report_of("padding", model=model, batches=batch(side), loss=loss_of)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", [None, tokens_so_far])
def test_tokens_that_are_counted_by_the_mask_may_be_padded_at_either_end(side: str, positions: Any):
    report = padding_of(Reader(positions), side)
    assert report.holds == ("padding",)
    assert not report.notes


def test_positions_by_column_say_nothing_of_the_other_end():
    report = padding_of(Reader(columns))
    assert report.holds == ("padding",)
    assert "other end" in report.notes[0].evidence
    assert "row cut" in padding_of(Reader(columns), "left").failures[0].evidence


def test_a_table_that_takes_no_column_more_says_nothing_of_the_other_end():
    model = Reader(columns)
    model.places = nn.Embedding(LENGTH, DIM)
    report = padding_of(model)
    assert report.holds == ("padding",)
    assert "other end" in report.notes[0].evidence


def test_positions_that_follow_the_mask_at_one_end_alone_are_named():
    evidence = padding_of(Reader(off_by_one_on_the_left)).failures[0].evidence
    assert "other end" in evidence


def test_positions_that_are_counted_from_the_end_move_with_padding():
    class Fixed(Reader):
        """Takes two widths: that of the batch, and one column more."""

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            if ids.shape[1] < LENGTH:
                raise ValueError("too short")
            return super().forward(ids, mask)

    assert "row cut" in padding_of(Reader(from_the_end)).failures[0].evidence
    assert "more column" in padding_of(Fixed(from_the_end)).failures[0].evidence


def test_a_mask_of_the_loss_alone_suits_a_model_that_looks_back():
    class Causal(Decoder):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return super().forward(ids)

    report = padding_of(Causal())
    assert report.holds == ("padding",)
    assert [note.property for note in report.notes] == ["padding"]


def test_padding_that_is_seen_is_named():
    assert first(padding_of(Reader(masked=False)))[0] == "padding"


class Translator(nn.Module):
    """Reads a source, of another width, whose padding it may mask."""

    def __init__(self, *, masked: bool):
        super().__init__()
        self.source, self.target, self.masked = nn.Embedding(VOCAB, DIM), Decoder(), masked

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        shown = (source != 0)[..., None] if self.masked else torch.ones(1)
        mean = (self.source(source) * shown).sum(1) / shown.expand(*source.shape, 1).sum(1)
        target = self.target
        x = target.embed(ids) + mean[:, None]
        for block in target.blocks:
            x = block(x)
        return target.head(target.norm(x))


@pytest.mark.parametrize("masked", [True, False])
def test_more_padding_of_a_source_changes_nothing(*, masked: bool):
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        return F.cross_entropy(model(batch["source"], ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    ids = torch.randint(1, VOCAB, (ROWS, 7), generator=torch.Generator().manual_seed(1))
    batches = {"source": batch()["ids"], "ids": ids}
    report = report_of(
        "padding", model=Translator(masked=masked), batches=batches, loss=loss, declare={"pad_id": 0}
    )
    assert report.ok is masked, report
    assert masked or "of padding" in report.failures[0].evidence or "row cut" in report.failures[0].evidence


class Coder(nn.Module):
    """Draws the code of a row, and tells its tokens from that; what is coded may hold padding."""

    def __init__(self, *, masked: bool):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(2 * LENGTH, DIM)
        self.head, self.masked = nn.Linear(DIM, VOCAB), masked

    def forward(self, ids: Tensor) -> Tensor:
        shown = (ids != 0)[..., None] if self.masked else torch.ones(*ids.shape, 1)
        mean = (self.embed(ids) * shown).sum(1) / shown.sum(1)
        code = mean + torch.randn_like(mean)
        return self.head(code[:, None] + self.places(columns(ids)))


@pytest.mark.parametrize("masked", [True, False])
def test_what_is_drawn_for_a_row_is_no_padding(*, masked: bool):
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).transpose(1, 2), ids, ignore_index=0)

    report = report_of(
        "padding", model=Coder(masked=masked), batches=batch()["ids"], loss=loss, declare={"pad_id": 0}
    )
    assert first(report)[0] == ("" if masked else "padding")


class Listener(nn.Module):
    """Tells the class of rows of frames by a query, which may see padding."""

    def __init__(self, *, masked: bool):
        super().__init__()
        self.read, self.query = nn.Linear(5, DIM), nn.Parameter(torch.randn(1, DIM))
        self.head, self.masked = nn.Linear(DIM, 3), masked

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        x = self.read(frames)
        shown = columns(frames[..., 0]) < lengths[:, None]
        mask = shown[:, None] if self.masked else None
        query = self.query.expand(len(x), 1, DIM)
        return self.head(F.scaled_dot_product_attention(query, x, x, attn_mask=mask)[:, 0])


@pytest.mark.parametrize(("masked", "failing"), [(True, ""), (False, "padding")])
def test_frames_are_padded_too(*, masked: bool, failing: str):
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["frames"], batch["lengths"]), batch["labels"])

    lengths = torch.tensor(LENGTHS)
    frames = torch.randn(ROWS, LENGTH, 5, generator=torch.Generator().manual_seed(2))
    shown = torch.arange(LENGTH) < lengths[:, None]
    batches = {"frames": frames * shown[..., None], "lengths": lengths, "labels": torch.arange(ROWS) % 3}
    report = report_of("padding", model=Listener(masked=masked), batches=batches, loss=loss)
    assert not report.untestable
    assert first(report)[0] == failing


# --------------------------------------------------------------------------------- the loss and its gradient


class Balanced(Reader):
    """Has experts whose load is balanced, over all columns or over tokens alone."""

    def __init__(self, *, counts_padding: bool, attached: bool = False):
        super().__init__()
        self.counts_padding, self.attached = counts_padding, attached
        self.router = nn.Linear(DIM, 3)
        self.uneven = torch.zeros(())

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        shares = self.router(self.embed(ids)).softmax(-1)
        counted = torch.ones_like(shares[..., 0]) if self.counts_padding else mask.to(shares)
        mean = (shares * counted[..., None]).sum((0, 1)) / counted.sum()
        self.uneven = mean.square().sum()
        logits = super().forward(ids, mask) + shares.sum(-1, keepdim=True) * shares[..., :1]
        return Attach.apply(logits, self.uneven) if self.attached else logits


def balanced(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return loss_of(model, batch) + (0.0 if model.attached else 0.1 * model.uneven)


@each("attached", [{}, {"attached": True}])
def test_a_term_of_the_loss_that_counts_padding_is_named(attached: dict[str, bool]):
    model = Balanced(counts_padding=True, **attached)
    report = report_of("padding", "padded_loss", model=model, batches=batch(), loss=balanced)
    assert report.holds == ("padding",)
    assert first(report) == ("padded_loss", "loss")


@each("side", ["left", "right"])
@each("attached", [{}, {"attached": True}])
def test_a_term_that_leaves_padding_out_is_sound(side: str, attached: dict[str, bool]):
    model = Balanced(counts_padding=False, **attached)
    report = report_of("padded_loss", model=model, batches=batch(side), loss=balanced)
    assert report.holds == ("padded_loss",)


def over_all_places(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["ids"] * 7 % VOCAB
    each_place = F.cross_entropy(model(**batch).transpose(1, 2), labels, reduction="none")
    return (each_place * batch["mask"]).mean()


def over_rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["ids"] * 7 % VOCAB
    each_place = F.cross_entropy(model(**batch).transpose(1, 2), labels, reduction="none")
    return (each_place * batch["mask"]).sum(1).mean()


def test_a_loss_that_is_divided_by_all_places_is_first_named_for_that():
    report = report_of("reduction", "padded_loss", model=Reader(), batches=batch(), loss=over_all_places)
    assert first(report) == ("reduction", "loss")
    assert [v.property for v in report.failures[0].follows] == ["padded_loss"]


def test_a_sum_over_each_row_is_no_matter_of_padding():
    report = report_of("reduction", "padded_loss", model=Reader(), batches=batch(), loss=over_rows)
    assert set(report.holds) == {"reduction", "padded_loss"}
    assert f"{1 / ROWS:.3g}" in report.notes[0].evidence
    assert str(sum(LENGTHS)) in report.notes[0].evidence


def test_without_padding_there_is_nothing_to_add():
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    without_padding = {"ids": ids, "mask": torch.ones(ROWS, LENGTH)}
    report = report_of("padded_loss", model=Reader(), batches=without_padding, loss=loss_of)
    assert set(report.untestable) == {"padded_loss"}


class Rewards(Reader):
    """Gives a row the number of one of its tokens, as a reward model does."""

    def __init__(self, behind: int):
        super().__init__()
        self.behind = behind

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        end = (mask.sum(1) - 1 + self.behind).clamp(max=ids.shape[1] - 1)
        return super().forward(ids, mask).mean(-1).gather(1, end[:, None])[:, 0]


@pytest.mark.parametrize("behind", [0, 1])
def test_one_number_of_a_row_alone_is_compared(behind: int):
    """Of a row that is cut to its tokens, the model gives a single number."""
    report = report_of(
        "padding",
        model=Rewards(behind),
        batches=batch(),
        loss=lambda model, given: model(**given).square().mean(),
    )
    assert first(report) == (("padding", "") if behind else ("", ""))


class TwoTexts(nn.Module):
    """Scores pairs of texts by their mean vectors; the first is read whole, the second without padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)

    def forward(self, queries: Tensor, documents: Tensor) -> Tensor:
        real = (documents != 0)[..., None].float()
        of_documents = (self.embed(documents) * real).sum(1) / real.sum(1)
        return self.out(self.embed(queries).mean(1)) @ of_documents.T


def of_pairs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**batch), torch.arange(ROWS))


def test_of_texts_that_different_ids_fill_up_one_is_filled_with_words():
    ids, mask = batch()["ids"], batch()["mask"] == 0
    pairs = {"queries": ids.flip(0).masked_fill(mask, VOCAB - 1), "documents": ids}
    report = report_of("padded_loss", model=TwoTexts(), batches=pairs, loss=of_pairs)
    assert report.failures == ()
    same = pairs | {"queries": ids.flip(0).masked_fill(mask, 0)}
    report = report_of("padded_loss", model=TwoTexts(), batches=same, loss=of_pairs)
    assert first(report) == ("padded_loss", "loss")


class Voiced(Reader):
    """Reads a text whole, and beside it frames, of which some are padding."""

    def forward(self, ids: Tensor, frames: Tensor) -> Tensor:
        return super().forward(ids, torch.ones_like(ids)) + frames.float().mean()


def test_a_mask_of_something_longer_is_none_of_the_tokens():
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    frames = torch.arange(LENGTH + 4) < torch.tensor([14, 9, 12, 13])[:, None]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(**batch).transpose(1, 2), batch["ids"] * 7 % VOCAB)

    setup = {"model": Voiced(masked=False), "batches": {"ids": ids, "frames": frames}, "loss": loss}
    assert "padding" in report_of("padding", **setup).untestable


def test_padding_that_is_also_a_word_is_told_by_its_places():
    """Turns end with the id that fills up rows."""
    ids = batch()["ids"]
    ids[:, 2] = 0

    def loss(model: nn.Module, batch: dict[str, Tensor], *, behind: int) -> Tensor:
        count = batch["mask"].sum(1, keepdim=True)
        asked = torch.arange(LENGTH - 1) < count - 1 + behind
        labels = batch["ids"][:, 1:].masked_fill(~asked, -100)
        return F.cross_entropy(model(batch["ids"][:, :-1]).transpose(1, 2), labels)

    setup = {"model": Decoder(0.0), "batches": {"ids": ids, "mask": batch()["mask"]}}
    for behind, failing in ((0, ("", "")), (3, ("counted", "loss"))):
        asked = partial(loss, behind=behind)
        assert first(report_of("counted", loss=asked, **setup)) == failing


class LooksBothWays(Reader):
    def __init__(self) -> None:
        super().__init__(masked=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, torch.ones_like(ids))


class LooksBack(Decoder):
    def __init__(self) -> None:
        super().__init__(0.0)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids)


def labelled(length: int, tail: int, *, hidden: bool = True) -> dict[str, Tensor]:
    """Return rows of which one is shorter, and filled up with a token that only the labels tell apart."""
    batch = {"ids": torch.randint(1, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))}
    batch["ids"][2, length:] = tail
    batch["labels"] = batch["ids"].clone()
    if hidden:
        batch["labels"][2, length:] = -100
    return batch


def of_labels(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**batch)[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


@each(("model", "fails"), [(LooksBack, False), (LooksBothWays, True)])
def test_a_tail_that_labels_hide_is_padding(model: type[nn.Module], *, fails: bool):
    torch.manual_seed(0)
    report = report_of("padding", "counted", model=model(), batches=labelled(6, 0), loss=of_labels)
    assert [one.property for one in report.failures] == (["padding"] if fails else [])
    assert "counted" in report.holds
    assert "labels" in report.facts["padding"]


@each("ambiguous", ["one column", "any token", "nothing hidden"])
def test_a_tail_that_may_be_text_is_no_padding(ambiguous: str):
    torch.manual_seed(0)
    batches = {
        "one column": labelled(LENGTH - 1, 0),
        "any token": labelled(6, int(labelled(6, 0)["ids"][0, 0])),
        "nothing hidden": labelled(6, 0, hidden=False),
    }
    report = report_of("padding", model=LooksBothWays(), batches=batches[ambiguous], loss=of_labels)
    assert report.untestable.keys() == {"padding"}

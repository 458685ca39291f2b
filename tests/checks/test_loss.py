"""What the loss asks for, where, with which weight, and what it holds besides."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tiny import DIM, LENGTH, ROWS, VOCAB, Block, Decoder, first, report_of, tokens

Change = Callable[[Tensor], Tensor]


def asking(targets: Change, **settings: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    """A loss of the model on all tokens, with targets that are made of them."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).transpose(1, 2), targets(ids), **settings)

    return loss


def ahead(distance: int) -> Change:
    def targets(ids: Tensor) -> Tensor:
        moved = ids.roll(-distance, 1)
        edge = slice(LENGTH - distance, None) if distance > 0 else slice(0, -distance)
        moved[:, edge] = -100
        return moved

    return targets


@pytest.mark.parametrize("name", ["targets", "reduction", "explained"])
def test_they_hold_for_a_sound_loss(name: str):
    assert report_of(name).holds == (name,)
    assert report_of(name, loss=asking(ahead(1), label_smoothing=0.1)).holds == (name,)


@pytest.mark.parametrize("distance", [0, 2, -1])
def test_targets_that_are_not_one_ahead_fail(distance: int):
    assert first(report_of("targets", loss=asking(ahead(distance)))) == ("targets", "loss")


def test_rolled_targets_and_those_of_other_rows_fail():
    assert first(report_of("targets", loss=asking(lambda ids: ids.roll(-1, 1)))) == ("targets", "loss")
    assert first(report_of("targets", loss=asking(lambda ids: ahead(1)(ids.roll(1, 0))))) == (
        "targets",
        "loss",
    )


def test_a_model_that_shifts_its_inputs_itself_may_ask_for_them():
    class Shifting(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            x = F.pad(self.embed(ids), (0, 0, 1, -1))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    assert report_of("targets", model=Shifting(), loss=asking(ahead(0))).holds == ("targets",)


def test_labels_of_other_rows_fail():
    class Classifier(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).mean(1)

    batch = {"ids": tokens(), "labels": torch.arange(ROWS)}

    def loss(roll: int) -> Any:
        return lambda model, b: F.cross_entropy(model(b["ids"]), b["labels"].roll(roll))

    model = Classifier()
    assert report_of("targets", model=model, batches=batch, loss=loss(0)).holds == ("targets",)
    assert first(report_of("targets", model=model, batches=batch, loss=loss(1))) == ("targets", "loss")


# ---------------------------------------------------------------------------------------------- counted
def padded(end: int = 22) -> tuple[Tensor, Tensor]:
    """Rows that end, and are then filled with 0, and which of their positions are real."""
    ids, lengths = tokens().clamp(max=21), torch.tensor([8, 6, 5, 7])
    real = torch.arange(LENGTH) < lengths[:, None]
    ids[torch.arange(ROWS), lengths - 1] = end
    return ids.masked_fill(~real, 0), real


def masked(hidden: Change, end: int = 22, **declare: Any) -> Any:
    ids, _ = padded(end)
    return report_of(
        "counted",
        batches=ids,
        loss=asking(lambda ids: ahead(1)(ids.masked_fill(hidden(ids), -100))),
        declare={"pad_id": 0, "eos_id": end, **declare},
    )


def test_padding_that_is_counted_fails():
    assert masked(lambda ids: ids == 0).holds == ("counted",)
    assert first(masked(lambda ids: ids < 0)) == ("counted", "loss")


def filled_up_with_ends(*, counted_ends: int, has_mask: bool, shifted: bool) -> Any:
    """Test rows that are filled up with their end, which the labels count ``counted_ends`` times in each."""
    ids, real = padded()
    ids = ids.masked_fill(~real, 22)
    places = torch.arange(LENGTH) - real.sum(1, keepdim=True) + 1
    labels = ids.masked_fill(places >= counted_ends, -100)
    if shifted:
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        targets = batch["labels"] if shifted else F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        return F.cross_entropy(model(batch["ids"]).transpose(1, 2), targets)

    batch = {"ids": ids, "labels": labels} | ({"mask": real.long()} if has_mask else {})
    return report_of("counted", batches=batch, loss=loss)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_the_first_of_the_ends_that_fill_a_row_may_be_counted(*, has_mask: bool, shifted: bool):
    for counted_ends in (0, 1, 2):
        report = filled_up_with_ends(counted_ends=counted_ends, has_mask=has_mask, shifted=shifted)
        failures = [failure.property for failure in report.failures]
        # nothing but a mask or the labels says that the id ends texts, too
        expected = [["counted"] * has_mask, [], ["counted"]][counted_ends]
        assert failures == expected, (counted_ends, report)


def test_an_end_that_is_never_counted_fails():
    assert first(masked(lambda ids: (ids == 0) | (ids == 22))) == ("counted", "loss")
    assert first(masked(lambda ids: ids == 0, end=0)) == ("counted", "loss")


# ---------------------------------------------------------------------------------- reduction, explained
def test_a_sum_and_a_mean_over_ignored_positions_fail():
    loss = asking(ahead(1), reduction="sum")
    assert first(report_of("reduction", loss=loss)) == ("reduction", "loss")
    assert report_of("reduction", loss=loss, step=lambda *_: None).ok

    def over_all(model: nn.Module, ids: Tensor) -> Tensor:
        return asking(lambda x: ahead(1)(x.masked_fill(x == 0, -100)), reduction="none")(model, ids).mean()

    assert first(report_of("reduction", batches=padded()[0], loss=over_all)) == ("reduction", "loss")


def summed_in_a_row(model: nn.Module, ids: Tensor) -> Tensor:
    """Minus the log-probabilities of each row, averaged over rows."""
    each = asking(lambda x: ahead(1)(x.masked_fill(x == 0, -100)), reduction="none")(model, ids)
    return each.sum(1).mean()


def preferred(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of a reward model by the log-probabilities of rows, of which the even ones are better."""
    each = asking(lambda x: ahead(1)(x.masked_fill(x == 0, -100)), reduction="none")(model, ids)
    better, worse = each.sum(1).view(-1, 2).unbind(1)
    return -F.logsigmoid(0.1 * (worse - better)).mean() + 0.2 * each.sum(1).mean()


def scaled(model: nn.Module, ids: Tensor) -> Tensor:
    """Half of what is divided by all positions."""
    return 0.5 * asking(lambda x: ahead(1)(x.masked_fill(x == 0, -100)), reduction="none")(model, ids).mean()


@pytest.mark.parametrize("loss", [summed_in_a_row, preferred])
def test_a_sum_over_a_row_is_not_divided_by_all_positions(loss: Any):
    report = report_of("reduction", batches=padded()[0], loss=loss)
    assert report.ok
    assert {n.module for n in report.notes} == {"loss"}


def test_a_factor_hides_no_division_by_all_positions():
    assert first(report_of("reduction", batches=padded()[0], loss=scaled)) == ("reduction", "loss")


def test_a_sum_over_a_row_is_told_by_shorter_rows():
    report = report_of("reduction", loss=summed_in_a_row)
    assert report.ok
    (note,) = report.notes
    assert f"{1 / ROWS:.3g}" in note.evidence
    assert not report_of("reduction", loss=asking(ahead(1))).notes
    assert not report_of("reduction", loss=lambda m, ids: 0.5 * asking(ahead(1))(m, ids)).notes


def test_softmax_before_the_loss_fails():
    def twice(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).softmax(-1).transpose(1, 2), ahead(1)(ids))

    assert first(report_of("explained", loss=twice)) == ("explained", "loss")


def test_a_term_without_a_gradient_fails_and_one_with_is_noted():
    def penalised(model: nn.Module, ids: Tensor, value: Change) -> Tensor:
        return asking(ahead(1))(model, ids) + value(model.blocks[0].up.weight.square().mean())

    report = report_of("explained", loss=lambda m, x: penalised(m, x, lambda y: y))
    assert report.ok
    assert report.notes
    assert first(report_of("explained", loss=lambda m, x: penalised(m, x, Tensor.detach)))[0] == "explained"
    constant = report_of("explained", loss=lambda m, x: asking(ahead(1))(m, x) + 1)
    assert constant.ok
    assert constant.notes


def test_a_bonus_without_a_gradient_fails_as_a_penalty_does():
    def rewarded(model: nn.Module, ids: Tensor) -> Tensor:
        return asking(ahead(1))(model, ids) - model.blocks[0].up.weight.detach().square().mean()

    assert first(report_of("explained", loss=rewarded)) == ("explained", "loss")


def test_heads_that_look_further_ahead_are_part_of_the_loss():
    class Two(Decoder):
        def __init__(self):
            super().__init__()
            self.further = nn.Linear(16, VOCAB)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.further(x), self.head(self.norm(x))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        z = model(ids)
        return sum(F.cross_entropy(z[i].transpose(1, 2), ahead(2 - i)(ids)) for i in (0, 1))

    assert report_of("targets", "explained", model=Two(), loss=loss).holds == ("targets", "explained")


class Further(Decoder):
    """Has heads for further tokens: on the same features, or in a chain where each reads the token before."""

    def __init__(self, heads: int, *, in_sequence: bool, frozen: bool = False):
        super().__init__(0.0)
        self.requires_grad_(not frozen)
        self.heads = nn.ModuleList(nn.Linear(DIM, VOCAB) for _ in range(heads))
        self.join = nn.Linear(2 * DIM, DIM)
        self.in_sequence = in_sequence

    def forward(self, ids: Tensor) -> list[Tensor]:
        table, x = self.embed(ids), self.embed(ids)
        for block in self.blocks:
            x = block(x)
        outputs = []
        for i, head in enumerate(self.heads):
            if i and self.in_sequence:
                x = self.join(torch.cat((x[:, :-1], table[:, i:]), -1)).tanh()
            outputs.append(head(self.norm(x)))
        return outputs


def asked_for(*distances: int) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return a loss of several heads, each of which is asked for the tokens at one distance."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        pairs = zip(model(ids), distances, strict=True)
        each = [F.cross_entropy(z.transpose(1, 2), ahead(d)(ids)[:, : z.shape[1]]) for z, d in pairs]
        return torch.stack(each).mean()

    return loss


@pytest.mark.parametrize(
    ("in_sequence", "distances"),
    [
        (False, (1, 2, 3)),
        (False, (2, 3, 1)),
        (False, (1, 3)),
        (False, (1, 1)),
        (True, (1, 2, 3)),
        (True, (1, 2)),
    ],
)
def test_heads_may_look_further_ahead_than_the_next_token(in_sequence: Any, distances: tuple[int, ...]):
    model = Further(len(distances), in_sequence=in_sequence)
    assert report_of("targets", model=model, loss=asked_for(*distances)).holds == ("targets",)


@pytest.mark.parametrize(
    ("in_sequence", "distances", "which"),
    [(True, (1, 3), 2), (True, (1, 2, 4), 3), (True, (1, 1), 2), (False, (2, 3), 1), (False, (1, 0), 2)],
)
def test_a_head_whose_targets_are_shifted_wrongly_is_named(
    in_sequence: Any, distances: tuple[int, ...], which: int
):
    model = Further(len(distances), in_sequence=in_sequence)
    report = report_of("targets", model=model, loss=asked_for(*distances))
    assert first(report) == ("targets", "loss")
    assert re.search(rf"\bhead {which} of {len(distances)}\b", report.failures[0].evidence)


@pytest.mark.parametrize("by_main", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_further_head_that_is_divided_by_the_targets_of_the_main_one_is_named(by_main: Any, is_padded: Any):
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        asked = [ahead(d)(ids.masked_fill(ids == 0, -100)) for d in (1, 2)]
        sums = [
            F.cross_entropy(z.transpose(1, 2), y, ignore_index=-100, reduction="sum")
            for z, y in zip(model(ids), asked, strict=True)
        ]
        counts = [int((y >= 0).sum()) for y in asked]
        return sums[0] / counts[0] + 0.3 * sums[1] / counts[0 if by_main else 1]

    batch = padded()[0] if is_padded else tokens()
    report = report_of("reduction", model=Further(2, in_sequence=False), batches=batch, loss=loss)
    # where all rows are full, the heads differ by one factor
    assert [v.property for v in report.failures] == (["reduction"] if by_main and is_padded else [])


class BothWays(Decoder):
    """Reads a text forwards and, with blocks of its own, backwards."""

    def __init__(self):
        super().__init__(0.0)
        self.back, self.first = nn.ModuleList(Block() for _ in range(2)), nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.embed(ids), self.embed(ids).flip(1)
        for block in self.blocks:
            x = block(x)
        for block in self.back:
            y = block(y)
        return self.head(self.norm(x)), self.first(self.norm(y.flip(1)))


@pytest.mark.parametrize(("backwards", "holds"), [(-1, True), (0, False)])
def test_a_head_that_reads_backwards_is_asked_for_the_token_before(backwards: int, holds: Any):
    report = report_of("targets", model=BothWays(), loss=asked_for(1, backwards))
    assert (report.holds == ("targets",)) is holds


@pytest.mark.parametrize("distances", [(2,), (2, 3)])
def test_heads_on_a_frozen_model_may_leave_the_next_token_to_it(distances: tuple[int, ...]):
    model = Further(len(distances), in_sequence=False, frozen=True)
    report = report_of("targets", model=model, loss=asked_for(*distances))
    assert report.holds == ("targets",)
    assert [note.module for note in report.notes] == ["loss"]


class Uneven(Decoder):
    """Keeps a term for its loss that may be the same for all weights."""

    def __init__(self, axis: int):
        super().__init__(0.0)
        self.route, self.axis = nn.Linear(DIM, 3), axis

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        shares = self.route(x).softmax(-1)
        for block in self.blocks:
            x = block(x)
        self.term = shares.sum(self.axis).square().mean()
        return self.head(self.norm(x))


@pytest.mark.parametrize(("axis", "failing"), [(-1, 1), (1, 0)])
def test_a_term_that_is_the_same_whatever_the_weights_is_named(axis: int, failing: int):
    def loss(model: Any, ids: Tensor) -> Tensor:
        return asking(ahead(1))(model, ids) + 0.1 * model.term

    report = report_of("explained", model=Uneven(axis), loss=loss)
    assert len(report.failures) == failing


def test_a_number_that_is_added_to_the_loss_is_noted():
    report = report_of("explained", loss=lambda model, ids: asking(ahead(1))(model, ids) + 0.1)
    assert report.holds == ("explained",)
    assert [note.module for note in report.notes] == ["loss"]


# ------------------------------------------------------------------------------------------- padded frames
class Frames(nn.Module):
    """Predicts the next frame at each place."""

    def __init__(self):
        super().__init__()
        self.into, self.block, self.out = nn.Linear(3, DIM), Block(), nn.Linear(DIM, 3)

    def forward(self, frames: Tensor, _: Tensor) -> Tensor:
        return self.out(self.block(self.into(frames)))


def frames(*, by_mask: bool) -> tuple[Tensor, Tensor]:
    """Return frames that are filled up with zeros, and a mask or the rows' lengths."""
    lengths = torch.tensor([6, 9, 4])
    real = torch.arange(9) < lengths[:, None]
    x = torch.randn(3, 9, 3, generator=torch.Generator().manual_seed(0)) * real[..., None]
    return x, real if by_mask else lengths


@pytest.mark.parametrize("by_mask", [True, False])
@pytest.mark.parametrize("within", [True, False])
def test_a_loss_that_reads_padded_frames_is_named(by_mask: Any, within: Any):
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, said = batch
        real = said if by_mask else torch.arange(9) < said[:, None]
        errors = (model(x, said)[:, :-1] - x[:, 1:]).square().mean(-1)
        counted = real[:, 1:] if within else torch.ones_like(real[:, 1:])
        return (errors * counted).sum() / counted.sum()

    report = report_of("counted", model=Frames(), batches=frames(by_mask=by_mask), loss=loss)
    assert (report.holds == ("counted",)) is within
    assert within or first(report) == ("counted", "loss")


def test_frames_without_a_word_about_padding_are_not_judged():
    x, _ = frames(by_mask=True)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(*batch).square().mean()

    assert (
        "counted" in report_of("counted", model=Frames(), batches=(x, torch.zeros(3)), loss=loss).untestable
    )


def test_a_loss_in_parts_is_explained_and_hides_no_leak():
    class InParts(Decoder):
        early = False

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x) + x.roll(-1, 1) * self.early
            x, targets = self.norm(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            parts = zip(x.chunk(3), targets.chunk(3), strict=True)
            return sum(F.cross_entropy(self.head(z), y, reduction="sum") for z, y in parts) / len(targets)

    model, names = InParts(), ("causality", "explained")
    assert set(report_of(*names, model=model, loss=None).holds) == {*names}
    model.early = True
    assert first(report_of(*names, model=model, loss=None))[0] == "causality"


@pytest.mark.parametrize(
    ("probabilities", "place"),
    [
        (lambda z: z, ("explained", "loss")),
        (lambda z: z.log_softmax(-1), ("", "")),
        (lambda z: (z.softmax(-1) + 1e-4).log(), ("", "")),
    ],
)
def test_nll_loss_is_given_log_probabilities(probabilities: Change, place: tuple[str, str]):
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.nll_loss(probabilities(model(ids[:, :-1])).flatten(0, 1), ids[:, 1:].flatten())

    assert first(report_of("explained", loss=loss)) == place


@pytest.mark.parametrize(
    ("behind", "place"),
    [(F.relu, ("explained", "head")), (lambda z: 3 * torch.tanh(z / 3), ("", "")), (torch.neg, ("", ""))],
)
def test_every_logit_moves_with_its_product(behind: Change, place: tuple[str, str]):
    class Behind(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            return behind(super().forward(ids))

    assert first(report_of("explained", model=Behind(), loss=asking(ahead(1)))) == place


def test_a_function_of_the_cross_entropy_is_noted():
    def focal(model: nn.Module, ids: Tensor) -> Tensor:
        nll = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
        return ((1 - (-nll).exp()) ** 2 * nll).mean()

    report = report_of("explained", loss=focal)
    assert report.ok
    assert "function of" in report.notes[0].evidence

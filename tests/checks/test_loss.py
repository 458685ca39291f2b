"""What the loss asks for, where, with which weight, and what it holds besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tiny import LENGTH, ROWS, VOCAB, Decoder, first, report_of, tokens

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
    everywhere = report_of("reduction", loss=summed_in_a_row)
    assert everywhere.ok, "without padding nothing tells a sum over rows from a share of all positions"


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
    assert "a function of it" in report.notes[0].evidence

"""A loss that multiplies by the head and scores in one function is tested as a loss of logits is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .test_called_parts import Blind, LooksAhead, MixesRows
from .tiny import Decoder, first, report_of, tokens

PADDING = 0
NAMES = ("targets", "rows", "causality", "reach", "explained", "reduction")
Score = Callable[[Tensor, nn.Linear, Tensor], Tensor]


class Fused(torch.autograd.Function):
    """The sum of the losses of all positions; the backward pass makes the product again."""

    @staticmethod
    def forward(ctx, features, weight, targets) -> Tensor:
        ctx.save_for_backward(features, weight, targets)
        return F.cross_entropy(features @ weight.T, targets, reduction="sum")

    @staticmethod
    def backward(ctx, gradient) -> tuple[Any, ...]:
        features, weight, targets = ctx.saved_tensors
        slope = (features @ weight.T).softmax(-1)
        slope = slope - F.one_hot(targets.clamp(min=0), len(weight)).to(slope)
        slope = gradient * slope * (targets >= 0)[:, None]
        return slope @ weight, slope.T @ features, None


def by_function(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return Fused.apply(features, head.weight, targets)


def by_torch(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return F.linear_cross_entropy(features, head.weight, targets, reduction="sum")


def summed(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(features), targets, reduction="sum")


def recomputed(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    parts = zip(features.split(9), targets.split(9), strict=True)
    return torch.stack([checkpoint(summed, x, head, y, use_reentrant=True) for x, y in parts]).sum()


class Scoring(Decoder):
    """Puts out nothing but its loss on labels."""

    def __init__(self, score: Score, *, averages: bool = True):
        super().__init__(0.0)
        self.score, self.averages = score, averages

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        loss = self.score(self.norm(x).flatten(0, 1), self.head, labels.flatten())
        return loss / (labels >= 0).sum() if self.averages else loss


def labelled(ids: Tensor, distance: int = 1) -> dict[str, Tensor]:
    labels = ids.roll(-distance, 1)
    labels[:, -distance:] = -100
    return {"ids": ids, "labels": labels}


SCORES = [by_function, by_torch, recomputed]


@pytest.mark.parametrize("score", SCORES)
def test_a_sound_one_holds(score: Score):
    report = report_of(*NAMES, model=Scoring(score), batches=labelled(tokens()), loss=None)
    assert set(report.holds) == {*NAMES}
    assert not report.notes


@pytest.mark.parametrize("score", SCORES)
def test_targets_that_are_shifted_twice_fail(score: Score):
    report = report_of("targets", model=Scoring(score), batches=labelled(tokens(), 2), loss=None)
    assert first(report) == ("targets", "loss")


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("name", "block"), [("causality", LooksAhead), ("rows", MixesRows), ("reach", Blind)]
)
def test_faults_of_blocks_are_seen(score: Score, name: str, block: type[nn.Module]):
    model = Scoring(score)
    model.blocks = nn.ModuleList(block() for _ in range(3))
    assert first(report_of(name, model=model, batches=labelled(tokens()), loss=None))[0] == name


@pytest.mark.parametrize("score", SCORES)
def test_padding_that_is_counted_fails(score: Score):
    ids = tokens()
    ids[0, 5:] = ids[1, 6:] = PADDING
    batch = labelled(ids)
    rest: dict[str, Any] = {"loss": None, "declare": {"pad_id": PADDING}}
    assert first(report_of("counted", model=Scoring(score), batches=batch, **rest)) == ("counted", "loss")
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == PADDING, -100)
    assert report_of("counted", model=Scoring(score), batches=batch, **rest).holds == ("counted",)


@pytest.mark.parametrize("score", SCORES)
def test_a_sum_is_told_from_a_mean(score: Score):
    def in_halves(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> None:
        for half in (slice(0, 2), slice(2, None)):
            model(**{name: x[half] for name, x in batch.items()}).backward()
        optimizer.step()

    model = Scoring(score, averages=False)
    rest: dict[str, Any] = {"batches": labelled(tokens()), "loss": None}
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    report = report_of("reduction", model=model, optimizer=sgd, step=in_halves, **rest)
    assert [one.property for one in (*report.failures, *report.notes)] == ["reduction"]

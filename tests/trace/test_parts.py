"""A large batch is tested by a part that the model takes; where it takes none, the reason is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.checks.check import examine, properties
from normlab.setups.setup import Setup
from normlab.trace import parts
from normlab.trace.budget import Deadline
from normlab.trace.description import describe
from normlab.trace.preparation import prepare
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import tensors_in

VOCAB, WIDTH, ROWS, COLUMNS = 11, 8, 6, 80


class Scorer(nn.Module):
    """Scores the targets that it is given, whose entries must lie next to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embed(ids))
        return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


class TimeFirst(Scorer):
    """The same, for ids `[B, T]` and targets in a dictionary, which it flattens time first."""

    def forward(self, ids: Tensor, more: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embed(ids.view(ids.shape[0], -1)))
        targets = more["targets"].view(ids.shape).T.reshape(-1)
        return logits, F.cross_entropy(logits.transpose(0, 1).reshape(-1, VOCAB), targets)


class Fixed(Scorer):
    """The same, for rows of one width."""

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(ids.view(-1, COLUMNS), targets.view(-1, COLUMNS))


class FixedRows(Scorer):
    """The same, for one number of rows."""

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if len(ids) != ROWS:
            raise ValueError(f"there must be {ROWS} rows")
        return super().forward(ids, targets)


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Ids of a batch that is large for a small model."""
    monkeypatch.setattr(parts, "LARGE", 0)
    return torch.randint(VOCAB, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))


def step_of(model: nn.Module, batch: Any) -> StepUnderTest:
    return StepUnderTest(Setup(model, batch))


@pytest.mark.parametrize("drawn", ["whole", "columns of a longer text", "transposed"])
def test_a_model_that_views_its_targets_runs_on_a_part(ids: Tensor, drawn: str) -> None:
    text = {
        "whole": ids,
        "columns of a longer text": torch.cat([ids, ids], 1)[:, :COLUMNS],
        "transposed": ids.T.contiguous().T,
    }[drawn]
    assert text.is_contiguous() is (drawn == "whole")
    step = step_of(Scorer(), (text, text.roll(-1, 1).contiguous()))
    assert step.why_whole == ""
    assert {tuple(x.shape) for _, x in tensors_in(step.unchanged.batch)} == {(2, parts.COLUMNS)}
    assert all(x.is_contiguous() for _, x in tensors_in(step.unchanged.batch))


def test_targets_in_a_mapping_are_taken_apart_in_the_same_way(ids: Tensor) -> None:
    step = step_of(TimeFirst(), (ids, {"targets": ids.roll(-1, 1)}))
    assert step.why_whole == ""
    assert torch.equal(step.facts.tokens.ids, ids[:2, : parts.COLUMNS])


def test_the_whole_batch_is_left_as_it_was(ids: Tensor) -> None:
    targets = ids.T.contiguous().T  # its rows do not lie next to each other
    before = (targets.stride(), targets.data_ptr(), targets.clone())
    step = StepUnderTest(
        Setup(nn.Embedding(VOCAB, WIDTH), (ids, targets), lambda m, batch: m(batch[0]).square().mean())
    )
    assert len(step.unchanged.batch[0]) == 2
    assert (targets.stride(), targets.data_ptr()) == before[:2]
    assert torch.equal(targets, before[2])


def test_a_model_of_one_width_is_tested_on_two_rows(ids: Tensor) -> None:
    step = step_of(Fixed(), (ids, ids.roll(-1, 1)))
    assert step.why_whole == ""
    assert {tuple(x.shape) for _, x in tensors_in(step.unchanged.batch)} == {(2, COLUMNS)}
    assert f"[2, {COLUMNS}] of [{ROWS}, {COLUMNS}]" in describe(step)["batch"]


def test_a_model_of_one_number_of_rows_is_tested_on_the_whole_batch_and_the_reason_is_told(
    ids: Tensor,
) -> None:
    step = step_of(FixedRows(), (ids, ids.roll(-1, 1)))
    assert not step.tests_a_part
    assert "ValueError" in step.why_whole
    assert step.why_whole in describe(step)["batch"]


class Patches(nn.Module):
    """Sees an image as patches of 4 × 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(1, WIDTH, 4, 4), nn.Linear(WIDTH, VOCAB)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.patch(images).flatten(2).transpose(1, 2)).square().mean()


def test_what_a_model_makes_of_images_counts_as_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = Patches(), torch.randn(ROWS, 1, 64, 64)
    size, positions = sum(p.numel() for p in model.parameters()), ROWS * 16 * 16
    for limit, rows in ((positions * size // 2, 2), (positions * size * 2, ROWS)):
        monkeypatch.setattr(parts, "LARGE", limit)
        assert len(step_of(model, images).unchanged.batch) == rows


def test_a_budget_that_the_whole_batch_spends_names_the_reason(ids: Tensor) -> None:
    step = step_of(FixedRows(), (ids, ids.roll(-1, 1)))
    prepare(step)
    step.budget_s = 0.0
    report = examine(step, [p for p in properties() if p.name in ("finite", "targets")])
    assert step.why_whole in report.untestable["targets"]


def test_a_small_batch_is_used_whole_without_a_word() -> None:
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    step = step_of(Scorer(), (ids, ids))
    assert not step.tests_a_part
    assert (step.why_whole, "batch" in describe(step)) == ("", False)


def test_the_time_of_a_pass_is_the_shortest_from_one_beginning_to_the_next() -> None:
    deadline = Deadline(at=9.0, begins=[0.0, 3.0, 3.5])
    assert deadline.begun == 3
    assert deadline.pass_s(now=8.0) == 0.5
    assert Deadline(at=9.0, begins=[1.0]).pass_s(now=3.0) == 2.0

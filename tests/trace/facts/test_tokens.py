"""The ids that a model reads are found in its batch, and how far ahead the targets are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .reader import Reader, facts, ids


def test_tokens_targets_and_shift_of_a_language_model():
    read = facts(ids())
    assert (read.tokens.place, read.shift, read.causal, read.rows) == ((), 1, True, 4)
    assert torch.equal(read.tokens.ids, ids())


@pytest.mark.parametrize(("shift", "causal"), [(0, False), (1, True), (2, True)])
def test_the_shift_is_counted(shift, causal):
    def loss(model, batch):
        return F.cross_entropy(model(batch)[:, : 12 - shift].flatten(0, 1), batch[:, shift:].flatten())

    read = facts(ids(), loss=loss)
    assert (read.shift, read.causal) == (shift, causal)


def test_rows_may_come_second_in_the_model():
    read = facts(ids(width=9), model=Reader(rows_second=True))
    assert torch.equal(read.tokens.ids, ids(width=9))
    assert read.shift == 1


def test_a_part_of_an_entry_is_found_with_its_column():
    def loss(model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    read = facts(ids(width=13), loss=loss)
    assert read.tokens.ids.shape == (4, 12)
    changed = read.with_tokens(read.tokens.ids.roll(1, 0))
    assert torch.equal(changed[:, :-1], ids(width=13)[:, :-1].roll(1, 0))
    assert torch.equal(changed[:, -1], ids(width=13)[:, -1])


def test_a_decoder_reads_its_labels_behind_a_start():
    labels = ids(seed=3)

    def loss(model, batch):
        start = F.pad(batch["labels"], (1, 0), value=0)[:, :-1]
        return F.cross_entropy(model(start).flatten(0, 1), batch["labels"].flatten())

    read = facts({"labels": labels}, loss=loss)
    assert read.tokens.column == -1
    assert read.shift == 1
    later = torch.arange(12).expand(4, 12) > 5
    changed = read.other_tokens(later)["labels"]
    assert torch.equal(changed[:, :5], labels[:, :5])
    assert not torch.equal(changed[:, 5:11], labels[:, 5:11])

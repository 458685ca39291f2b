"""What all ranks read together, as batches of one process."""

from __future__ import annotations

import re

import torch

from normlab.parallel.union import union_of
from parallel.made import rank

IDS = torch.arange(24).reshape(4, 6)


def batches(union):
    return [batch["ids"].tolist() for batch in union.batches]


def test_each_batch_is_counted_once():
    ranks = [rank(i, batch=IDS + 100 * (i // 2)) for i in range(4)]
    union = union_of(ranks, [{"ids": IDS}])
    assert batches(union) == [IDS.tolist(), (IDS + 100).tolist()]
    assert union.described == "2 batches that 4 ranks read"
    assert not union.is_of_parts


def test_sequences_that_are_read_in_parts_are_put_together():
    ranks = [rank(i, batch=IDS[:, 3 * i : 3 * i + 3]) for i in range(2)]
    union = union_of(ranks, [{"ids": IDS}])
    assert batches(union) == [IDS.tolist()]
    assert union.is_of_parts


def test_parts_in_an_unknown_order_are_refused():
    ranks = [rank(i, batch=IDS[:, i::2]) for i in range(2)]
    union = union_of(ranks, [{"ids": IDS}])
    assert not union.batches
    assert re.search(r"\bids\b", union.cannot)


def test_batches_of_other_widths_stay_as_they_are():
    ranks = [rank(0, batch=IDS), rank(1, batch=IDS[:, :5])]
    assert len(union_of(ranks, [{"ids": IDS}]).batches) == 2


def test_batches_under_other_names_are_refused():
    union = union_of([rank(0), rank(1)], [{"tokens": IDS}])
    assert "ids" in union.cannot
    assert "tokens" in union.cannot

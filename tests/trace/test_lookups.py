"""A lookup out of range raises before a kernel reads it, and every other one gives what it always gives."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normlab.trace.lookups import LookupsInRange, lookups_in_range

TABLE = torch.arange(12.0).reshape(4, 3)
LOGITS = torch.zeros(2, 5)
ROWS = torch.tensor([0, 3])
IN_RANGE = {
    "embedding": lambda: F.embedding(ROWS, TABLE),
    "embedding_bag": lambda: F.embedding_bag(ROWS[None], TABLE),
    "index": lambda: TABLE[torch.tensor([-4, 3])],
    "second_dimension": lambda: TABLE[:, torch.tensor([2, -3])],
    "after_a_mask": lambda: TABLE[None][torch.ones(1, 4, dtype=torch.bool), torch.tensor([2, 0, 1, 0])],
    "index_put": lambda: TABLE.clone().index_put_((ROWS,), torch.tensor(1.0)),
    "index_select": lambda: TABLE.index_select(1, torch.tensor([2])),
    "gather": lambda: TABLE.gather(1, torch.tensor([[2]])),
    "scatter": lambda: TABLE.scatter(1, torch.tensor([[2]]), 1.0),
    "nothing": lambda: F.embedding(torch.zeros(0, dtype=torch.long), TABLE),
    "ignored": lambda: F.cross_entropy(LOGITS, torch.tensor([4, -100])),
    "ignored_and_smoothed": lambda: F.cross_entropy(
        LOGITS, torch.tensor([0, 9]), ignore_index=9, label_smoothing=0.1
    ),
    "images": lambda: F.cross_entropy(LOGITS[..., None, None], torch.ones(2, 1, 1, dtype=torch.long)),
}
OUT_OF_RANGE = {
    "embedding": lambda: F.embedding(torch.tensor([4]), TABLE),
    "negative": lambda: F.embedding(torch.tensor([-1]), TABLE),
    "embedding_bag": lambda: F.embedding_bag(torch.tensor([[4]]), TABLE),
    "index": lambda: TABLE[torch.tensor([-5])],
    "second_dimension": lambda: TABLE[:, torch.tensor([3])],
    "index_put": lambda: TABLE.clone().index_put_((torch.tensor([4]),), torch.tensor(1.0)),
    "index_select": lambda: TABLE.index_select(1, torch.tensor([3])),
    "gather": lambda: TABLE.gather(1, torch.tensor([[3]])),
    "scatter": lambda: TABLE.scatter(1, torch.tensor([[3]]), 1.0),
    "class": lambda: F.cross_entropy(LOGITS, torch.tensor([5, 0])),
    "smoothed_class": lambda: F.cross_entropy(LOGITS, torch.tensor([0, 5]), label_smoothing=0.1),
}


@pytest.mark.parametrize("name", IN_RANGE)
def test_a_lookup_in_range_gives_what_it_gives(name):
    expected = IN_RANGE[name]()
    with LookupsInRange():
        assert torch.equal(IN_RANGE[name](), expected)


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_lookup_out_of_range_raises_before_its_kernel(name):
    # no kernel of torch uses this word
    with LookupsInRange(), pytest.raises(IndexError, match="entries"):
        OUT_OF_RANGE[name]()


def test_a_cpu_needs_no_mode():
    assert isinstance(lookups_in_range(nn.Linear(2, 2)), nullcontext)

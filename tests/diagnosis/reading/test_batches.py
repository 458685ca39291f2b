"""Another tensor in the place of one in a batch, whatever holds it."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from normlab.diagnosis.reading.batches import at, replaced, tokens
from normlab.trace.tensors import tensors_in

IDS, LABELS = torch.arange(8).view(2, 4), torch.arange(8, 16).view(2, 4)


@dataclass(frozen=True)
class Held:
    ids: Tensor
    labels: Tensor


Named = namedtuple("Named", "ids labels")


@pytest.mark.parametrize(
    "batch",
    [
        Held(IDS, LABELS),
        Named(IDS, LABELS),
        (IDS, LABELS),
        [IDS, LABELS],
        {"ids": IDS, "labels": LABELS},
        {"first": [Held(IDS, LABELS)]},
        Held(Named(IDS, IDS), LABELS),
    ],
)
def test_one_tensor_is_replaced_and_nothing_else(batch):
    before = dict(tensors_in(batch))
    for place, x in tokens(batch).items():
        assert at(batch, place) is x
        changed = replaced(batch, place, -x)
        assert type(changed) is type(batch)
        found = dict(tensors_in(changed))
        assert found.keys() == before.keys()
        assert torch.equal(found.pop(place), -x)
        assert all(y is before[other] for other, y in found.items())
    assert all(y is before[place] for place, y in tensors_in(batch))

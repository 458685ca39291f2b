"""What functions that read parameters would return at other values, against the same by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normlab.trace.functions import Readings


class Every(nn.Module):
    """Reads parameters in many ways: looked up, tied, cast, split, scaled, and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.packed, self.scale = nn.Parameter(torch.randn(12, 6)), nn.Parameter(torch.randn(6))
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, ids):
        x = self.norm(self.table(ids))
        query, _ = self.packed.double().float().T.chunk(2, dim=-1)
        x = x + x @ (query * self.scale.abs()[None])
        x += self.attend(x, x, x)[0]
        x *= self.scale
        return F.linear(x, self.table.weight)


@pytest.fixture
def seen():
    torch.manual_seed(0)
    model = Every()
    others = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    ids = torch.randint(0, 7, (2, 3))
    readings = []
    with torch.no_grad(), Readings(model, others, readings.append):
        value = model(ids)
    return model, others, ids, value, {(r.parameter, r.nth): r for r in readings}


def test_readings_are_those_of_the_model(seen):
    model, _, ids, value, readings = seen
    assert torch.equal(value, model(ids))
    whole = {name for name, _ in readings}
    assert whole == {n for n, _ in model.named_parameters()} - {"scale"}  # by which another is scaled
    assert [nth for name, nth in readings if name == "table.weight"] == [0, 1]


def test_changes_are_those_by_hand(seen):
    model, others, ids, _, readings = seen
    table, other = model.table.weight, others["table.weight"]
    torch.testing.assert_close(readings["table.weight", 0].change, (table - other)[ids])
    x = model.norm(table[ids])
    gain = F.layer_norm(table[ids], (6,)) * (model.norm.weight - others["norm.weight"])
    torch.testing.assert_close(readings["norm.weight", 0].change, gain)
    query, was = (w.T[:, :6] for w in (model.packed, others["packed"]))
    scale, scaled = (s.abs()[None] for s in (model.scale, others["scale"]))
    torch.testing.assert_close(readings["packed", 0].change, x @ (query * scale - was * scaled))


def test_a_reading_is_changed_alone(seen):
    model, others, ids, value, readings = seen
    with torch.no_grad(), Readings(model, others, lambda _: None, frozenset({("table.weight", 1)})):
        instead = model(ids)
    torch.testing.assert_close(value - instead, readings["table.weight", 1].change)

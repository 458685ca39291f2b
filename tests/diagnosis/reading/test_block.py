"""Blocks that share modules with each other, whose norms are functions, or without a stream of sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import each
from contracts.variants import build, inputs, uniform
from diagnosis.following import UNREAD, alike, follow, shape_of
from normlab.diagnosis import read_structure
from normlab.diagnosis.block import BlockReader
from normlab.errors import UserError

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A Post-LN layer of two branches."""

    def __init__(self, mlp: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.attention, self.own = nn.Linear(8, 8), nn.LayerNorm(8)
        self.mlp, self.norm = mlp, norm

    def forward(self, x):
        x = self.own(x + self.attention(x))
        return self.norm(x + self.mlp(x))


class Net(nn.Module):
    def __init__(self, *, common: bool, norms: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        mlp, norm = nn.Linear(8, 8), nn.LayerNorm(8)
        if common:
            self.mlp = mlp
        self.layers = nn.ModuleList(Block(mlp, norm if norms else nn.LayerNorm(8)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_branch_that_blocks_share_is_read_and_named():
    for common in (False, True):
        model = Net(common=common, norms=False)
        structure = read_structure(model, X)
        assert shape_of(structure) == {"layers": alike(3, "self_attention ffn", "post")}
        follow(model, X, structure)
        path = "mlp" if common else "layers.0.mlp"
        branches = [str(view.branch) for view in structure.stacks[0].sublayers if view.role == "ffn"]
        assert branches == [f"{path}.output", f"{path}.output of call 1", f"{path}.output of call 2"]


def test_a_norm_that_blocks_share_is_one_in_each():
    model = Net(common=False, norms=True)
    structure = read_structure(model, X)
    assert shape_of(structure) == {"layers": alike(3, "self_attention ffn", "post")}
    assert {v.norm_write for v in structure.stacks[0].sublayers if v.role == "ffn"} == {"layers.0.norm"}
    follow(model, X, structure)


class Functional(nn.Module):
    """A block of two branches, side by side or one after the other, whose norm is a function."""

    def __init__(self, *, parallel: bool) -> None:
        super().__init__()
        self.attention, self.parallel = nn.Linear(8, 8), parallel
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        normed = F.rms_norm(x, (8,))
        attended = self.attention(normed)
        return x + attended + self.mlp(normed if self.parallel else F.rms_norm(x + attended, (8,)))


@pytest.mark.parametrize("parallel", [True, False])
def test_a_norm_that_is_a_function_leaves_in_doubt_whether_branches_are_parallel(parallel):
    model = nn.Sequential(*(Functional(parallel=parallel) for _ in range(2)))
    structure = read_structure(model, X)
    follow(model, X, structure)
    views = structure.stacks[0].sublayers
    assert [view.placement for view in views] == ["other"] * 4
    assert {"parallel branch" in view.relation for view in views} == {parallel}
    assert {"no module" in view.relation for view in views} == {not parallel}


def test_a_sum_of_what_no_module_puts_out_is_not_read(monkeypatch):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert read_structure(model, torch.randn(2, 4, 16)).stacks
    monkeypatch.setattr(BlockReader, "outputs_of", lambda *_: [])
    with pytest.raises(UserError, match=r"\bread\b"):
        read_structure(model, torch.randn(2, 4, 16))


@pytest.mark.slow
@each("name", UNREAD)
def test_what_is_no_stream_of_sums_is_not_read(name):
    model = build(uniform(name))
    with pytest.raises(UserError, match=UNREAD[name]):
        read_structure(model, inputs(model))

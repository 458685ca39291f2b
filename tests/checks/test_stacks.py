"""Which parameters of blocks are siblings."""

from __future__ import annotations

from torch import nn

from normlab.trace.facts.stacks import Block, siblings


class Part(nn.Module):
    """A block whose part ``f`` holds an output matrix and, in one of two kinds of block, a norm."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.f = nn.ModuleDict({"out": nn.Linear(4, 4)})
        if normed:
            self.f["norm"] = nn.LayerNorm(4)
        self.scale = nn.LayerNorm(4)


def test_parts_of_two_kinds_that_take_turns_are_siblings_within_their_kind():
    layers = nn.ModuleList(Part(normed=i % 2 == 0) for i in range(4))
    stacks = {"layers": [Block(i, f"layers.{i}", layer) for i, layer in enumerate(layers)]}
    paths = [f"layers.{i}.{inner}" for i in range(4) for inner in ("f.out.weight", "scale.weight")]
    groups = sorted(siblings(stacks, paths).values())
    assert groups == [
        ["layers.0.f.out.weight", "layers.2.f.out.weight"],
        [f"layers.{i}.scale.weight" for i in range(4)],
        ["layers.1.f.out.weight", "layers.3.f.out.weight"],
    ]

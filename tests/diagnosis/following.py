"""What a structure claims, checked by running the model once more on its own weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from contracts.variants import BY_PLACEMENT
from normlab.diagnosis import StackView, Structure, SublayerView
from normlab.trace.tensors import call_model
from normlab.trace.trace import Trace

UNREAD = {
    "x0lambdas": "the stream is changed by what no module puts out",
    "ngpt": "no tensors lead from its input to its output",
    "siamese": "no tensors lead from its input to its output",
}
"""Placements whose stream is not the sum of a shortcut and a branch, and what a reading says of them."""
READABLE = [config for config in BY_PLACEMENT if config.encoder_placement not in UNREAD]


def shape_of(structure: Structure) -> dict[str, list[tuple[int, str, str]]]:
    """Layer, role and placement of every sublayer, by stack."""
    return {s.name: [(v.layer, v.role, v.placement) for v in s.sublayers] for s in structure.stacks}


def alike(layers: int, roles: str, placement: str) -> list[tuple[int, str, str]]:
    """The same for layers of the same roles under one placement."""
    return [(layer, role, placement) for layer in range(layers) for role in roles.split()]


def taps_of(view: SublayerView) -> list:
    return [view.before, view.branch, view.total, view.after, *view.beside]


@torch.no_grad()
def follow(model: nn.Module, batch: Any, structure: Structure) -> None:
    """Assert every equation of the structure, and that each sublayer goes on where the one before ended."""
    model.eval()
    views = [view for stack in structure.stacks for view in stack.sublayers]
    taps = tuple({tap for view in views for tap in taps_of(view)})
    seen = Trace(model, batch, call_model, taps=taps).once().taps
    for stack in structure.stacks:
        for view in stack.sublayers:
            obeys(model, view, seen)
        goes_on(stack, seen)


def obeys(model: nn.Module, view: SublayerView, seen: dict) -> None:
    before, branch, total, after, *beside = (seen[tap] for tap in taps_of(view))
    parts = [torch.tensor(view.shortcut) * before, torch.tensor(view.scale) * branch, *beside]
    close(total, torch.stack([part.reshape(total.shape) for part in parts]).sum(0))
    write = model.get_submodule(view.norm_write) if view.norm_write else nn.Identity()
    close(after, write(total).reshape(after.shape))
    assert branch.abs().max() > 0 or view.scale == 1.0


def goes_on(stack: StackView, seen: dict) -> None:
    for one, following in zip(stack.sublayers, stack.sublayers[1:], strict=False):
        earlier = one.before if one.beside and following.total == one.total else one.after
        close(seen[following.before], seen[earlier])


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y.reshape(x.shape).to(x.dtype), rtol=1e-4, atol=1e-5)

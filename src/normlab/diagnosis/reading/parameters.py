"""Assign parameters to sublayers by the graph of a forward pass, not by names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from normlab.diagnosis.reading.structure import Structure
from normlab.trace.step import nodes_behind
from normlab.trace.tensors import Tap


class Owner(NamedTuple):
    """The place where a parameter acts. ``index`` is None if several sublayers use it, as is ``layer`` unless
    they are of one layer, and ``stack`` unless they are of one stack; then ``role`` is ``shared``, and
    ``other`` outside of all sublayers.
    """

    stack: str | None = None
    index: int | None = None
    layer: int | None = None
    role: str = "other"


def stream_taps(structure: Structure) -> list[Tap]:
    """Return the taps that ``owners`` needs."""
    return [tap for _, view in structure.sublayers for tap in (view.before, view.branch, view.after)]


def owners(model: nn.Module, structure: Structure, seen: Mapping[Tap, Tensor]) -> dict[str, Owner]:
    """Return the owner of every parameter by path.

    A sublayer owns the parameters between the stream before it and the stream after it: those of its branch,
    of its norms and of its factors. ``seen`` holds, from one forward pass with its graph, what
    ``stream_taps`` names. Parameters that need no gradient are not in the graph and are ``other``.
    """
    found: dict[str, list[Owner]] = {path: [] for path, _ in model.named_parameters()}
    path_of = {id(parameter): path for path, parameter in model.named_parameters()}
    ends = {seen[tap].grad_fn for tap in stream_taps(structure)}
    finals = tuple(f"{stack.final_norm}." for stack in structure.stacks if stack.final_norm)
    for stack, view in structure.sublayers:
        own = {seen[view.after].grad_fn, seen[view.branch].grad_fn} - {seen[view.before].grad_fn}
        for node in nodes_behind(seen[view.after].grad_fn, ends - own):
            path = path_of.get(id(getattr(node, "variable", None)), "")
            if path and not path.startswith(finals or ("\n",)):
                found[path].append(Owner(stack, view.index, view.layer, view.role))
    return {path: _joint(those) for path, those in found.items()}


def _joint(those: list[Owner]) -> Owner:
    if len(those) < 2:
        return those[0] if those else Owner()
    stacks, layers = {owner.stack for owner in those}, {(owner.stack, owner.layer) for owner in those}
    stack = those[0].stack if len(stacks) == 1 else None
    return Owner(stack, None, those[0].layer if len(layers) == 1 else None, "shared")

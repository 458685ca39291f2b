"""Recognise norms by what they do, whatever their classes are called."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normlab.diagnosis.recording import Recording
from normlab.trace.copies import copied_model

LARGER = 1000
"""How many times larger the second input is whose output shows whether a module is a norm."""
MOST_GROWTH = 10
"""How many times larger its output may be then: an eps, or a bias, also makes a difference."""


class NormCall(NamedTuple):
    """A call of a norm, with the numbers of its input and its output tensor."""

    path: str
    given: int
    output: int


class Norms:
    """Recognises norms: modules whose output does not grow with their input and whose parameters are at most
    as large as a row.

    Most divide a token by a measure of its size, so that each element changes with the others. Some squash
    each element by itself, as DyT does by tanh (Zhu et al. 2025, arXiv 2503.10622); what makes these norms,
    and not activations, is a gain for each channel.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.is_norm = cache(self._is_norm)  # a module is tried once for each width

    def _is_norm(self, path: str, dim: int) -> bool:
        return _is_norm(self.modules[path], dim)

    def calls(self, recording: Recording, start: int, stop: int) -> Iterator[NormCall]:
        """Yield the calls of norms among these events, the innermost module first.

        A norm takes one tensor, and takes it once, unlike a sum of equal streams.
        """
        entered: dict[tuple[str, int], list[int]] = {}
        for event in recording.events[start:stop]:
            numbers, call = list(event.seen.values()), (event.path, event.call)
            if event.side == "input":
                entered[call] = numbers
                continue
            given = entered.get(call, [])
            if len(given) != 1 or len(numbers) != 1 or given == numbers:
                continue
            (x,), (y,) = given, numbers
            size = recording.sizes[x]
            if recording.sizes[y] == size and self.is_norm(event.path, size[1]):
                yield NormCall(event.path, x, y)


@torch.no_grad()
def _is_norm(module: nn.Module, dim: int) -> bool:
    parameters = list(module.parameters())
    if any(p.numel() > dim for p in parameters):
        return False
    x = torch.randn(1, 8, dim, generator=torch.Generator().manual_seed(0))
    if parameters:
        x = x.to(parameters[0])
    if any(True for _ in module.buffers()):
        module = copied_model(module)  # a batch norm counts its batches
    try:
        small, large = module(x).norm(), module(LARGER * x).norm()
    except Exception:  # it does not take a single tensor
        return False
    has_gains = any(p.numel() == dim for p in parameters)
    return bool(large <= MOST_GROWTH * small) and (has_gains or _relates_elements(module, x))


def _relates_elements(module: nn.Module, x: Tensor) -> bool:
    """Return whether one element of the input `[1, T, D]` changes other elements of the output."""
    changed = x.clone()
    changed[0, 0, 0] += LARGER
    differs = module(changed) != module(x)
    differs[0, 0, 0] = False
    return bool(differs.any())

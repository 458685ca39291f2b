"""Record what enters and leaves every module in one forward pass, in the order in which calls end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normlab.diagnosis.reading.taps import Side, leaves, watching


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, with what ``keep`` made of the floating tensors that enter and leave it."""

    path: str
    given: tuple[Any, ...]
    output: tuple[Any, ...]


@contextmanager
def calls(model: nn.Module, keep: Callable[[Tensor], Any]) -> Iterator[list[ModuleCall]]:
    """Fill the list, inside this block, with the calls of all modules, inner ones before outer ones."""
    entered: list[tuple[str, tuple[Any, ...]]] = []
    found: list[ModuleCall] = []

    def kept(values: Any) -> tuple[Any, ...]:
        return tuple(keep(x) for _, x in leaves(values) if x.is_floating_point() and x.numel())

    def see(path: str, side: Side, values: Any) -> None:
        if side == "input":
            entered.append((path, kept(values)))
            return
        while entered:
            name, given = entered.pop()
            if name == path:
                found.append(ModuleCall(path, given, kept(values)))
                return

    with watching(dict(model.named_modules()), see):
        yield found


def first_change(before: list[ModuleCall], after: list[ModuleCall], least: float) -> tuple[str, float]:
    """Compare two passes: the innermost module whose output changes by more than ``least`` while its input
    does not, and the change of the last output, both in last digits of the largest entry.

    Only calls that both passes make are compared: an expert that receives tokens in one of them is left out.
    """
    place, last, others = "", 0.0, dict(_numbered(after))
    for key, one in _numbered(before):
        if (other := others.get(key)) is None:
            continue
        read, written = _most(one.given, other.given), _most(one.output, other.output)
        if written > least >= read and not place:
            place = one.path
        last = written
    return place, last


def _numbered(calls: list[ModuleCall]) -> Iterator[tuple[tuple[str, int], ModuleCall]]:
    """Yield the calls, each with its path and how many calls of this path came before it."""
    counts = Counter[str]()
    for call in calls:
        yield (call.path, counts[call.path]), call
        counts[call.path] += 1


def _most(one: tuple[Any, ...], other: tuple[Any, ...]) -> float:
    """The largest change among those tensors that both have."""
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if a is not None and b is not None]
    return max((_change(a, b) for a, b in pairs if a.shape == b.shape), default=0.0)


def _change(a: Tensor, b: Tensor) -> float:
    """The largest change, in last digits of the largest entry."""
    digit = a.abs().max().item() * torch.finfo(a.dtype).eps
    return (a - b).abs().max().item() / digit if digit else 0.0

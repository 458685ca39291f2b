"""Record what enters and leaves every module in one forward pass, in the order in which calls end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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

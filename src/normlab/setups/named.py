"""A setup with what to call it, and where in the user's files its parts are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from normlab.setups.setup import Setup
from normlab.trace.tensors import unwrap


@dataclass(frozen=True)
class NamedSetup:
    """A setup, with what to call it and where it comes from."""

    title: str
    setup: Setup
    facts: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    """A run's checkpoint, or the recipe and the id of a configuration; empty for a file."""
    warmup_steps: int = 0
    """Steps over which the rate rises to its peak, in the training ahead, if that is known."""
    mini_batches: Callable[[], Sequence[Any]] = tuple
    """Makes small training batches for studies that take many passes; none if unknown."""


def sources(setup: Setup, places: Iterable[str]) -> dict[str, dict[str, str | int]]:
    """Return ``file`` and ``line`` of each place: of the function behind "loss", "step" and the like, or of
    the class of a module.

    If a class is not in the current folder, as ``nn.Linear``, the nearest enclosing module whose class is
    stands in for it; if there is none, the model's own class does, as a file below its package.
    """
    model = unwrap(setup.model)
    functions = {n: _line(getattr(setup, n)) for n in ("loss", "step", "optimizer", "scheduler")}
    return {place: functions.get(place) or _line_of_module(model, place) for place in places}


def _line_of_module(model: nn.Module, path: str) -> dict[str, str | int]:
    names = path.split(".") if path else []
    for kept in range(len(names), -1, -1):
        with suppress(AttributeError):  # no such module: a parameter, or an entry of the batch
            if line := _line(type(model.get_submodule(".".join(names[:kept])))):
                return line
    return {"file": f"{type(model).__module__.replace('.', '/')}.py", "line": 1}


def _line(code: Any) -> dict[str, str | int] | None:
    """Return the place of a function or class if it is in a file in the current folder."""
    with suppress(OSError, TypeError):  # no source, or built in
        file, line = Path(inspect.getsourcefile(code) or "").resolve(), inspect.getsourcelines(code)[1]
        if file.is_relative_to(Path.cwd()):
            return {"file": file.relative_to(Path.cwd()).as_posix(), "line": max(line, 1)}
    return None

"""Where the code of a setup is, for programs that show a failure beside it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from normlab.trace.setup import Setup
from normlab.trace.tensors import unwrap


def sources(setup: Setup, places: Iterable[str]) -> dict[str, dict[str, str | int]]:
    """Return ``file`` and ``line`` of each place: of the function behind "loss", "step" and the like, or of
    the class of a module.

    Of a class that is not in the current folder, such as ``nn.Linear``, those of the nearest module around it
    whose class is; where there is none, of the model's own class, as a file below its package.
    """
    model = unwrap(setup.model)
    return {place: _of_function(setup, place) or _of_module(model, place) for place in places}


def _of_function(setup: Setup, place: str) -> dict[str, str | int] | None:
    given = getattr(setup, place, None) if place in ("loss", "step", "optimizer", "scheduler") else None
    return _line(given) if given is not None else None


def _of_module(model: nn.Module, path: str) -> dict[str, str | int]:
    names = path.split(".") if path else []
    for kept in range(len(names), -1, -1):
        with suppress(AttributeError):  # no such module: a parameter, or an entry of the batch
            if found := _line(type(model.get_submodule(".".join(names[:kept])))):
                return found
    return {"file": f"{type(model).__module__.replace('.', '/')}.py", "line": 1}


def _line(code: Any) -> dict[str, str | int] | None:
    """The place of a function or class, if that is in a file of the current folder."""
    with suppress(OSError, TypeError):  # no source, or built in
        file, line = Path(inspect.getsourcefile(code) or "").resolve(), inspect.getsourcelines(code)[1]
        if file.is_relative_to(Path.cwd()):
            return {"file": file.relative_to(Path.cwd()).as_posix(), "line": max(line, 1)}
    return None

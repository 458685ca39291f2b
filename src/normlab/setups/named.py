"""A setup with what to call it, and where in the user's files its parts are."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from normlab.base.libraries import is_library
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

    If a class is a library's, such as ``nn.Linear``, the nearest enclosing module whose class is the user's
    stands in for it; if there is none, the model's own class does, as a file below its package. The model's
    class also stands in for what no function of the user's makes, such as an optimizer of torch; its place
    then has the entry ``is_stand_in``.
    """
    model, lines = unwrap(setup.model), dict[str, dict[str, str | int]]()
    functions = {name: _line(getattr(setup, name)) for name in ("loss", "step", "optimizer", "scheduler")}
    for place in places:
        if line := functions.get(place):
            lines[place] = line
        elif place in functions:
            lines[place] = _line_of_module(model, "") | {"is_stand_in": True}
        else:
            lines[place] = _line_of_module(model, place)
    return lines


def _line_of_module(model: nn.Module, path: str) -> dict[str, str | int]:
    """Return the place of the class of the innermost module around a path whose class is the user's; without
    one, the file of the model's class.
    """
    names = path.split(".") if path else []
    for kept in range(len(names), -1, -1):
        with suppress(AttributeError):  # no such module: a parameter, or an entry of the batch
            if line := _line(type(model.get_submodule(".".join(names[:kept])))):
                return line
    return {"file": f"{type(model).__module__.replace('.', '/')}.py", "line": 1}


def _line(code: Any) -> dict[str, str | int] | None:
    """Return the place of a function or class if it is in a file of the user's."""
    if isinstance(code, type):
        return _line_of_class(code)
    with suppress(OSError, TypeError):  # no source, or built in
        return _place(inspect.getsourcefile(code) or "", inspect.getsourcelines(code)[1])
    return None


def _line_of_class(cls: type) -> dict[str, str | int] | None:
    """Return the same for a class.

    Its methods know their file. ``inspect`` asks the module of the class instead, which is gone if a script
    defines it: the script ran as ``__main__``, and ``__main__`` is normlab's again.
    """
    for method in vars(cls).values():
        if not inspect.isfunction(method):
            continue
        code = method.__code__
        with suppress(OSError, ValueError):  # no such file, or none in Python
            for node in ast.walk(ast.parse(Path(code.co_filename).read_bytes())):
                if not isinstance(node, ast.ClassDef) or node.name != cls.__name__:
                    continue
                if node.lineno <= code.co_firstlineno <= (node.end_lineno or node.lineno):
                    return _place(code.co_filename, node.lineno)
    return None


def _place(file: str, line: int) -> dict[str, str | int] | None:
    """Return the place of a line, unless it is in a library. The path of a file below the current folder is
    relative to that.
    """
    path, here = Path(file).resolve(), Path.cwd()
    if not path.is_file() or is_library(file):
        return None
    as_seen = path.relative_to(here) if path.is_relative_to(here) else path
    return {"file": as_seen.as_posix(), "line": max(line, 1)}

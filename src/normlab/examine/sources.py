"""Where the code of a model's modules is, for programs that show a finding beside it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch import nn


def sources(model: nn.Module, paths: Iterable[str]) -> dict[str, dict[str, str | int]]:
    """Return ``file`` and ``line`` of the class of each of these modules.

    Of a class that is not in the current folder, such as ``nn.Linear``, those of the nearest module around it
    whose class is; where there is none, of the model's own class, as a file below its package.
    """
    return {path: _source(model, path) for path in paths}


def _source(model: nn.Module, path: str) -> dict[str, str | int]:
    names = path.split(".") if path else []
    for kept in range(len(names), -1, -1):
        with suppress(AttributeError, OSError, TypeError):  # no such module, no source, a class built in
            kind = type(model.get_submodule(".".join(names[:kept])))
            file = Path(inspect.getsourcefile(kind) or "").resolve()
            line = inspect.getsourcelines(kind)[1]
            if file.is_relative_to(Path.cwd()):
                return {"file": file.relative_to(Path.cwd()).as_posix(), "line": max(line, 1)}
    return {"file": f"{type(model).__module__.replace('.', '/')}.py", "line": 1}

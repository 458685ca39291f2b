"""Where runs can be trained side by side, by name: this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from normlab.errors import UserError, nearest
from normlab.lab.training.jobs import Backend


def _ray() -> Backend:
    try:
        from normlab.lab.training.ray import Ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("--on ray needs Ray; type: pip install 'normlab[cluster]'") from error
    return Ray()


BACKENDS: Final[Mapping[str, Callable[[], Backend]]] = {"local": Backend, "ray": _ray}


def backend(name: str) -> Backend:
    """Return the backend of that name. Raises UserError for an unknown one, or if a library is missing."""
    if name not in BACKENDS:
        raise UserError(f"--on is {name!r}{nearest(name, BACKENDS)}")
    return BACKENDS[name]()

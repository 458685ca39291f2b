"""One case of the corpus: how to build a training step, and what a check must say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

Arguments = dict[str, Any]
"""Keyword arguments of ``normlab.check``: model, batch, loss, optimizer, scheduler, step and so on."""


@dataclass(frozen=True)
class Case:
    """A training step that is built when it is examined.

    A faulty one holds the ``properties`` of which one must fail first, and ``place``, globs of the modules,
    joined by "|", at which that failure may lie ("" for any). A sound one has no properties.
    """

    name: str
    build: Callable[[], Arguments]
    properties: tuple[str, ...] = ()
    place: str = ""

    @property
    def faulty(self) -> bool:
        return bool(self.properties)

    def accepts(self, failed: str, module: str) -> bool:
        """Whether a first failure of this property at this module is the right answer."""
        here = not self.place or any(fnmatchcase(module, glob) for glob in self.place.split("|"))
        return self.faulty and failed in self.properties and here


def collect(cases: dict[str, Case]) -> Callable[..., Any]:
    """Return a decorator that adds a builder to a list of cases: ``@case("causality", place="h.2*")``."""

    def case(*properties: str, place: str = "") -> Callable[..., Any]:
        def add(build: Callable[[], Arguments]) -> Callable[[], Arguments]:
            name = build.__name__
            if name in cases:
                raise ValueError(f"two cases are called {name}")
            cases[name] = Case(name, build, properties, place)
            return build

        return add

    return case

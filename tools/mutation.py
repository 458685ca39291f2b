"""An error that is planted into a copy of the package."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TESTS = ("tests/parity", "tests/oracles", "tests/initial", "tests/nn", "tests/optim")
"""Tests of the methods themselves: trainings of minutes are not needed to catch a wrong equation."""
NEAREST = {"nn/init": ("tests/initial", "tests/nn"), "nn": ("tests/nn",), "optim": ("tests/optim",)}
"""The tests to run first, by where an error is."""


@dataclass(frozen=True)
class Mutation:
    """A planted error: in ``path`` below src/normlab, each old text, found once, becomes its new one."""

    name: str
    path: str
    edits: Mapping[str, str]
    own: tuple[str, ...] = ()
    """The tests that must catch it, where it is not in a method."""

    @property
    def room(self) -> str:
        """The folder of the package that it is in."""
        return self.path.partition("/")[0]

    @property
    def tests(self) -> tuple[tuple[str, ...], ...]:
        """What is collected and run, one after the other, until a test fails."""
        near = next((tests for place, tests in NEAREST.items() if self.path.startswith(f"{place}/")), ())
        far = tuple(tests for tests in TESTS if tests not in near)
        return (self.own,) if self.own else (near, far)

    def plant(self, package: Path) -> None:
        """Change the copy. Raises ValueError where an old text is not found just once: the list is stale."""
        file = package / self.path
        text = file.read_text(encoding="utf-8")
        for old, new in self.edits.items():
            if text.count(old) != 1:
                raise ValueError(
                    f"mutation {self.name!r}: {text.count(old)} times in {self.path}, not once: {old!r}; "
                    "bring the list of mutations up to date"
                )
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
        # Python trusts compiled code by the size of its source and the second of its last change
        Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)

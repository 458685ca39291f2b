"""One case of the corpus: how to build a training step, and what a check must say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

Arguments = dict[str, Any]
"""Keyword arguments of ``normlab.check``: model, batch, loss, optimizer, scheduler, step and so on."""


@dataclass(frozen=True)
class Origin:
    """Where cases come from, so that their figures can be told apart."""

    kind: str
    list: str
    """The list that they were first written in."""
    first_sight: bool = False
    """Whether they were written before any check had been run on them, and committed so."""


PUBLIC = Origin("public report", "cases")
"""Faults that people met in public code, and sound models that were called faulty."""
PLANTED_1 = Origin("planted", "faults")
PLANTED_2 = Origin("planted", "faults2")
PLANTED_3 = Origin("planted", "faults3")
"""What must fail was written down from the fault alone; the check was then written beside these cases."""
DEEP = Origin("planted", "planted")
"""Planted in four architectures of 12 layers and their sound relatives, for an earlier check."""
UNSEEN = Origin("planted", "unseen", first_sight=True)
LATER = Origin("planted", "later", first_sight=True)
COVERING = Origin("planted", "covering")
"""Planted for a property that no other case had as its own."""
LIBRARY_1 = Origin("library", "sound")
LIBRARY_2 = Origin("library", "sound2")
OWN_1 = Origin("own code", "sound")
OWN_3 = Origin("own code", "sound3")


@dataclass(frozen=True)
class Case:
    """A training step that is built when it is judged.

    A faulty one has ``properties``, one of which must fail first, and ``place``: globs of the modules, joined
    by "|", at which that failure may lie ("" for any). A sound one has no properties.
    """

    name: str
    build: Callable[[], Arguments]
    origin: Origin
    properties: tuple[str, ...] = ()
    place: str = ""
    what: str = ""
    """What is broken; of a sound step, what is unusual."""
    thread: str = ""
    """The public report of the fault."""
    not_right: str = ""
    """Why a check does not say today what it should; the case fails once it does."""

    @property
    def faulty(self) -> bool:
        return bool(self.properties)

    @property
    def first_sight(self) -> bool:
        return self.origin.first_sight

    @property
    def right(self) -> str:
        """The verdict that this case must get."""
        return "FIRST" if self.faulty else "ok"

    def accepts(self, failed: str, module: str) -> bool:
        """Whether a first failure of this property at this module is the right answer."""
        here = not self.place or any(fnmatchcase(module, glob) for glob in self.place.split("|"))
        return self.faulty and failed in self.properties and here


CASES: dict[str, Case] = {}
"""Every case of the corpus by its name, once ``corpus.collected`` has been imported."""


def add(case: Case) -> None:
    """Add a case to the corpus."""
    if case.name in CASES:
        raise ValueError(f"two cases are called {case.name}")
    CASES[case.name] = case


def sentence(build: Callable[..., Any]) -> str:
    """Return the first paragraph of a builder's docstring."""
    return " ".join((build.__doc__ or "").split("\n\n")[0].split())


Builder = Callable[..., Arguments]


def fault(
    *properties: str, place: str = "", origin: Origin, thread: str = "", not_right: str = ""
) -> Callable[[Builder], Builder]:
    """Return a decorator that adds a builder as a faulty case: ``@fault("causality", place="blocks.2*")``."""

    def decorate(build: Builder) -> Builder:
        add(Case(build.__name__, build, origin, properties, place, sentence(build), thread, not_right))
        return build

    return decorate


def twins(
    *properties: str, place: str = "", origin: Origin, thread: str = "", not_right: str = ""
) -> Callable[[Builder], Builder]:
    """Return a decorator that adds a builder ``x(*, faulty)`` as the cases ``x``, faulty, and ``x_sound``."""

    def decorate(build: Builder) -> Builder:
        name, what = build.__name__, sentence(build)
        add(Case(name, partial(build, faulty=True), origin, properties, place, what, thread, not_right))
        add(Case(f"{name}_sound", partial(build, faulty=False), origin, what=f"the twin of {name}"))
        return build

    return decorate


def sound(*, origin: Origin, thread: str = "", not_right: str = "") -> Callable[[Builder], Builder]:
    """Return a decorator that adds a builder as a sound case."""

    def decorate(build: Builder) -> Builder:
        what = sentence(build)
        add(Case(build.__name__, build, origin, what=what, thread=thread, not_right=not_right))
        return build

    return decorate

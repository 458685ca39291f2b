"""One case of the second list of public reports: a fault that somebody met, its sound twin, or a sound setup.

These are kept apart from the corpus, whose cases each have a property that must fail: here, no property may
speak of a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from corpus.case import Arguments, Builder, sentence


@dataclass(frozen=True)
class PublicCase:
    """A training step that is built when it is judged, and what its fault is.

    ``named_by`` are the properties that state the cause of the fault, any of which may name it, none where no
    property spoke of it when the case was written; ``since`` are those that do now. ``place`` are globs of
    the modules at which they may name it, joined by "|".
    """

    name: str
    build: Callable[[], Arguments]
    kind: str
    what: str
    faulty: bool
    thread: str = ""
    """The public report as owner/name#number."""
    named_by: tuple[str, ...] = ()
    place: str = "*"
    since: tuple[str, ...] = ()

    @property
    def role(self) -> str:
        """Return "fault", "twin" or "sound"."""
        if self.faulty:
            return "fault"
        return "twin" if self.thread else "sound"

    def is_named_by(self, failed: str, module: str) -> bool:
        """Whether a failure of this property at this module states the cause of the fault."""
        here = any(fnmatchcase(module, glob) for glob in self.place.split("|"))
        return self.faulty and failed in (*self.named_by, *self.since) and here


class CaseList:
    """The cases of one list, by name. Its decorators add builders to it as their modules are imported."""

    def __init__(self) -> None:
        self.cases: dict[str, PublicCase] = {}

    def add(self, case: PublicCase) -> None:
        if case.name in self.cases:
            raise ValueError(f"two cases are called {case.name}")
        self.cases[case.name] = case

    def report(
        self, thread: str, kind: str, *named_by: str, place: str = "*", since: tuple[str, ...] = ()
    ) -> Callable[[Builder], Builder]:
        """Return a decorator that adds a builder ``x(*, faulty)`` as the cases ``x`` and ``x_twin``."""

        def decorate(build: Builder) -> Builder:
            name, what = build.__name__, sentence(build)
            fault, twin = partial(build, faulty=True), partial(build, faulty=False)
            self.add(PublicCase(name, fault, kind, what, True, thread, named_by, place, since))
            self.add(PublicCase(f"{name}_twin", twin, kind, what, False, thread))
            return build

        return decorate

    def sound(self, kind: str) -> Callable[[Builder], Builder]:
        """Return a decorator that adds a builder as a sound setup."""

        def decorate(build: Builder) -> Builder:
            self.add(PublicCase(build.__name__, build, kind, sentence(build), faulty=False))
            return build

        return decorate


LIST = CaseList()
CASES = LIST.cases
"""Every case by its name, once ``public2.collected`` has been imported."""
report, sound = LIST.report, LIST.sound

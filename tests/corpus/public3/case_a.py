"""How cases are added to the first half of the third list; what a case is, the second list says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from corpus.case import Builder, sentence
from corpus.public2.case import PublicCase

CASES: dict[str, PublicCase] = {}
"""Every case of this half by its name, once its modules have been imported."""


def add(case: PublicCase) -> None:
    if case.name in CASES:
        raise ValueError(f"two cases are called {case.name}")
    CASES[case.name] = case


def report(thread: str, kind: str, *named_by: str, place: str = "*") -> Callable[[Builder], Builder]:
    """Return a decorator that adds a builder ``x(*, faulty)`` as the cases ``x`` and ``x_twin``."""

    def decorate(build: Builder) -> Builder:
        name, what = build.__name__, sentence(build)
        fault, twin = partial(build, faulty=True), partial(build, faulty=False)
        add(PublicCase(name, fault, kind, what, True, thread, named_by, place))
        add(PublicCase(f"{name}_twin", twin, kind, what, False, thread))
        return build

    return decorate


def sound(kind: str) -> Callable[[Builder], Builder]:
    """Return a decorator that adds a builder as a sound setup."""

    def decorate(build: Builder) -> Builder:
        add(PublicCase(build.__name__, build, kind, sentence(build), faulty=False))
        return build

    return decorate

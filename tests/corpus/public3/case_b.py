"""The cases of this half: each is a ``PublicCase`` as in the second list, in a collection of its own."""

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


def report(
    thread: str, kind: str, *named_by: str, place: str = "*", since: tuple[str, ...] = ()
) -> Callable[[Builder], Builder]:
    """Return a decorator that adds a builder ``x(*, faulty)`` as the cases ``x`` and ``x_twin``."""

    def decorate(build: Builder) -> Builder:
        name, what = build.__name__, sentence(build)
        faulty = partial(build, faulty=True)
        add(PublicCase(name, faulty, kind, what, True, thread, named_by, place, since))
        add(PublicCase(f"{name}_twin", partial(build, faulty=False), kind, what, False, thread))
        return build

    return decorate


def sound(kind: str) -> Callable[[Builder], Builder]:
    """Return a decorator that adds a builder as a sound setup."""

    def decorate(build: Builder) -> Builder:
        add(PublicCase(build.__name__, build, kind, sentence(build), faulty=False))
        return build

    return decorate

"""A fault and its sound twin, built by one function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .case import Arguments, Case

Builder = Callable[..., Arguments]


def twins(cases: dict[str, Case]) -> Callable[..., Callable[[Builder], Builder]]:
    """Return a decorator that adds a builder ``x(*, faulty)`` as the cases ``x``, faulty, and ``x_sound``."""

    def pair(*properties: str, place: str = "") -> Callable[[Builder], Builder]:
        def add(build: Builder) -> Builder:
            name = build.__name__
            sound = f"{name}_sound"
            cases[name] = Case(name, partial(build, faulty=True), properties, place)
            cases[sound] = Case(sound, partial(build, faulty=False))
            return build

        return add

    return pair

"""Variants by name: a name is taken once, and one that is not there is told with those that are."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

from normlab.errors import UserError

T = TypeVar("T")


class Registry(dict[str, T]):
    """The variants of one ``kind`` (norm, placement, …) by name.

    Raises UserError when a name is given twice, and when one is looked up that nobody registered.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __setitem__(self, name: str, variant: T) -> None:
        if name in self:
            owner = self[name]
            raise UserError(f"the {self.kind} name {name!r} is taken by {getattr(owner, '__name__', owner)}")
        super().__setitem__(name, variant)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters a function under ``name``."""

        def enter(variant: T) -> T:
            self[name] = variant
            return variant

        return enter

    def __missing__(self, name: str) -> NoReturn:
        raise UserError(f"unknown {self.kind} {name!r}{nearest(name, self)}")


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the one that may be meant, and all that are allowed."""
    names = list(allowed)
    close = difflib.get_close_matches(word, names, 1)
    return (f", did you mean {close[0]!r}?" if close else "") + f" (allowed: {', '.join(names)})"

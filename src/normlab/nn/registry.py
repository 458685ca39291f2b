"""Variants by name: no name is registered twice, and an unknown one is refused with a list of known ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeVar

from normlab.errors import UserError, nearest

T = TypeVar("T")


class Registry(dict[str, T]):
    """The variants of one ``kind`` (norm, placement, …) by name.

    Raises UserError when a name is registered twice, and when an unknown one is looked up.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __setitem__(self, name: str, variant: T) -> None:
        if name in self:
            owner = self[name]
            raise UserError(f"the {self.kind} name {name!r} is taken by {getattr(owner, '__name__', owner)}")
        super().__setitem__(name, variant)

    def register(self, name: str, *options: str) -> Callable[[T], T]:
        """Return a decorator that registers a function under ``name``; ``options`` are the fields it reads,
        as in ``Registered``.
        """

        def enter(variant: T) -> T:
            self[name] = variant
            if options:
                vars(variant)["options"] = options
            return variant

        return enter

    def __missing__(self, name: str) -> NoReturn:
        raise UserError(f"unknown {self.kind} {name!r}{nearest(name, self)}")


class Registered:
    """Base of variants: a subclass registers itself under ``name``, an abstract one has none."""

    registry: ClassVar[Registry[Any]]
    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    """Fields of the configuration that have no effect unless a variant that lists them is chosen."""

    def __init_subclass__(cls, *, name: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name:
            cls.registry[name] = cls
            cls.name = name

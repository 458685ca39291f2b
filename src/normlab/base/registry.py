"""Parts by name, which one decorator adds: no name is taken twice, and an unknown one is refused.

Whatever can be added from another file, the user's own included, is in a registry: norms and placements,
properties of a check, studies, effects of papers, configurations, places where runs are trained. A table that
only its own file extends is a plain dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeVar

from normlab.errors import UserError, nearest

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(dict[str, T]):
    """The parts of one ``kind`` (norm, placement, property, …) by name, in the order of their registration.

    Entering the same object again under its name changes nothing, as where two modules bind one study.

    Raises UserError, with the names that there are, if a name is taken, and if an unknown one is looked up.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __setitem__(self, name: str, part: T) -> None:
        if name in self and self[name] is not part:
            owner = getattr(self[name], "__name__", "")
            taken = f"the {self.kind} name {name!r} is taken" + (f" by {owner}" if owner else "")
            raise UserError(f"{taken}; give yours one that is none of {', '.join(self)}")
        super().__setitem__(name, part)

    def __missing__(self, name: str) -> NoReturn:
        raise UserError(f"unknown {self.kind} {name!r}{nearest(name, self)}")

    def register(self, name: str = "", *options: str) -> Callable[[F], F]:
        """Return a decorator that enters a function or a class, which it returns as it is.

        Args:
            name: what it is called; by default its own name.
            options: the fields of the configuration that it reads, as in ``Registered``.
        """

        def enter(part: F) -> F:
            self[name or part.__name__] = part  # type: ignore[assignment]
            if options:
                vars(part)["options"] = options
            return part

        return enter

    def register_made(self, make: Callable[[F], T]) -> Callable[[F], F]:
        """Return a decorator that enters, under a function's own name, what ``make`` makes of the function.

        The function itself is returned as it is, so that others can call it.
        """

        def enter(function: F) -> F:
            self[function.__name__] = make(function)
            return function

        return enter


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

"""Switch fast operations to plain code that autograd can differentiate twice, whoever brings them.

A package with fast operations registers a context manager that switches them. What needs second derivatives,
or must see every call of a torch function, enters ``reference_arithmetic`` and need not know the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final, TypeAlias

Switch: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Makes a context in which operations take their plain path."""

_SWITCHES: Final[list[Switch]] = []


def register_reference(switch: Switch) -> None:
    """Add a package's switch to those that ``reference_arithmetic`` enters."""
    _SWITCHES.append(switch)


@contextmanager
def reference_arithmetic() -> Iterator[None]:
    """Let all registered operations take their plain path within this block.

    A package that has not been imported has registered nothing, but no model can use its operations either.
    """
    with ExitStack() as stack:
        for switch in _SWITCHES:
            stack.enter_context(switch())
        yield

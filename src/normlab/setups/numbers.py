"""Python numbers that a script read out of tensors, and what it computes from them.

``count = mask.sum().item()`` takes a number out of torch, and ``loss = total / max(count, 1)`` puts it back.
While a script is recorded, ``item()`` returns a number that behaves like any other but tells the recorder of
each operation on it, so that the count is computed again when the mask changes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Final, Protocol

OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    **{name: x for name, x in vars(operator).items() if name.startswith("__") and callable(x)},
    # Python computes these by special methods as well, and ``operator`` lacks them
    "__round__": round,
    "__trunc__": math.trunc,
    "__floor__": math.floor,
    "__ceil__": math.ceil,
    "__divmod__": divmod,
}
"""The operations of Python on numbers, by the name of the special method that Python calls for each."""
del OPERATIONS["__index__"]  # it takes the value of an int without asking


class NumberRecorder(Protocol):
    """Who is told of operations on followed numbers."""

    def compute(self, operation: Callable[..., Any], *numbers: Any) -> Any:
        """Return the result of an operation, followed if the recording goes on."""
        ...

    def convert(self, kind: type, number: Any) -> Any:
        """Return a number as a plain ``float``, ``int`` or ``bool``, as the functions of these names must."""
        ...


class FollowedFloat(float):
    """A float whose operations are recorded."""

    recorder: NumberRecorder

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float.__add__(self, 0.0),)  # what is saved or copied is a plain number


class FollowedInt(int):
    """An int whose operations are recorded."""

    recorder: NumberRecorder

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int.__add__(self, 0),)


def _computed(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the special method of an operation, such as ``__add__``."""

    def method(number: Any, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented  # a tensor computes with it by its own method, which is recorded as well
        return number.recorder.compute(operation, number, *others)

    return method


def _reflected(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the special method by which Python computes an operation whose second number is a followed one,
    such as ``__radd__``.
    """

    def method(number: Any, other: Any, *more: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        return number.recorder.compute(operation, other, number, *more)

    return method


def _conversion(kind: type) -> Callable[..., Any]:
    """Return the special method that makes a plain number of a type, such as ``__float__``."""
    return lambda number: number.recorder.convert(kind, number)


def _follow(kind: type) -> None:
    """Let a class of numbers tell its recorder of every operator that Python has for numbers."""
    for name in dir(kind.__base__):
        if name in OPERATIONS:
            setattr(kind, name, _computed(OPERATIONS[name]))
        elif name.startswith("__r") and (ordinary := f"__{name[3:]}") in OPERATIONS:
            setattr(kind, name, _reflected(OPERATIONS[ordinary]))
    for converted in (float, int, bool):
        setattr(kind, f"__{converted.__name__}__", _conversion(converted))


_follow(FollowedFloat)
_follow(FollowedInt)


def is_followed(value: Any) -> bool:
    """Return whether a value is a number that tells a recorder of its operations."""
    return isinstance(value, (FollowedFloat, FollowedInt))


def unfollowed(value: Any) -> Any:
    """Return a followed number as a plain one; other values as they are."""
    # the operators of the base classes, as nobody is to be told of these
    if isinstance(value, FollowedFloat):
        return float.__add__(value, 0.0)
    if isinstance(value, FollowedInt):
        return int.__add__(value, 0)
    return value


def followed(value: Any, recorder: NumberRecorder) -> Any:
    """Return a float or an int as one whose operations are recorded; another value as it is."""
    if isinstance(value, float):
        number: Any = FollowedFloat(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = FollowedInt(value)
    else:
        return value
    number.recorder = recorder
    return number

"""Kinds of numbers, and fields of a configuration that are special: outside the run id, with a changed
default, without a flag.

Every field changes numbers, enters the run id and is a flag of ``normlab train``, with its docstring as the
help text, unless one of these declares it.
"""

from __future__ import annotations

from dataclasses import Field, field
from math import inf
from typing import Annotated, Any, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Lt

T = TypeVar("T")

Count: TypeAlias = Annotated[int, Ge(0), Lt(2**63)]
"""Whole numbers are below 2**63, because tensors cannot hold more."""
Size: TypeAlias = Annotated[int, Ge(1), Lt(2**63)]
Share: TypeAlias = Annotated[float, Ge(0), Lt(1)]
Positive: TypeAlias = Annotated[float, Gt(0), Lt(inf)]
Amount: TypeAlias = Annotated[float, Ge(0), Lt(inf)]
"""A bound refuses NaN as well."""


def machine(default: T, *, flag: bool = True) -> T:
    """A field that does not change numbers (a path, a device, a cadence): it stays out of the run id."""
    return field(default=default, metadata={"numbers": False, "flag": flag})


def since(default: T, *, introduced: T, flag: bool = True) -> T:
    """A field whose default was another one when it was introduced, so that the ids of old runs stay."""
    return field(default=default, metadata={"introduced": introduced, "flag": flag})


def no_flag(default: T) -> T:
    """A field that the command line does not offer: a recipe, a configuration or another flag sets it."""
    return field(default=default, metadata={"flag": False})


def changes_numbers(declared: Field[Any]) -> bool:
    """Whether a field enters the run id."""
    return declared.metadata.get("numbers", True)


def is_flag(declared: Field[Any]) -> bool:
    """Whether the command line offers a field."""
    return declared.metadata.get("flag", True)


def flag_name(name: str) -> str:
    """A field's name as it is typed: ``max_len`` is ``--max-len``."""
    return f"--{name.replace('_', '-')}"

"""Tell what a function of torch does: whether it writes to its arguments, reads their entries, or makes data.

Torch gives no answer to such questions, so they are read off the function's name, arguments and result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from normlab.private_torch import tree_map_only
from normlab.setups.arguments import flattened
from normlab.setups.values import is_value

NO_VALUES: Final = (int, str, type(None), torch.dtype, torch.device, torch.Generator)
"""Types of arguments that no recorded value can be, or be in."""


def is_special(name: str) -> bool:
    """Return whether Python calls a method of this name by itself, as ``int()`` calls ``__int__``: it
    insists on the type that this returns. ``__get__`` does not count: it gives a property, such as ``shape``.
    """
    return name.startswith("__") and name.endswith("__") and name != "__get__"


def is_number(value: Any) -> bool:
    """Return whether a value is a Python number, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def says_nothing(value: Any) -> bool:
    """Return whether a value is one that nothing could be computed from, such as a type."""
    return value is None or isinstance(value, (str, torch.dtype, torch.device, torch.layout))


def writes_to(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a function writes to, by torch's rules for names: its first argument if it is
    called ``add_``, ``__iadd__`` or ``__setitem__``, sets a property, or has ``inplace=True``, and what
    ``out=`` is given.
    """
    targets: list[Any] = []
    in_place_operator = name.startswith("__i") and name.endswith("__") and name not in NOT_IN_PLACE
    in_place_method = name.endswith("_") and not name.endswith("__")
    if in_place_operator or in_place_method or name in ("__set__", "__setitem__", "__delitem__"):
        targets += args[:1]
    if kwargs.get("inplace") is True:
        targets += args[:1] or [*kwargs.values()][:1]
    targets += flattened(kwargs.get("out"))[0]
    return [target for target in targets if isinstance(target, Tensor)]


def changes_entries(function: Callable[..., Any]) -> bool:
    """Return whether a function that writes to a tensor changes its entries. Setting most properties, such as
    ``grad`` and ``requires_grad``, does not.
    """
    if getattr(function, "__name__", "") != "__set__":
        return True
    written = getattr(function, "__self__", None)  # the property
    return getattr(written, "__name__", "") in HOLD_ENTRIES


HOLD_ENTRIES: Final = ("data", "real", "imag")
"""The properties of a tensor through which its entries are written."""


NOT_IN_PLACE: Final = ("__index__", "__int__", "__invert__", "__iter__", "__init__")
"""Special methods of Python whose names begin as those of in-place operators do."""


def holds_values(argument: Any) -> bool:
    """Return whether an argument is or holds a tensor, or a number that was read out of one."""
    if isinstance(argument, (list, tuple)):
        return any(map(holds_values, argument))
    if isinstance(argument, dict):
        return any(map(holds_values, argument.values()))
    # a float may be known by its identity, and the bounds of a slice and other objects may be values
    return is_value(argument) or not isinstance(argument, NO_VALUES)


def reads_entries(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function needs the entries of its tensors, and not only their shapes and types: it
    raises where they have none.
    """
    args, kwargs = tree_map_only(Tensor, _without_entries, (args, dict(kwargs)))
    try:
        function(*args, **kwargs)
    except Exception:
        return True
    return False


def _without_entries(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def holds_no_data(made: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a tensor that was made of numbers alone, and not drawn, follows from its size, as those
    of ``arange()`` and ``zeros()`` do: it has more entries than there were numbers to make them of.
    """
    leaves, _ = flattened((args, {name: x for name, x in kwargs.items() if name != "device"}))
    numbers = [leaf for leaf in leaves if is_number(leaf)]
    of_numbers_alone = all(is_number(leaf) or isinstance(leaf, SAY_NO_ENTRIES) for leaf in leaves)
    return of_numbers_alone and made.numel() > len(numbers) > 0


SAY_NO_ENTRIES: Final = (bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that say how a tensor is stored."""

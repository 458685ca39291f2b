"""The arguments and the results of recorded calls, taken apart into leaves and put together again.

A call is made again with other objects than those it was recorded with. So its arguments are kept as a list
of leaves, in which a ``Reference`` stands for each recorded value, and a form that puts leaves together. Of
its results, only the places of values matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from normlab.private_torch import tree_flatten, tree_unflatten
from normlab.trace.tensors import Place, tensors_in, unwrap

Number: TypeAlias = int
"""The number of a value: of a tensor, in one of the states that writing to it gives it, or of a number that
was read out of one.
"""


@dataclass(frozen=True)
class Reference:
    """Stands for a recorded value among the arguments of a call."""

    number: Number


KEPT_WHOLE: Final = (Tensor, nn.Module)
"""Objects that are leaves of arguments, whatever they contain."""
LEFT: Final = "left on the module"
"""The first part of the place of a tensor that a call of a module leaves as an attribute."""
OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))
"""The attributes that torch gives to modules, which hold parameters, buffers, hooks and modules."""
PLAIN: Final = (*KEPT_WHOLE, int, float, str, slice, type(None), torch.dtype, torch.device, Reference)
"""Objects that hold no arguments."""


@dataclass(frozen=True)
class PlainForm:
    """The form of arguments none of which holds others, as in most calls. It is faster than torch's."""

    positional: int
    """How many have no name."""
    keywords: tuple[str, ...]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: their leaves, with a ``Reference`` for each recorded value, and their form."""

    leaves: list[Any]
    form: Any
    """A ``PlainForm``, or torch's own for ``tree_unflatten``."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Take arguments apart."""
        leaves = [*args, *kwargs.values()]
        if all(isinstance(leaf, PLAIN) for leaf in leaves):
            return cls(leaves, PlainForm(len(args), tuple(kwargs)))
        return cls(*flattened((args, dict(kwargs))))

    @property
    def parts(self) -> list[Any]:
        """The leaves, with the bounds of a slice in place of the slice."""
        parts: list[Any] = []
        for leaf in self.leaves:
            parts += (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
        return parts

    @property
    def references(self) -> list[Number]:
        """The recorded values among them."""
        return [part.number for part in self.parts if isinstance(part, Reference)]

    @property
    def sequences(self) -> list[list[Number]]:
        """The recorded values in each list or tuple among the arguments, such as the rows for ``stack``."""
        if isinstance(self.form, PlainForm):
            return []
        args, kwargs = tree_unflatten(self.leaves, self.form)
        sequences = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
        return [[x.number for x in entries if isinstance(x, Reference)] for entries in sequences]

    def mapped(self, change: Callable[[Any], Any]) -> Arguments:
        """Return the same arguments with each part changed."""
        return Arguments([_changed(leaf, change) for leaf in self.leaves], self.form)

    def with_values(self, values: Mapping[Number, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional arguments and keywords, with these values in place of the references."""
        filled = self.mapped(lambda part: values[part.number] if isinstance(part, Reference) else part).leaves
        if isinstance(self.form, PlainForm):
            positional = self.form.positional
            keywords = zip(self.form.keywords, filled[positional:], strict=True)
            return tuple(filled[:positional]), dict(keywords)
        return tree_unflatten(filled, self.form)


def _changed(leaf: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, slice):
        return slice(change(leaf.start), change(leaf.stop), change(leaf.step))
    return change(leaf)


def flattened(arguments: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested arguments and their form, for ``tree_unflatten``. A slice is one leaf."""
    leaves, form = tree_flatten(arguments, is_leaf=lambda leaf: isinstance(leaf, KEPT_WHOLE))
    return leaves, form


def values_in(result: Any) -> dict[Place, Any]:
    """Return the tensors in a result by their places; if there are none, the numbers in it, as in that of
    ``tolist()``; and if there are none of these either, the tensors in its attributes.
    """
    tensors: dict[Place, Any] = dict(tensors_in(result))
    if tensors:
        return tensors
    leaves, _ = flattened(list(result) if isinstance(result, torch.Size) else result)
    numbers: dict[Place, Any] = {
        (i,): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (int, float))
    }
    if numbers:
        return numbers
    # an output of a class of the user's own, whose attributes hold the tensors
    attributes = vars(result) if hasattr(result, "__dict__") and not isinstance(result, nn.Module) else {}
    return dict(tensors_in(attributes))


def values_left_on(module: nn.Module) -> dict[Place, Tensor]:
    """Return the tensors with a gradient that a call has left as attributes of a module, or of those in it,
    such as an auxiliary loss.
    """
    left: dict[Place, Tensor] = {}
    for path, part in unwrap(module).named_modules():
        for name, value in vars(part).items():
            if name in OF_EVERY_MODULE:
                continue
            tensors = tensors_in(value, (LEFT, path, name))
            left.update((place, x) for place, x in tensors if x.grad_fn is not None)
    return left


def value_left_at(place: Place, module: nn.Module) -> Tensor | None:
    """Return the tensor that a call has left at a place of ``values_left_on``, on another such module; None
    if there is none.
    """
    _, path, name, *within = place
    part = unwrap(module).get_submodule(str(path))
    return dict(tensors_in(vars(part).get(str(name)))).get(tuple(within))

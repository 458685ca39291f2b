"""The values that a running script computes, each with a number: its tensors, and what it reads out of them.

A number stands for a value in one state. A tensor that is written to gets a new number for its new state, so
that a recorded call says which state it has read.

Values are told apart by ``id``, so an object that has a number must live as long as the number is used:
another object could get its ``id``. Data are kept alive. What was computed from parameters is not, since that
would hold the memory of all activations: an ``Outline`` is kept of it, and its number is freed when the
object dies.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.private_torch import version_of
from normlab.setups.arguments import Arguments, Number, Reference
from normlab.setups.numbers import is_followed
from normlab.setups.outlines import Outline, is_outlined
from normlab.trace.tensors import tensors_in

LARGEST_BATCH: Final = 2**22
"""Entries of the largest tensor of a batch that is copied when it is used."""


class Values:
    """The values that were seen, with their numbers."""

    def __init__(self) -> None:
        self._objects: dict[Number, Any] = {}
        """The values that are kept alive: data, numbers, and what nobody was seen to compute."""
        self._outlines: dict[Number, Outline] = {}
        """The outlines of the others, which are computed from parameters."""
        self._computed: dict[Number, weakref.ref[Tensor]] = {}
        """These others themselves, as long as the script holds them."""
        self._begin = 0
        """The values of the micro-batch that is under way have this number or a higher one."""
        self.copies: dict[Number, Tensor] = {}
        """Copies of values that may be written to later."""
        self.loaded: set[Number] = set()
        """The tensors that a ``DataLoader`` returned."""
        self.made: set[Number] = set()
        """The tensors that hold data and were made of no other tensor, but of a list or random numbers."""
        self.sized: set[Number] = set()
        """The tensors that follow from their size alone, such as ``arange(n)``, and were made of no other."""
        self._numbers = itertools.count()
        self._number_of: dict[int, Number] = {}
        """The numbers of values, by ``id``."""
        self._versions: dict[Number, int] = {}
        """How often each value had been written to when it got its number; -1 if that says nothing."""

    # ------------------------------------------------------------------------------------------- numbers

    def next_number(self) -> Number:
        """Return a number that no value has."""
        return next(self._numbers)

    def known(self, value: Any) -> Number | None:
        """Return the number that a value has already; None if it has none."""
        return self._number_of.get(id(value))

    def number_of(self, value: Any) -> Number:
        """Return the number that a value has, whatever was written to it since."""
        return self._number_of[id(value)]

    def number(self, value: Any) -> Number:
        """Return the number of a value as it is now; a value that is seen for the first time gets one.

        So does data that was written to since in a way that was not seen, as through another view of it: some
        loaders fill one buffer with batch after batch.
        """
        known = self.known(value)
        if known is None or self._versions.get(known, -1) not in (-1, _version_of_data(value)):
            return self.add(value)
        return known

    def add(self, value: Any, *, computed: bool = False) -> Number:
        """Give a value a new number. What is ``computed`` from parameters is not kept alive."""
        number, key = self.next_number(), id(value)
        self._number_of[key] = number
        self._versions[number] = _version_of_data(value)
        if computed and isinstance(value, Tensor) and is_outlined(value):
            self._outlines[number] = Outline.of(value)
            # another object may get this id once the value is gone
            self._computed[number] = weakref.ref(value, lambda _: self._number_of.pop(key, None))
        else:
            self._objects[number] = value
        return number

    def objects(self, numbers: Iterable[Number]) -> dict[Number, Any]:
        """Return values that the script still holds, as objects."""
        return {n: self._objects[n] if n in self._objects else self._computed[n]() for n in numbers}

    def all(self) -> dict[Number, Any]:
        """Return every value as an object, or its outline. The entries of objects may have been changed
        since.
        """
        return {**self._outlines, **self._objects}

    def begin_micro_batch(self) -> None:
        """Count what is computed from now on as part of the next micro-batch. What that reads of earlier ones
        is kept alive.
        """
        self._begin = self.next_number()

    def add_loaded(self, batch: Any) -> None:
        """Note what a ``DataLoader`` returns: the batch begins there."""
        self.loaded.update(self.number(tensor) for _, tensor in tensors_in(batch))

    # ----------------------------------------------------------------------------------------- arguments

    def referring(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return arguments with a reference in place of each value."""
        return Arguments.of(args, kwargs).mapped(self._reference)

    def _reference(self, argument: Any) -> Any:
        """Return what stands for an argument in a recorded call."""
        if is_value(argument):
            number = self.number(argument)
            if isinstance(argument, Tensor):
                self._keep_data(number, argument)
            if number < self._begin:
                self._objects[number] = argument
            return Reference(number)
        # a plain float that float() has read is known by its identity: no other float is the same object
        if isinstance(argument, float) and self.known(argument) is not None:
            return Reference(self.number_of(argument))
        return argument

    def given(self, arguments: Arguments) -> list[Any]:
        """Return the values among arguments as objects."""
        return [*self.objects(arguments.references).values()]

    # -------------------------------------------------------------------------------------------- copies

    def _keep_data(self, number: Number, tensor: Tensor) -> None:
        """Keep a copy of a tensor of data as it is used: a loader may write its next batch into it. Whole
        stores of data are not copied.
        """
        is_data = not tensor.requires_grad and not isinstance(tensor, nn.Parameter)
        if is_data and number not in self.copies and tensor.numel() <= LARGEST_BATCH:
            self.copies[number] = _copied(tensor)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep copies of tensors that are about to be written to."""
        for tensor in tensors:
            number = self.number(tensor)
            if number not in self.copies:
                self.copies[number] = _copied(tensor)

    def forget(self, remembered: set[Number]) -> None:
        """Let go of all values but the ``remembered`` ones."""
        # in the order of their numbers, so that the latest state of an object gives its number below
        self._objects = {n: self._objects[n] for n in sorted(remembered) if n in self._objects}
        self._computed = {n: x for n, x in self._computed.items() if n in remembered and x() is not None}
        self._outlines = {n: self._outlines[n] for n in self._computed}
        self.copies = {n: x for n, x in self.copies.items() if n in self._objects}
        self._number_of.clear()
        self._number_of.update({id(reference()): number for number, reference in self._computed.items()})
        self._number_of.update({id(value): number for number, value in self._objects.items()})


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy of the entries of a tensor that gradients can be computed with, in whatever mode."""
    with torch.inference_mode(False):
        return tensor.detach().clone()


def is_value(argument: Any) -> bool:
    """Return whether an argument is a tensor, or a number that was read out of one."""
    return isinstance(argument, Tensor) or is_followed(argument)


def times_written(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None where torch does not count, as in inference mode."""
    return None if tensor.is_inference() else version_of(tensor)


def _version_of_data(value: Any) -> int:
    """Return how often data was written to; -1 for what has a gradient, and for what torch does not count."""
    if not isinstance(value, Tensor) or value.requires_grad:
        return -1
    written = times_written(value)
    return -1 if written is None else written

"""The values of a running script, each with a number: its tensors, and what it reads out of them."""

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
    """Numbers for the values that are seen. A tensor that is written to gets a new one."""

    def __init__(self) -> None:
        self._objects: dict[Number, Any] = {}
        """The values that are kept alive: data, numbers, and what nobody was seen to compute."""
        self._outlines: dict[Number, Outline] = {}
        """What is kept of the others."""
        self._computed: dict[Number, weakref.ref[Tensor]] = {}
        """These, as long as the script holds them."""
        self._begin = 0
        """The values of the micro-batch that is under way have this number or a higher one."""
        self.before: dict[Number, Tensor] = {}
        """Copies of values that may be written to later."""
        self.loaded: set[Number] = set()
        """The tensors that a ``DataLoader`` returned."""
        self.made_of_none: set[Number] = set()
        """The tensors that hold data and were made of no other, but of lists and random numbers."""
        self.sized: set[Number] = set()
        """The tensors that were made of no other, and that their size says all of."""
        self._numbers = itertools.count()
        self._number_of: dict[int, Number] = {}
        self._versions: dict[Number, int] = {}
        """How often each value had been written to when it got its number."""

    def take(self) -> Number:
        """Return a number that no value has."""
        return next(self._numbers)

    def known(self, value: Any) -> Number | None:
        """Return the number that a value has already."""
        return self._number_of.get(id(value))

    def number_of(self, value: Any) -> Number:
        """Return the number that a value has, whatever was written to it since."""
        return self._number_of[id(value)]

    def number(self, value: Any) -> Number:
        """Return the number of a value as it is now; a value that is seen for the first time gets one.

        So does data that was written to through another view of it, as in a loader that fills one buffer.
        """
        known = self.known(value)
        if known is None or self._versions.get(known, -1) not in (-1, _version_of_data(value)):
            return self.add(value)
        return known

    def add(self, value: Any, *, computed: bool = False) -> Number:
        """Give a value a new number. What is ``computed`` of parameters is not kept alive."""
        number, key = self.take(), id(value)
        self._number_of[key] = number
        self._versions[number] = _version_of_data(value)
        if computed and isinstance(value, Tensor) and is_outlined(value):
            self._outlines[number] = Outline.of(value)
            self._computed[number] = weakref.ref(value, lambda _: self._number_of.pop(key, None))
        else:
            self._objects[number] = value  # a reference, too: no other object gets its id
        return number

    def objects(self, numbers: Iterable[Number]) -> dict[Number, Any]:
        """Return values that the script still holds, as objects."""
        return {n: self._objects[n] if n in self._objects else self._computed[n]() for n in numbers}

    def all(self) -> dict[Number, Any]:
        """Return every value as an object, or its outline; entries may have been changed since."""
        return {**self._outlines, **self._objects}

    def begin_micro_batch(self) -> None:
        """Take what is made from now on for the next micro-batch's. What that reads of this one is kept."""
        self._begin = self.take()

    def add_loaded(self, batch: Any) -> None:
        """Note what a ``DataLoader`` returns: the batch begins there."""
        self.loaded.update(self.number(tensor) for _, tensor in tensors_in(batch))

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
        if isinstance(argument, float) and self.known(argument) is not None:  # as float() read it
            return Reference(self._number_of[id(argument)])
        return argument

    def given(self, arguments: Arguments) -> list[Any]:
        """Return the values among arguments as objects."""
        return [*self.objects(arguments.references).values()]

    def _keep_data(self, number: Number, tensor: Tensor) -> None:
        """Keep a copy of a tensor of data as it is used: a loader may write its next batch into it. Whole
        stores of data are not copied.
        """
        is_data = not tensor.requires_grad and number not in self.before
        if is_data and tensor.numel() <= LARGEST_BATCH and not isinstance(tensor, nn.Parameter):
            self.before[number] = _copied(tensor)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep copies of tensors that are about to be written to."""
        for tensor in tensors:
            number = self.number(tensor)
            if number not in self.before:
                self.before[number] = _copied(tensor)

    def forget(self, waiting: set[Number]) -> None:
        """Let go of all values but these."""
        kept = {n: self._objects[n] for n in sorted(waiting) if n in self._objects}
        before = {n: x for n, x in self.before.items() if n in kept}
        computed = {n: x for n, x in self._computed.items() if n in waiting and x() is not None}
        outlines = {n: self._outlines[n] for n in computed}
        for values in (self._number_of, self._objects, self.before, self._computed, self._outlines):
            values.clear()
        self._objects.update(kept)
        self._computed.update(computed)
        self._outlines.update(outlines)
        self._number_of.update({id(reference()): number for number, reference in computed.items()})
        self.before.update(before)
        self._number_of.update({id(value): number for number, value in kept.items()})


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

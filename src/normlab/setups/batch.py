"""Where a batch begins among the calls that lead from a script's data to its loss.

A script may read its batch out of a store of data, draw masks, stack and pad rows, and hand the result to
its model. With another batch, only what is computed from the batch alone can be computed again. So each call
is asked whether it belongs to what makes a loss of a batch, or to what made the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from normlab.setups.arguments import Number, Reference
from normlab.setups.outlines import Outline
from normlab.setups.recording import MicroBatch, RecordedCall
from normlab.setups.torch_functions import holds_no_data

READING: Final = ("__getitem__", "index_select", "gather", "take", "take_along_dim", "embedding")
"""Functions that read entries of their first tensor at places. Torch marks them by nothing that could be
asked, so they are named. Where the tensor is a store of data, a batch begins with what they return, and not
with the store or with the places in it.
"""
INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class BatchBeginning:
    """Where a batch begins among the calls that lead to a loss: ``begins``, and ``kept`` after it.

    A tensor belongs to the batch if its first axis is as long as that of the first tensor that a module
    takes. What is computed from the batch alone, such as slices and masks, is computed again; what was read
    out of a store of data, or stacked from single rows, is where the batch begins.

    Args:
        calls: Those that lead to the loss, in order; the last one gives it.
        parameters: The parameters and buffers of the model that are read outside of modules.
        modules: The modules of the model, by ``id``.
        micro_batch: Where the calls come from.
        not_repeated: Calls whose results are the batch's, since they cannot be computed again.
    """

    def __init__(
        self,
        calls: Sequence[RecordedCall],
        parameters: Iterable[Number],
        modules: Collection[int],
        micro_batch: MicroBatch,
        not_repeated: Sequence[RecordedCall],
    ) -> None:
        self._tensors = micro_batch.tensors
        self._modules = modules
        self._not_repeated = not_repeated
        self._loaded, self._data, self._sized = micro_batch.loaded, micro_batch.made, micro_batch.sized
        self._rows = _rows(calls, micro_batch)
        self._computed = {number for call in calls for number in call.results}
        self._beyond_places = self._sources_beyond_places(calls)
        self._parameters = set(parameters)
        # what follows grows from call to call
        self._of_model = set(self._parameters)
        """Values that depend on parameters."""
        self._of_batch: set[Number] = set()
        """The batch's tensors, and what is computed from them alone."""
        self._of_sizes = set(self._sized)
        """Tensors that follow from sizes alone, and what is computed from these alone."""
        self._leaves: dict[Number, frozenset[Number]] = {}
        """By each value of ``_of_batch``, the batch's tensors that it is computed from."""
        self.begins: dict[Number, None] = {}
        """The batch's tensors, in order."""
        self.kept = [call for call in calls if self._follow(call)]
        """The calls that make a loss of them, in order."""
        while self._begins_later():
            pass

    @staticmethod
    def _sources_beyond_places(calls: Sequence[RecordedCall]) -> set[Number]:
        """Return the values that the loss is computed from, without those that only say where to read in
        another one.
        """
        needed = set(calls[-1].results)
        for call in reversed(calls):
            if not needed.isdisjoint(call.results):
                needed.update(call.reads[:1] if call.name in READING else call.reads)
        return needed

    def _follow(self, call: RecordedCall) -> bool:
        """Note what the results of a call depend on. Return whether it is kept: whether it belongs to what
        makes a loss of a batch, and not to what made the batch.
        """
        of_model = id(call.module) in self._modules or not self._of_model.isdisjoint(call.reads)
        if of_model:
            self._of_model.update(call.results)
        for number in call.reads:
            if number not in self._computed and number not in self._parameters:
                is_data = number in self._loaded or number in self._data
                self._enter(number, least_axes=1 if is_data else 2)
        if of_model:
            return True
        # what is drawn outside of the model is data, as noise and masks are
        is_repeated = not call.random_states and call not in self._not_repeated
        if is_repeated and self._is_about_the_batch(call):
            self._of_batch.update(call.results)
            self._leaves.update(dict.fromkeys(call.results, self._leaves_of(call)))
            return True
        if is_repeated and self._is_of_sizes_alone(call):
            self._of_sizes.update(call.results)
            return True
        for number in call.results:
            self._enter(number, least_axes=1)
        return False

    def _begins_later(self) -> bool:
        """Let the batch begin after a call that only brings its tensors into their final form, such as one
        that writes padding into them: nothing else reads what they were before. Return whether there was one.
        """
        for call in self.kept:
            earlier = self._brought_into_form(call)
            if not earlier or len(call.results) != 1 or not self._of_model.isdisjoint(call.results):
                continue
            before, after = self._tensors[earlier[0]], self._tensors[call.results[0]]
            if isinstance(after, Tensor) and (before.shape, before.dtype) == (after.shape, after.dtype):
                self.kept.remove(call)
                for number in earlier:
                    self.begins.pop(number, None)
                self.begins[call.results[0]] = None
                return True
        return False

    def _brought_into_form(self, call: RecordedCall) -> list[Number]:
        """Return the batch's tensors that a call changes, if nothing else reads them."""
        changed = [n for n in call.reads if n in self._of_batch]
        if call.writes:  # where it writes, and what, may be data of the batch as well
            others = set(call.reads).difference(call.overwritten)
            if not others.isdisjoint(self._of_batch) and self._sized.issuperset(call.overwritten):
                return []  # it brings data of the batch into a new tensor
            changed = [n for n in changed if n in call.overwritten]
        is_only_reader = all(n in self.begins and self._readers(n) == [call] for n in changed)
        return changed if is_only_reader else []

    def _readers(self, number: Number) -> list[RecordedCall]:
        return [call for call in self.kept if number in call.reads]

    def _enter(self, number: Number, *, least_axes: int) -> None:
        """Let the batch begin with a tensor of at least so many axes, if it has as many rows as a batch. One
        that was there before, and that no loader gave, may be a vector of that length for another reason.
        """
        x = self._tensors[number]
        if isinstance(x, Tensor) and x.ndim >= least_axes and x.shape[0] == self._rows:
            self.begins[number] = None
            self._of_batch.add(number)
            self._leaves[number] = frozenset({number})

    def _is_about_the_batch(self, call: RecordedCall) -> bool:
        """Return whether a call computes something of the batch, and does not make it out of more data."""
        reads = call.reads
        if self._of_batch.isdisjoint(reads) or self._mixes(call) or self._joins_more(call):
            return False
        if call.name in READING and reads[0] not in self._of_batch:
            # Places that nothing else reads say where rows of data are. Others, such as the times of a
            # diffusion, are data themselves, and what is read at them is a table.
            return not self._beyond_places.isdisjoint(reads[1:])
        # other tensors are constants that broadcast, such as positions; a larger one is a store of data
        largest = max(self._size(n) for n in call.results)
        return all(n in self._of_batch or self._size(n) <= largest for n in reads)

    def _is_of_sizes_alone(self, call: RecordedCall) -> bool:
        """Return whether a call makes a tensor of numbers that say no more than its size."""
        args, kwargs = call.arguments.with_values(self._tensors)
        made = self._tensors[call.results[0]]
        return isinstance(made, Tensor) and holds_no_data(made, args, kwargs)

    def _leaves_of(self, call: RecordedCall) -> frozenset[Number]:
        return frozenset().union(*(self._leaves.get(n, frozenset()) for n in call.reads))

    def _mixes(self, call: RecordedCall) -> bool:
        """Return whether a call makes tokens out of several tensors that did not all come from a loader, such
        as tokens and a mask that is drawn. What it makes are then the tokens of the batch.
        """
        results = [self._tensors[n] for n in call.results]
        is_tokens = all(isinstance(x, Tensor) and x.dtype in INTEGERS and x.ndim > 1 for x in results)
        leaves = self._leaves_of(call)
        return is_tokens and len(leaves) > 1 and not leaves <= self._loaded

    def _joins_more(self, call: RecordedCall) -> bool:
        """Return whether a call joins more than the batch, as one that stacks single rows does. One of these
        rows may happen to be as long as the batch has rows, which does not make it a vector of the batch.
        """
        if call.writes or call.name in READING:  # a sequence among their arguments holds places
            return False
        joined = {n for sequence in call.arguments.sequences for n in sequence}
        known = self._of_batch | self._of_sizes
        return not joined.isdisjoint(self._of_batch) and not joined <= known

    def _size(self, number: Number) -> int:
        value = self._tensors[number]
        return value.numel() if isinstance(value, Tensor) else 1


def _rows(calls: Iterable[RecordedCall], micro_batch: MicroBatch) -> int:
    """Return the length of the first axis of the first tensor that a module takes.

    Tensors with several axes are preferred, since positions may come first, and data are preferred to what
    was computed with a gradient. Returns 0 if modules take no tensor.
    """
    taken = [micro_batch.tensors[n] for call in calls if call.module is not None for n in call.reads]
    for kind in (Tensor, Outline):  # an outline is of what was computed with a gradient
        for least_axes in (2, 1):
            for x in taken:
                if isinstance(x, kind) and x.ndim >= least_axes:
                    return x.shape[0]
    return 0


def named_leaves(
    numbers: Sequence[Number], calls: Sequence[RecordedCall], names: Mapping[Number, str]
) -> dict[Number, str]:
    """Return a name for each tensor of the batch: the script's, or that of a module's argument that takes it.

    Args:
        numbers: The tensors.
        calls: Those that may take them.
        names: What the script calls its tensors.
    """
    leaves: dict[Number, str] = {}
    for number in numbers:
        name = names.get(number) or next(_arguments_called(number, calls), "") or "tensor"
        used, unique, i = set(leaves.values()), name, 2
        while unique in used:
            unique, i = f"{name}_{i}", i + 1
        leaves[number] = unique
    return leaves


def _arguments_called(number: Number, calls: Iterable[RecordedCall]) -> Iterator[str]:
    """Yield the names of the arguments by which modules take this value."""
    for call in calls:
        if call.module is None or number not in call.reads:
            continue
        args, kwargs = call.arguments.with_values({n: Reference(n) for n in call.reads})
        bound = inspect.signature(call.module.forward).bind_partial(*args, **kwargs).arguments
        for name, value in bound.items():
            if isinstance(value, Reference) and value.number == number:
                yield name

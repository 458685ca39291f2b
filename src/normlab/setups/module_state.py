"""Keep what modules hold beside the weights that an optimizer trains, so that a pass can be computed again.

These are buffers, frozen tensors, and attributes that are plain numbers, bools or None. A script may change
them between two steps, as one that balances its experts by hand does, and a module may change them in each
call, as a codebook of moving averages does. A recorded pass can only be repeated with the values that it
found. Of the weights that train, those that the script changes by hand are kept as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from normlab.private_torch import (
    is_functorch_wrapped,
    is_traceable_wrapper_subclass,
    table_of_buffers,
    table_of_parameters,
)
from normlab.trace.kept import MOST_BYTES


@dataclass(frozen=True, eq=False)
class KeptValue:
    """One value of a module."""

    table: dict[str, Any]
    """The module's buffers, its parameters or its attributes."""
    name: str
    value: Any
    """The object that stood there."""
    copy: Tensor | None
    """A copy of it, if it is a tensor."""

    @classmethod
    def of(cls, table: dict[str, Any], name: str) -> KeptValue:
        """Keep what a module holds now under a name."""
        value = table[name]
        return cls(table, name, value, value.detach().clone() if isinstance(value, Tensor) else None)

    @property
    def is_there(self) -> bool:
        """Whether the module holds the same now."""
        now = self.table.get(self.name)
        if self.copy is None:
            return type(now) is type(self.value) and now == self.value
        return now is self.value and _is_same(now, self.copy)

    def put_back(self) -> None:
        """Let the module hold this again."""
        self.table[self.name] = self.value
        if self.copy is None or _is_same(self.value, self.copy):
            return
        # through data, as a graph that the script still holds may have saved the tensor
        if _has_form_of(self.value, self.copy) and not _is_expanded(self.value):
            self.value.data.copy_(self.copy)
        else:
            self.value.data = self.copy.clone()


class ModuleState:
    """The values that modules held before a pass called them for the first time, by where they stood."""

    def __init__(self, entries: Iterable[KeptValue] = ()) -> None:
        self._entries = {(id(entry.table), entry.name): entry for entry in entries}
        self._bytes = {True: 0, False: 0}
        """How many bytes of frozen parameters are kept (True), and how many of other tensors (False)."""
        self.left_out: dict[str, int] = {}
        """What is too large to be kept, by its class and name, with its bytes."""

    def keep(self, module: nn.Module, earlier: ModuleState, most_bytes: int) -> None:
        """Keep what a module and those in it hold now.

        Args:
            module: The module.
            earlier: The state that an earlier pass found. What is as it was there is not copied again.
            most_bytes: How many bytes of frozen parameters are copied at most; of other tensors it is
                ``MOST_BYTES``.
        """
        for part in module.modules():
            tables: list[dict[str, Any]] = [table_of_parameters(part), table_of_buffers(part), vars(part)]
            for table in tables:
                if isinstance(table, dict):  # a compiled TorchScript module has another, made anew each time
                    self._keep_table(type(part).__name__, table, earlier, most_bytes)

    def _keep_table(self, owner: str, table: dict[str, Any], earlier: ModuleState, most_bytes: int) -> None:
        """Keep the values in a table of a module whose class is called ``owner``."""
        for name, value in table.items():
            if not _is_state(value):
                continue
            if self._takes_room((id(table), name), value, most_bytes):
                self._keep_entry(table, name, earlier)
            elif not isinstance(value, Parameter):
                self.left_out[f"{owner}.{name}"] = value.nbytes

    def _takes_room(self, key: tuple[int, str], value: Any, most_of_frozen: int) -> bool:
        """Take room for a copy of a value. Return whether there was enough."""
        if not isinstance(value, Tensor) or key in self._entries:
            return True
        is_frozen = isinstance(value, Parameter)
        if self._bytes[is_frozen] + value.nbytes > (most_of_frozen if is_frozen else MOST_BYTES):
            return False
        self._bytes[is_frozen] += value.nbytes
        return True

    def _keep_entry(self, table: dict[str, Any], name: str, earlier: ModuleState) -> None:
        key = (id(table), name)
        before = earlier._entries.get(key)
        self._entries[key] = before if before is not None and before.is_there else KeptValue.of(table, name)

    def holds(self, table: dict[str, Any], name: str) -> bool:
        """Return whether it is known what stood under a name in a table."""
        return (id(table), name) in self._entries

    def add(self, entries: Iterable[KeptValue]) -> None:
        """Add these values, unless something is known to have stood in their places."""
        self._entries = {(id(entry.table), entry.name): entry for entry in entries} | self._entries

    def add_later(self, later: ModuleState) -> None:
        """Add what a later part of the same pass found, unless an earlier part has found something there."""
        self._entries = later._entries | self._entries
        self.left_out |= later.left_out

    def put_back(self) -> None:
        """Let all modules hold this state."""
        for entry in self._entries.values():
            if entry.name in entry.table and not entry.is_there:
                entry.put_back()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let all modules hold this state inside the block, and what they hold now after it."""
        changed = [e for e in self._entries.values() if e.name in e.table and not e.is_there]
        now = ModuleState(KeptValue.of(entry.table, entry.name) for entry in changed)
        for entry in changed:
            entry.put_back()
        try:
            yield
        finally:
            now.put_back()


class StateWatch:
    """Keeps the state that each pass finds, while a script runs."""

    def __init__(self) -> None:
        self._earlier, self._state = ModuleState(), ModuleState()
        self._seen: dict[int, bool] = {}
        """By ``id`` of a module that was called in this pass: whether that was with gradients."""

    def is_seen(self, module: nn.Module) -> bool:
        """Return whether this pass has seen a module already, with gradients if they are on now. Calls before
        the first one with gradients may belong to an evaluation, after which a script may change something.
        """
        was_with_gradients = self._seen.get(id(module))
        return was_with_gradients is not None and (was_with_gradients or not torch.is_grad_enabled())

    def before_call(self, module: nn.Module, most_bytes: int) -> None:
        """Keep the state of a module that this pass has not seen."""
        self._seen[id(module)] = torch.is_grad_enabled()
        self._state.keep(module, self._earlier, most_bytes)

    @property
    def of_pass(self) -> ModuleState | None:
        """The state that the pass under way has found; None if it has called no module yet."""
        return self._state if self._seen else None

    def end_pass(self) -> ModuleState:
        """Return the state that was found by the pass that ends here."""
        self._earlier, self._state = self._state, ModuleState()
        self._seen.clear()
        return self._earlier


class WeightPlaces:
    """Where the parameters that train lie in the modules that a script has called."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[dict[str, Any], str]] = {}
        """By ``id`` of a parameter, the table of its module and its name there."""
        self._in_memory: dict[int, set[int]] = {}
        """By the place of their numbers in memory, the ids of parameters."""

    def add(self, module: nn.Module) -> None:
        """Add the parameters of a module and of those in it."""
        for part in module.modules():
            for name, p in table_of_parameters(part).items():
                if p is None or not p.requires_grad or id(p) in self._places:
                    continue
                if (memory := memory_of(p)) is not None:
                    self._places[id(p)] = table_of_parameters(part), name
                    self._in_memory.setdefault(memory, set()).add(id(p))

    def among(self, tensors: Iterable[Tensor]) -> dict[int, tuple[dict[str, Any], str]]:
        """Return the places of the parameters that these tensors are, or share memory with, by ``id``."""
        ids = set[int]()
        for x in tensors:
            # what is written to may be ``p.data``, another tensor of the same numbers
            ids |= {id(x)} if id(x) in self._places else self._sharing(x)
        return {key: self._places[key] for key in ids}

    def _sharing(self, x: Tensor) -> set[int]:
        memory = memory_of(x)
        return set() if memory is None else self._in_memory.get(memory, set())


def memory_of(tensor: Tensor) -> int | None:
    """Return the place of a tensor's numbers in memory; None if it has none of its own, like one that a
    function of ``torch.func`` wraps.
    """
    if not _can_be_copied(tensor) or is_functorch_wrapped(tensor):
        return None
    return tensor.untyped_storage().data_ptr()


def _is_state(value: Any) -> bool:
    """Return whether a value is one that no optimizer changes, but a script may."""
    if isinstance(value, Tensor):
        return _can_be_copied(value) and not value.requires_grad
    return type(value) in (int, float, bool, type(None))  # None stands where a first pass puts a tensor


def _has_form_of(tensor: Tensor, other: Tensor) -> bool:
    is_same_kind = tensor.dtype == other.dtype and tensor.device == other.device
    return is_same_kind and tensor.shape == other.shape


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return _has_form_of(tensor, other) and torch.equal(tensor, other)


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether several entries lie in one place, to which torch does not write."""
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _can_be_copied(tensor: Tensor) -> bool:
    is_special = tensor.is_meta or tensor.is_inference() or is_traceable_wrapper_subclass(tensor)
    return not is_special and tensor.layout is torch.strided

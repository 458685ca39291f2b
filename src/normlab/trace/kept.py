"""What objects hold, kept so that it can be put back bit for bit."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import partial
from operator import is_
from typing import Any, Final

import numpy
import torch
from torch import Tensor, UntypedStorage, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN: Final = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size),
        *(types.FunctionType, types.MethodType, types.ModuleType, types.BuiltinFunctionType),
    }
)
"""Types of values whose contents are not searched."""
FILLED: Final = frozenset({dict, OrderedDict, list, set})
MAPPINGS: Final = (dict, UserDict)
OBJECTS: Final = (nn.Module, Optimizer, LRScheduler, GradScaler)
"""Types of objects whose attributes are kept, besides those of dataclasses."""
HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Kept:
    """What objects hold: attributes, containers, tensors and random number generators.

    Objects stay the same objects: attributes and entries are put back, and tensors get the storage, the bits,
    the gradient and the hooks that they had. An attribute that is an object of some other class is searched
    only if it is a dataclass: others may lead anywhere. ``parameters`` says whether the bits of parameters
    are copied, to the CPU's memory.
    """

    def __init__(self, *roots: Any, parameters: bool) -> None:
        self._parameters = parameters
        self._known: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self._empty: list[Any] = []
        self._storages: dict[Any, tuple[UntypedStorage, UntypedStorage, list[Tensor]]] = {}
        # the attributes of a root are kept whatever its class is
        waiting = [*roots, *(vars(root) for root in roots if hasattr(root, "__dict__"))]
        while waiting:
            value = waiting.pop()
            if id(value) in self._known:
                continue
            self._known[id(value)] = value  # also keeps it alive, so that no other object gets its id
            for inner in self._keep(value):
                kind = type(inner)
                if kind in PLAIN:
                    continue
                # most of what a module holds is empty: to put that back is to clear it
                if kind in FILLED and not inner:
                    self._empty.append(inner)
                else:
                    waiting.append(inner)

    def restore(self) -> None:
        """Put everything back."""
        for undo in reversed(self._undo):
            undo()
        for container in self._empty:
            if container:
                container.clear()
        for storage, before, views in self._storages.values():
            if storage.nbytes() != before.nbytes():
                storage.resize_(before.nbytes())
            if not _bytes(storage, before.device).equal(_bytes(before, before.device)):
                storage.copy_(before)
                # autograd does not see a copy into a storage: a graph that saved these must know of it
                torch.autograd.graph.increment_version([x for x in views if not x.is_inference()])

    def _keep(self, value: Any) -> list[Any]:
        """Remember a value; return the values that it leads to."""
        if isinstance(value, Tensor):
            return self._keep_tensor(value)
        if isinstance(value, OBJECTS):
            return [vars(value)]
        if isinstance(value, (*MAPPINGS, list, set, tuple, deque)):
            return self._keep_container(value)
        if is_dataclass(value) and not isinstance(value, type):
            return [vars(value)] if hasattr(value, "__dict__") else []
        for kind, get, put in STATEFUL:
            if isinstance(value, kind):
                self._undo.append(partial(put, value, get(value)))
        return []

    def _keep_container(self, value: Any) -> list[Any]:
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, MAPPINGS):
            items = dict(value)
            self._undo.append(partial(_put_back, value, items))
            only_words = {*map(type, items)} <= {str}
            return [*items.values()] if only_words else [*items, *items.values()]
        entries = list(value)
        self._undo.append(partial(_refill, value, entries))
        return entries

    def _keep_tensor(self, x: Tensor) -> list[Any]:
        if is_lazy(x):
            return [vars(x)]
        inner = list(_inside(x))
        is_leaf = x.is_leaf
        gradient = x.grad if is_leaf else None  # torch warns when the gradient of another is read
        data = x if inner else x.data  # a wrapper has no storage that its ``data`` would lead to
        trained, place = x.requires_grad, _place(x)
        hooks = {name: getattr(x, name) for name in HOOKS}

        def undo() -> None:
            if _place(x) != place:
                x.data = data
            if is_leaf and not x.is_leaf:
                x.detach_()
            if is_leaf and x.requires_grad is not trained:
                x.requires_grad_(trained)
            if is_leaf and x.grad is not gradient:
                x.grad = gradient
            for name, before in hooks.items():  # a container of hooks is kept like any other
                if before is None and (added := getattr(x, name)):
                    added.clear()

        self._undo.append(undo)
        if not inner and (self._parameters or not isinstance(x, nn.Parameter)):
            self._keep_bits(x)
        return [*inner, *hooks.values(), *([gradient] if self._parameters else []), vars(x)]

    def _keep_bits(self, x: Tensor) -> None:
        for storage in _storages(x):
            key = storage.device, storage.data_ptr()
            if key not in self._storages:
                away = self._parameters and storage.device.type != "cpu"
                copied = storage.cpu() if away else storage.clone()
                self._storages[key] = storage, copied, []
            self._storages[key][2].append(x)


def _inside(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a wrapper around tensors holds (sharded, quantised, jagged)."""
    if is_traceable_wrapper_subclass(x):
        held = (getattr(x, name) for name in x.__tensor_flatten__()[0])
        yield from (inner for inner in held if isinstance(inner, Tensor))
    elif x.layout is torch.sparse_coo:
        yield from (x._indices(), x._values())


def _storages(x: Tensor) -> list[UntypedStorage]:
    """Return the storage of a tensor that has its own, rather than one in tensors that it holds."""
    if x.is_meta or x.layout is not torch.strided or is_traceable_wrapper_subclass(x):
        return []
    storage = x.untyped_storage()
    return [storage] if storage.nbytes() else []


def _bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    here = storage if storage.device == device else storage.cpu()
    return torch.empty(0, dtype=torch.uint8, device=device).set_(here)


def _place(x: Tensor) -> Any:
    """Return where a tensor's numbers lie and in which view; None if it has no storage of its own."""
    for storage in _storages(x):
        start = storage.data_ptr()
        return start if x.is_nested else (start, x.size(), x.stride(), x.storage_offset(), x.dtype)
    return None


def _put_back(mapping: Any, before: dict[Any, Any]) -> None:
    """Put back the entries of a mapping, one by one, so it never lacks those that stay."""
    # compared by identity: to ask whether two tensors are equal would compare their numbers
    same_keys = len(mapping) == len(before) and all(map(is_, mapping, before))
    if same_keys and all(map(is_, mapping.values(), before.values())):
        return
    for key in [key for key in mapping if key not in before]:
        del mapping[key]
    for key, value in before.items():
        if key not in mapping or mapping[key] is not value:
            mapping[key] = value
    if list(mapping) != list(before):  # entries that were added again stand at the end
        for key, value in before.items():
            del mapping[key]
            mapping[key] = value


def _refill(value: Any, before: list[Any]) -> None:
    """Put back the entries of another container, if they are not the same objects."""
    if len(before) != len(value) or not all(a is b for a, b in zip(before, value, strict=True)):
        value.clear()
        if isinstance(value, set):
            value.update(before)
        else:
            value.extend(before)


def _set_bits(generator: numpy.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _fill(array: numpy.ndarray, before: numpy.ndarray) -> None:
    if array.tobytes() != before.tobytes():
        array[...] = before


STATEFUL: Final[tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]], ...]] = (
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (
        random.Random,
        lambda generator: generator.getstate(),
        lambda generator, state: generator.setstate(state),
    ),
    (numpy.random.RandomState, numpy.random.RandomState.get_state, numpy.random.RandomState.set_state),
    (numpy.random.Generator, lambda generator: generator.bit_generator.state, _set_bits),
    (numpy.ndarray, numpy.ndarray.copy, _fill),
)
"""Types of objects that have a state, with how to read it and how to put it back."""

"""Find what a step can reach: the values that a value leads to, through attributes, entries and functions.

``Search`` walks through them, nearest first. It goes into what a step of the user's may change: their own
objects, containers, tensors, and the objects of torch that train. What a library keeps for itself is its own
affair.
"""

from __future__ import annotations

import argparse
import array
import copy
import enum
import io
import random
import sys
import types
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from normlab.base.libraries import is_installed
from normlab.private_torch import (
    LoaderIterator,
    is_traceable_wrapper_subclass,
    parts_of_sparse,
    table_of_buffers,
    tables_of_hooks,
)


class Kind(enum.Enum):
    """What can be done with the values of a class."""

    PLAIN = enum.auto()
    """They never change, or are shared by everything that uses them: they are not searched."""
    TENSOR = enum.auto()
    MAPPING = enum.auto()
    ENTRIES = enum.auto()
    """Lists, sets and deques."""
    TUPLE = enum.auto()
    FUNCTION = enum.auto()
    CLASS = enum.auto()
    MODULE = enum.auto()
    """Modules of Python."""
    STATE = enum.auto()
    """They have a state that can be read and set: generators of random numbers, arrays."""
    TRAINED = enum.auto()
    """Modules, optimizers, schedulers and scalers of torch."""
    OBJECT = enum.auto()
    """They have attributes, which are searched."""
    ITERATOR = enum.auto()
    """They are used up, and Python cannot wind them back."""
    HANDLE = enum.auto()
    """They stand for something outside: files, sockets, queues, threads, processes."""
    LOCK = enum.auto()


NEVER: Final = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size),
        *(range, slice, property, types.CodeType, types.MemberDescriptorType),
    }
)
"""Types of values that lead nowhere."""
CACHED: Final = type(lru_cache(int))
"""The type of functions with a cache in front of them."""
FUNCTIONS: Final = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial, CACHED)
TRAINED: Final = (nn.Module, Optimizer, LRScheduler, GradScaler)
GENERATORS: Final = (torch.Generator, random.Random, numpy.random.RandomState, numpy.random.Generator)
"""Types of generators of random numbers."""
STATES: Final = (*GENERATORS, numpy.ndarray, bytearray, array.array, io.StringIO, io.BytesIO)
HANDLES: Final = frozenset(
    {
        *("io.IOBase", "tempfile._TemporaryFileWrapper", "socket.socket", "_socket.socket"),
        *("queue.Queue", "_queue.SimpleQueue", "multiprocessing.queues.Queue"),
        *("multiprocessing.queues.SimpleQueue", "multiprocessing.connection._ConnectionBase"),
        *("threading.Thread", "multiprocessing.process.BaseProcess", "subprocess.Popen"),
        *("concurrent.futures._base.Executor", f"{LoaderIterator.__module__}.{LoaderIterator.__qualname__}"),
    }
)
"""Classes whose objects stand for something outside, by name: few of their modules are ever imported."""
RUNNING: Final = frozenset({"threading.Thread", "multiprocessing.process.BaseProcess"})
LOCKS: Final = frozenset({"_thread.lock", "_thread.RLock", "threading._RLock"})
SEARCHED: Final = ("torch.utils.data.", "torch.optim.", "torch.amp.")
"""Packages inside the libraries below whose objects hold what a training step changes."""
NAMESPACES: Final = (
    *(types.SimpleNamespace, argparse.Namespace, UserDict, UserList),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
)
"""Classes of Python's own library whose objects are there to be written to."""
LIBRARIES: Final = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
"""Packages whose objects are their own affair: what is written to them is not a step's."""
TRACKERS: Final = frozenset(
    {"wandb", "mlflow", "tensorboard", "tensorboardX", "trackio", "comet_ml", "clearml", "aim"}
)
"""Packages that log to somewhere outside, as ``logging`` does: their objects mirror what was sent there."""


def _names(cls: type) -> set[str]:
    """Return the names of a class and its bases, with their modules."""
    return {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}


@lru_cache(maxsize=4096)
def kind_of(cls: type) -> Kind:
    """Return what can be done with the objects of a class."""
    if cls in NEVER or issubclass(cls, (enum.Enum, BaseException, random.SystemRandom)):
        return Kind.PLAIN
    simple: tuple[tuple[Any, Kind], ...] = (
        (Tensor, Kind.TENSOR),
        (TRAINED, Kind.TRAINED),
        (dict, Kind.MAPPING),
        ((list, set, deque), Kind.ENTRIES),
        ((tuple, frozenset), Kind.TUPLE),
        (FUNCTIONS, Kind.FUNCTION),
        (type, Kind.CLASS),
        (types.ModuleType, Kind.MODULE),
        (STATES, Kind.STATE),
    )
    for classes, kind in simple:
        if issubclass(cls, classes):
            return kind
    if issubclass(cls, io.IOBase) or _names(cls) & HANDLES:
        return Kind.HANDLE
    if _names(cls) & LOCKS:
        return Kind.LOCK
    # an iterator that is written in Python keeps its place in attributes, which can be put back
    if hasattr(cls, "__next__") and not isinstance(cls.__next__, types.FunctionType):
        return Kind.ITERATOR
    return Kind.OBJECT if _has_attributes(cls) and _is_searched(cls) else Kind.PLAIN


def _has_attributes(cls: type) -> bool:
    return bool(cls.__dictoffset__) or any("__slots__" in vars(base) for base in cls.__mro__)


def _is_searched(cls: type) -> bool:
    """Return whether what an object of this class holds is a step's to change."""
    module = str(cls.__module__)
    package = module.partition(".")[0]
    if package in TRACKERS:
        return False
    if package not in LIBRARIES:
        return True
    return is_dataclass(cls) or cls in NAMESPACES or f"{module}.".startswith(SEARCHED)


@lru_cache(maxsize=4096)
def is_of_user(module: str | None) -> bool:
    """Return whether a module, by its name, is neither of Python nor of an installed package nor of normlab.

    Functions of the user's are followed by the names that they use; those of a library are not.
    """
    if module == "__main__":
        return True
    package = (module or "").partition(".")[0]
    if package in LIBRARIES or package == "normlab":
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return not (isinstance(file, str) and is_installed(file))


@lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function's code, with the functions inside it."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(names_in(constant))
    return tuple(names)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes, None if it has none or hides it."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except Exception:  # a class may compute it
        return None
    return held if isinstance(held, dict) else None


def entries_of(container: Any) -> list[Any]:
    """Return the entries of a list, tuple, set or deque, whatever its class does when it is iterated over."""
    base = next(base for base in (list, tuple, set, frozenset, deque) if isinstance(container, base))
    return [*base.__iter__(container)]


@lru_cache(maxsize=4096)
def slots_of(cls: type) -> tuple[Any, ...]:
    """Return the descriptors of attributes that a class, or a base, keeps in slots rather than in a dict."""
    bases = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]
    slots = (x for base in bases for x in base.values() if isinstance(x, types.MemberDescriptorType))
    return tuple(slots)


def holds_a_thread(value: Any) -> bool:
    """Return whether a thread or a process that runs is an attribute of an object."""
    held = attributes_of(value) or {}
    return any(_is_running(x) for x in held.values() if kind_of(type(x)) is Kind.HANDLE)


def _is_running(value: Any) -> bool:
    if not _names(type(value)) & RUNNING:
        return False
    try:
        return bool(value.is_alive())
    except Exception:  # of a process that another one began
        return True


def data_of(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that are neither its methods nor Python's own."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith(("__", "_abc_")) and not hasattr(type(value), "__get__")
    }


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions that a class defines, its properties' among them."""
    for value in vars(cls).values():
        inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        parts = (value.fget, value.fset) if isinstance(value, property) else (inner,)
        yield from (part for part in parts if isinstance(part, types.FunctionType))


def globals_of(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Yield the namespaces that a function names, each with the names in it: its own module's, and those of
    modules of the user's that it names.
    """
    names = names_in(function.__code__)
    waiting, known = [function.__globals__], set[int]()
    while waiting:
        namespace = waiting.pop()
        if id(namespace) in known:
            continue
        known.add(id(namespace))
        yield namespace, names
        for name in names:
            value = namespace.get(name)
            if isinstance(value, types.ModuleType) and is_of_user(value.__name__):
                waiting.append(vars(value))


class Way(NamedTuple):
    """How a search came to a value."""

    bounded: bool = False
    """Through an object or a function, beyond which a search goes only so far."""
    of_user: bool = True
    """From code of the user's, and not of a library's."""


OWNERS: Final = (Kind.TRAINED, Kind.OBJECT, Kind.FUNCTION, Kind.CLASS)
"""Kinds of values whose code is somebody's: the user's, or a library's."""
FILLED: Final = frozenset({dict, OrderedDict, list, set})
"""Types of containers that are false exactly where they are empty."""
MOST_VALUES: Final = 100_000
"""How many values are searched beyond an object or a function, in about half a second."""
MOST_NEAR: Final = 2_000
"""The same where a search is repeated for each step."""
LARGE: Final = 10_000
"""A container with more entries holds data: they are not searched."""


class Search:
    """Walks through what values lead to, nearest first; subclasses do something about each.

    With ``functions``, functions and classes are followed too: closures, defaults and, in code of the user's,
    globals by name. With ``gradients``, so are those of tensors. At most ``most`` values are searched beyond
    an object or a function.
    """

    def __init__(self, *, functions: bool, gradients: bool, most: int) -> None:
        self.functions, self.gradients, self.room = functions, gradients, most
        self.is_complete = True
        """Whether there was room for everything."""
        self.generators: list[Any] = []
        """Generators of random numbers, but for those that Python, numpy and torch share."""
        self.known: dict[int, Any] = {}
        self.empty: list[Any] = []
        """Containers in which there is nothing, as in most of those that a module holds."""
        self._unsharded: set[int] = set()

    def walk(self, *roots: Any) -> None:
        """Visit everything that these values lead to."""
        waiting = deque((root, Way()) for root in roots)
        while waiting:
            value, way = waiting.popleft()
            kind = kind_of(type(value))
            if kind is Kind.PLAIN or id(value) in self.known or not self._has_room(way):
                continue
            self.known[id(value)] = value
            if kind in OWNERS:
                of_user = self.functions and is_of_user(_module_of(value, kind))
                way = Way(kind is not Kind.TRAINED, of_user)
            if kind is Kind.STATE and isinstance(value, GENERATORS) and not _is_shared(value):
                self.generators.append(value)
            inner = self.inner(value, kind, way)
            self.visit(value, kind, way)
            if way.bounded and _is_data(inner):
                self.pass_by(value)
            else:
                waiting.extend((x, way) for x in self._searchable(inner))

    def _has_room(self, way: Way) -> bool:
        """Return whether one more value may be searched, and take its room."""
        if not way.bounded:
            return True
        if self.room == 0:
            self.is_complete = False
            return False
        self.room -= 1
        return True

    def _searchable(self, values: list[Any]) -> Iterator[Any]:
        """Yield the values that may lead to others; remember the containers that lead nowhere yet."""
        for value in values:
            cls = type(value)
            if cls in NEVER:
                continue
            if cls in FILLED and not value:
                self.empty.append(value)
            else:
                yield value

    def visit(self, value: Any, kind: Kind, way: Way) -> None:
        """Do something about a value; what it leads to is known already."""

    def pass_by(self, container: Any) -> None:
        """Do something about a container whose entries are too many to be searched."""

    def inner(self, value: Any, kind: Kind, way: Way) -> list[Any]:
        """Return the values that a value leads to."""
        values: list[Any] = []
        if kind is Kind.MAPPING:
            has_names_alone = {*map(type, dict.keys(value))} <= {str}  # as most have, which lead nowhere
            keys = () if has_names_alone else dict.keys(value)
            values = [*keys, *dict.values(value), *_beside(value)]
        elif kind in (Kind.ENTRIES, Kind.TUPLE):
            values = [*entries_of(value), *_beside(value)]
        elif kind is Kind.TENSOR:
            values = self._in_tensor(value)
        elif kind in (Kind.TRAINED, Kind.OBJECT):
            values = self._in_object(value, way)
        elif kind is Kind.FUNCTION and self.functions:
            values = _in_function(value, way)
        elif kind is Kind.CLASS and way.of_user:
            values = _in_class(value)
        return values

    def _in_tensor(self, x: Tensor) -> list[Any]:
        if is_lazy(x):
            return [vars(x)]
        gradient = [x.grad] if self.gradients and x.is_leaf else []
        return [*inside(x), *tables_of_hooks(x), *gradient, vars(x)]

    def _in_object(self, value: Any, way: Way) -> list[Any]:
        if isinstance(value, nn.Module) and self._is_sharded(value):
            return [table_of_buffers(module) for module in value.modules()]
        inner: list[Any] = [] if (held := attributes_of(value)) is None else [held]
        for slot in slots_of(type(value)):
            try:
                inner.append(slot.__get__(value))
            except AttributeError:  # nothing is in it
                continue
        return [*inner, type(value)] if way.of_user and self.functions else inner

    def _is_sharded(self, module: nn.Module) -> bool:
        """Return whether ``torch.distributed`` shards a module and reassembles it as it runs: then only its
        buffers are its own.
        """
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is None or id(module) in self._unsharded:
            return False
        kinds, parts = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel), list(module.modules())
        if any(isinstance(part, kinds) for part in parts):
            self.known |= {id(part): part for part in parts}
            return True
        self._unsharded |= set(map(id, parts))
        return False


def generators_in(*roots: Any) -> list[Any]:
    """Return the generators of random numbers that these values lead to, nearest first."""
    search = Search(functions=True, gradients=False, most=MOST_NEAR)
    search.walk(*roots)
    return search.generators


def deep_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Copy as ``copy.deepcopy`` does, and also what holds something that this cannot copy: locks and modules
    of Python are shared, and of a tensor that was computed with a gradient, as an auxiliary loss that a
    module keeps, the entries are copied.

    ``memo`` is that of ``copy.deepcopy``.
    """
    memo = {} if memo is None else memo
    before = dict(memo)
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError):  # only now is the value searched for these: most hold none
        search = Search(functions=False, gradients=False, most=MOST_VALUES)
        search.walk(value)
        reached = search.known.values()
        shared = {id(x): x for x in reached if kind_of(type(x)) in (Kind.LOCK, Kind.MODULE)}
        computed = [x for x in reached if isinstance(x, Tensor) and x.grad_fn is not None]
        copies = shared | {id(x): x.detach().clone() for x in computed}
        if copies.keys() <= before.keys():
            raise  # what cannot be copied is something else
        memo.clear()
        memo |= copies | before
        return copy.deepcopy(value, memo)


def shared_generators() -> tuple[Any, ...]:
    """Return the generators of torch, of Python and of numpy that everything draws from."""
    return *torch_generators(), random._inst, numpy.random.mtrand._rand  # type: ignore[attr-defined]


def torch_generators() -> tuple[torch.Generator, ...]:
    """Return the generators of torch that everything draws from: those of the CPU and of other devices."""
    if not torch.cuda.is_initialized():
        return (torch.default_generator,)
    return torch.default_generator, *torch.cuda.default_generators


def _is_shared(generator: Any) -> bool:
    return any(generator is known for known in shared_generators())


def _is_data(values: list[Any]) -> bool:
    """Return whether these are the many entries of some store of data."""
    return len(values) > LARGE and any(type(x) not in NEVER for x in values)


def _module_of(value: Any, kind: Kind) -> str | None:
    """Return the name of the module that the code of an object, a class or a function is in."""
    if kind is Kind.FUNCTION:
        # not __module__, which a decorator's wrapper has from the function that it wraps
        return getattr(value, "__globals__", {}).get("__name__")
    return str((value if kind is Kind.CLASS else type(value)).__module__)


def _beside(value: Any) -> list[Any]:
    """Return the attributes of a container of somebody's own class."""
    held = attributes_of(value) if type(value).__dictoffset__ else None
    return [] if held is None else [held]


def inside(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a wrapper around tensors holds (sharded, quantised, jagged)."""
    if is_traceable_wrapper_subclass(x):
        held = (getattr(x, name) for name in x.__tensor_flatten__()[0])
        yield from (inner for inner in held if isinstance(inner, Tensor))
    elif x.layout is torch.sparse_coo:
        yield from parts_of_sparse(x)


def _in_function(function: Any, way: Way) -> list[Any]:
    if isinstance(function, types.MethodType):
        return [function.__self__, function.__func__]
    if isinstance(function, types.BuiltinFunctionType):
        return [function.__self__]
    inner: list[Any] = [] if (held := attributes_of(function)) is None else [held]
    if isinstance(function, partial):
        return [*inner, function.func, *function.args, function.keywords]
    if not isinstance(function, types.FunctionType):
        return inner
    for cell in function.__closure__ or ():
        try:
            inner.append(cell.cell_contents)
        except ValueError:  # nothing is in it yet
            continue
    inner += [*(function.__defaults__ or ()), function.__kwdefaults__]
    for namespace, names in globals_of(function) if way.of_user else ():
        inner += [namespace[name] for name in names if name in namespace]
    return inner


def _in_class(cls: type) -> list[Any]:
    bases = [base for base in cls.__mro__[1:] if is_of_user(str(base.__module__))]
    return [*bases, *data_of(cls).values(), *functions_of(cls)]

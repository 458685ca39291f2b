"""See and change calls of torch functions: their types, their dropout, and the parameters that they read."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normlab.errors import UserError
from normlab.private_torch import (
    GRADIENT_SWITCH,
    GROUPED_PRODUCTS,
    TorchDispatchMode,
    is_functorch_wrapped,
    is_traceable_wrapper_subclass,
    without_function_modes,
)
from normlab.trace.autograd import Weights
from normlab.trace.tensors import map_tensors, tensors_in

WIDE: Final = torch.float64
NARROW: Final = (torch.float32, torch.float16, torch.bfloat16)
CASTS: Final = {Tensor.float, Tensor.half, Tensor.bfloat16}
DROPOUTS: Final = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
}  # fmt: skip
DATA: Final = inspect.getattr_static(Tensor, "data")
CUTS: Final = {Tensor.detach, torch.detach, Tensor.detach_, torch.detach_, DATA.__get__}
"""Functions that pass a tensor on without its graph."""
OWN: Final = "Function.apply"
"""The name under which calls of autograd functions written in Python are recorded."""
RUNNING: Final = list[type]()
"""The autograd functions that are running now, inside which nothing has a graph."""
READING: Final = ("__int__", "__iter__", "__invert__", "__index__", "__init__")
"""Methods of tensors with names that begin like in-place ones, but do not write."""


class FunctionCall(NamedTuple):
    """One call of a torch function: its name, the module that was running, its arguments, its result.

    The module is empty where modules are not watched.
    """

    name: str
    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by position or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def products(self) -> Tensor:
        """Return the products `[…, H, T, S]` of queries and keys of ``scaled_dot_product_attention``, times
        their factor, before masks and biases.
        """
        q, k, scale = self.argument(0, "query"), self.argument(1, "key"), self.argument(6, "scale")
        if q.shape[-3] != k.shape[-3]:
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        return q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)

    @property
    def draws(self) -> bool:
        """Whether it draws or takes batch statistics, as dropout and batch norm do in training."""
        if self.name == "batch_norm":
            return bool(self.argument(5, "training", False))
        if self.name == "dropout":
            return bool(self.argument(1, "p", 0.5)) and bool(self.argument(2, "training", True))
        return bool(self.argument(4, "dropout_p", 0.0))


class FunctionMode(TorchFunctionMode, ABC):
    """Base of modes that see the functions of torch, including those that multi-head attention calls."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.multi_head_attention_forward:
            with self._still():
                return _seen_through(func)(*args, **kwargs)
        return self.called(func, args, kwargs)

    @contextmanager
    def _still(self) -> Iterator[None]:
        """See what a function calls in turn: torch takes a mode away while it handles a function.

        A subclass that does more when it is entered has done it: only the mode is put back.
        """
        TorchFunctionMode.__enter__(self)
        try:
            yield
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)

    @abstractmethod
    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the function returns."""


class Functions(FunctionMode):
    """Runs a step's functions in float64 if ``exact``, and without dropout unless ``dropout``.

    In float64, casts to a narrower floating type become casts to float64, so a loss that calls
    ``logits.float()`` loses nothing. Calls of the functions named in ``wanted`` (without it, of all) are
    passed to ``see``.
    """

    def __init__(
        self,
        *,
        exact: bool = False,
        dropout: bool = True,
        wanted: Collection[str] | None = None,
        see: Callable[[FunctionCall], None] | None = None,
    ) -> None:
        super().__init__()
        self._exact, self._dropout, self._wanted, self._see = exact, dropout, wanted, see

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._exact:
            func, args, kwargs = _widened(func, args, kwargs)
        if not self._dropout:
            args, kwargs = _without_dropout(func, args, kwargs)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self._see is not None and (self._wanted is None or name in self._wanted):
            self._see(FunctionCall(name, "", args, kwargs, result))
        return result


def _widened(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the same call with float64 wherever it names a narrower floating type."""
    if func in CASTS:
        func = Tensor.double
    if getattr(func, "__name__", "") in GROUPED_PRODUCTS:
        func = _grouped_mm  # torch has no kernel of it for float64
    args = tuple(WIDE if _narrow(a) else a for a in args)
    if func is Tensor.to and len(args) > 1 and isinstance(args[1], Tensor) and args[1].dtype in NARROW:
        args = (args[0], args[1].device, WIDE, *args[2:])
    if _narrow(kwargs.get("dtype")):
        kwargs["dtype"] = WIDE
    return func, args, kwargs


def _narrow(x: Any) -> bool:
    return isinstance(x, torch.dtype) and x in NARROW


def _grouped_mm(x: Tensor, weights: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """Multiply groups of rows `[N, K]`, which end at ``offs``, with a matrix `[K, M]` each."""
    if offs is None or x.ndim != 2 or weights.ndim != 3:
        return x @ weights
    ends = [0, *offs.tolist()]
    groups = [x[a:b] @ w for a, b, w in zip(ends, ends[1:], weights, strict=False)]
    return torch.cat([*groups, x[ends[-1] :] @ weights[-1]])


def _without_dropout(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if func not in DROPOUTS and func is not F.scaled_dot_product_attention:
        return args, kwargs
    place, name = (1, "p") if func in DROPOUTS else (4, "dropout_p")
    if len(args) > place:
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: 0.0}


def _seen_through(func: FunctionType) -> FunctionType:
    """Return the same function without its own dispatch to the mode, so that its inner calls are seen."""
    blind = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    seen = FunctionType(func.__code__, {**func.__globals__, **blind}, func.__name__, func.__defaults__)
    seen.__kwdefaults__ = func.__kwdefaults__
    return seen


@contextmanager
def own_functions(see: Callable[[FunctionCall], Any]) -> Iterator[None]:
    """Inside this block, pass each call of an autograd function written in Python to ``see``, which may
    return another result.
    """
    base = torch.autograd.Function
    own = base.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        RUNNING.append(cls)
        try:
            result = own.__func__(cls, *args, **kwargs)
        finally:
            RUNNING.pop()
        other = see(FunctionCall(OWN, "", args, kwargs, result))
        return result if other is None else other

    base.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        base.apply = own  # type: ignore[method-assign]


Which: TypeAlias = tuple[str, int]
"""A call in a pass: the name of the function, and how many calls of it come before."""


class Numbered(FunctionMode):
    """Numbers the calls of each function in a pass, those of autograd functions among them, and passes each
    to ``see``. Results in ``held`` stand in for what these calls return.
    """

    def __init__(
        self,
        *,
        see: Callable[[Which, FunctionCall], None] | None = None,
        held: Mapping[Which, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._see, self._held, self._counts = see, held or {}, Counter[str]()
        self._own = own_functions(self._replaced)

    def __enter__(self) -> Numbered:
        super().__enter__()
        self._own.__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._own.__exit__(exc_type, exc_val, exc_tb)
        super().__exit__(exc_type, exc_val, exc_tb)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        return self._replaced(FunctionCall(getattr(func, "__name__", ""), "", args, kwargs, result))

    def _replaced(self, call: FunctionCall) -> Any:
        which = call.name, self._counts[call.name]
        self._counts[call.name] += 1
        if self._see is not None:
            self._see(which, call)
        return self._held.get(which, call.result)


class Detachments(FunctionMode):
    """Sees where a step cuts its graph, by ``detach()``, ``data`` or ``no_grad()``, and undoes it where
    ``undone(module, file)`` says so, of the module that is running and the file whose code does it.

    What is undone passes on a view of the tensor, or computes with a graph; no number changes.
    """

    def __init__(self, running: Callable[[], str], undone: Callable[[str, str], bool]) -> None:
        super().__init__()
        self._running, self._undone = running, undone
        self._opened: list[tuple[str, str]] = []
        """Blocks without gradients that run with them now."""
        self.seen: dict[tuple[str, str], list[Tensor]] = {}
        """Module and file of each place that would have cut off something, in order, with the tensors there
        that have a graph now.
        """

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is GRADIENT_SWITCH:
            return self._switched(enabled=args[0])
        if func in CUTS and args[0].requires_grad:
            where = self._running(), _calling_file()
            if self._undone(*where):
                joined = args[0].view_as(args[0])
                self.seen.setdefault(where, []).append(joined)
                return joined
        result = func(*args, **kwargs)
        if self._opened:
            live = [x for _, x in tensors_in(result) if x.requires_grad]
            if live:
                self.seen.setdefault(self._opened[-1], []).extend(live)
        return result

    def _switched(self, *, enabled: bool) -> None:
        """Begin or end a block without gradients."""
        if enabled and self._opened:
            self._opened.pop()
        elif not enabled and torch.is_grad_enabled():
            where = self._running(), _calling_file()
            if self._undone(*where):
                self._opened.append(where)
                return
        GRADIENT_SWITCH(enabled)


def _calling_file() -> str:
    """Return the file whose code called into torch."""
    return _caller()[0].co_filename


class Narrowings(TorchDispatchMode):
    """Sees operations that make a narrower type of float64: no function mode sees the casts of code that
    ``torch.jit`` compiled, so such code computes in the type that it names, even in a float64 pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_function_modes():  # or a mode would see the operation, and widen it
            result = func(*args, **(kwargs or {}))
        if any(x.dtype is WIDE for _, x in tensors_in((args, kwargs or {}))):
            self.types |= {x.dtype for _, x in tensors_in(result) if _narrow(x.dtype)}
        return result


class Preserve(FunctionMode):
    """Replaces each recorded tensor that is about to be written to by a copy through which the graph leads:
    the copy has the value and the gradient that the tensor had before.
    """

    def __init__(self, held: dict[Any, Tensor]) -> None:
        super().__init__()
        self._held = held

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = [*(args[:1] if writes(func, kwargs) else ()), kwargs.get("out")]
        storages = {x.untyped_storage().data_ptr() for _, x in tensors_in(written)}
        copies: dict[int, Tensor] = {}
        for key, x in self._held.items() if storages else ():
            own = x.is_leaf and x.requires_grad  # autograd allows no writes to these
            if id(x) not in copies and x.untyped_storage().data_ptr() in storages and not own:
                copies[id(x)] = x.clone()
                x.copy_(copies[id(x)])
            self._held[key] = copies.get(id(x), x)
        return func(*args, **kwargs)


class ReadOnly(FunctionMode):
    """Refuses what would write to some tensors, given by the place of their numbers in memory with a name."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for _, x in tensors_in([*(args[:1] if writes(func, kwargs) else ()), kwargs.get("out")]):
            is_wrapper = is_traceable_wrapper_subclass(x) or is_functorch_wrapped(x)
            has_storage = x.layout is torch.strided and not is_wrapper
            if has_storage and (name := self._names.get(x.untyped_storage().data_ptr())) is not None:
                raise UserError(
                    f"{name} is written to, and is too large for a copy to put back ({x.nbytes / 2**30:.1f} "
                    "GiB): leave it out of what is handed over"
                )
        return func(*args, **kwargs)


def writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of torch writes to its first argument."""
    name = getattr(func, "__name__", "")
    inplace = (name.endswith("_") and not name.startswith("_")) or bool(kwargs.get("inplace"))
    return inplace or name == "__setitem__" or (name.startswith("__i") and name not in READING)


FILLS: Final = ("normal_", "uniform_", "zero_", "fill_")
"""Methods of a tensor that draw it, or make it a constant, whatever it held."""
CONSTANTS: Final = ("zero_", "fill_", "zeros_", "ones_", "constant_")


class Write(NamedTuple):
    """One write to a parameter: the function of torch, and the user's function that called it."""

    function: str
    by: CodeType
    is_plain: bool
    """Whether it is a draw or a constant of ``torch.nn.init``, or one of ``FILLS``."""

    @property
    def is_constant(self) -> bool:
        """Whether it makes all entries one number."""
        return self.is_plain and self.function in CONSTANTS


class Writes(FunctionMode):
    """Records what user code writes to whole parameters, by their places in memory; what modules of torch
    start with is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, list[Write]] = {}
        self._data: dict[int, tuple[Tensor, nn.Parameter]] = {}
        """What ``data`` of a parameter returned, with that parameter."""

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0] if args else kwargs.get("tensor")
        if id(target) in self._data:
            target = self._data[id(target)][1]
        result = func(*args, **kwargs)
        if isinstance(target, nn.Parameter):
            if func == DATA.__get__:
                self._data[id(result)] = result, target
            elif writes(func, kwargs) or func == DATA.__set__:
                by, through = _caller()
                if not any(module.startswith("torch.nn.modules") for module in through):
                    is_plain = "torch.nn.init" in through or func.__name__ in FILLS
                    self.seen.setdefault(id(target), []).append(Write(func.__name__, by, is_plain))
        return result


def _caller() -> tuple[CodeType, set[str]]:
    """Return the nearest function that is neither torch's nor of this file, and the modules in between."""
    frame, through = sys._getframe(1), set[str]()
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.partition(".")[0] != "torch":
            break
        through.add(module)
        frame = frame.f_back
    return frame.f_code, through


class ParameterReading(NamedTuple):
    """A function of a parameter and something else: a product with an input, a lookup, a norm's gain."""

    parameter: str
    nth: int
    """How many readings of the parameter come before it in the pass."""
    function: str
    change: Tensor
    """The result minus what the function returns if only this parameter has its other value."""


class Readings(FunctionMode):
    """Passes each reading of the parameters in ``others`` (other values by path) to ``see``.

    The result of a function of parameters alone, such as a cast, a view or a product of two of them, counts
    as the first of these; the same function gives its other value. Readings in ``instead``, pairs of a
    parameter and its ``nth``, return what they would at the other values.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Weights,
        see: Callable[[ParameterReading], None] | None,
        instead: frozenset[tuple[str, int]] = frozenset(),
    ) -> None:
        super().__init__()
        named = dict(model.named_parameters())
        self._known: dict[int, tuple[str, Tensor, Tensor]] = {
            id(p): (n, p, others[n].detach()) for n, p in named.items() if n in others
        }
        self._see, self._instead, self._counts = see, instead, Counter[str]()

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        given = [x for _, x in tensors_in((args, kwargs))]
        known = {id(x): x for x in given if id(x) in self._known}
        if not known or writes(func, kwargs) or kwargs.get("out") is not None:
            return result  # a second call would write again

        def other(*ids: int) -> Any:
            own, named = map_tensors(
                (args, kwargs), lambda _, x: self._known[id(x)][2] if id(x) in ids else x
            )
            return func(*own, **named)

        if all(id(x) in known for x in given):
            if made := [x for _, x in tensors_in(result) if id(x) not in self._known]:
                first = self._known[next(iter(known))][0]
                twins = [x for _, x in tensors_in(other(*known))]
                self._known |= {id(x): (first, x, y) for x, y in zip(made, twins, strict=False)}
        elif isinstance(result, Tensor) and result.is_floating_point():
            instead = list[int]()
            for i in known:
                parameter = self._known[i][0]
                nth = self._counts[parameter]
                self._counts[parameter] += 1
                if self._see is not None:
                    self._see(ParameterReading(parameter, nth, name, result - other(i)))
                if (parameter, nth) in self._instead:
                    instead.append(i)
            return other(*instead) if instead else result
        return result

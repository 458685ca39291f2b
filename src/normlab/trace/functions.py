"""See and change the calls of torch's functions in a pass: their types, their dropout, what they read and
write.

Each class here is a mode of torch: inside its block every function of torch is handed to it, with its
arguments, and it returns what the function should return. Most call it as it is and take notes; some call it
differently.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
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
from normlab.trace.patching import replace
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
        queries, keys = self.argument(0, "query"), self.argument(1, "key")
        heads, heads_of_keys = queries.shape[-3], keys.shape[-3]
        if heads != heads_of_keys:  # several heads of queries share those of keys
            keys = keys.repeat_interleave(heads // heads_of_keys, -3)
        scale = self.argument(6, "scale")
        return queries @ keys.mT * (queries.shape[-1] ** -0.5 if scale is None else scale)

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
        if func is F.multi_head_attention_forward:  # which torch would hand over as a whole
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
    args = tuple(WIDE if _is_narrow(argument) else argument for argument in args)
    other = args[1] if len(args) > 1 else None
    if func is Tensor.to and isinstance(other, Tensor) and other.dtype in NARROW:
        args = (args[0], other.device, WIDE, *args[2:])  # of the other tensor, only the device is taken over
    if _is_narrow(kwargs.get("dtype")):
        kwargs["dtype"] = WIDE
    return func, args, kwargs


def _is_narrow(value: Any) -> bool:
    """Return whether a value is a floating type narrower than float64."""
    return isinstance(value, torch.dtype) and value in NARROW


def _grouped_mm(x: Tensor, weights: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """Multiply groups of rows `[N, K]`, which end at ``offs``, with a matrix `[K, M]` each."""
    if offs is None or x.ndim != 2 or weights.ndim != 3:
        return x @ weights
    bounds = [0, *offs.tolist()]
    products = [
        x[start:end] @ matrix for (start, end), matrix in zip(pairwise(bounds), weights, strict=False)
    ]
    rows_in_no_group = x[bounds[-1] :] @ weights[-1]
    return torch.cat([*products, rows_in_no_group])


def _without_dropout(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the same call with the probability to drop an entry set to 0."""
    if func in DROPOUTS:
        place, name = 1, "p"
    elif func is F.scaled_dot_product_attention:
        place, name = 4, "dropout_p"
    else:
        return args, kwargs
    if len(args) > place:
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: 0.0}


def _seen_through(func: FunctionType) -> FunctionType:
    """Return the same function without its own dispatch to the mode, so that its inner calls are seen.

    It begins by asking ``has_torch_function``, which answers that a mode is on, and hands itself over again,
    without an end. So its code runs with other globals, in which the answer is no.
    """
    no = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    seen = FunctionType(func.__code__, {**func.__globals__, **no}, func.__name__, func.__defaults__)
    seen.__kwdefaults__ = func.__kwdefaults__
    return seen


@contextmanager
def own_functions(see: Callable[[FunctionCall], Any]) -> Iterator[None]:
    """Inside this block, pass each call of an autograd function written in Python to ``see``, which may
    return another result.
    """
    torchs_own = vars(torch.autograd.Function)["apply"].__func__

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        RUNNING.append(cls)
        try:
            result = torchs_own(cls, *args, **kwargs)
        finally:
            RUNNING.pop()
        other = see(FunctionCall(OWN, "", args, kwargs, result))
        return result if other is None else other

    with ExitStack() as stack:
        replace(stack, torch.autograd.Function, "apply", classmethod(apply))
        yield


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
            with_graph = [x for _, x in tensors_in(result) if x.requires_grad]
            if with_graph:
                self.seen.setdefault(self._opened[-1], []).extend(with_graph)
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
            self.types |= {x.dtype for _, x in tensors_in(result) if _is_narrow(x.dtype)}
        return result


class Preserve(FunctionMode):
    """Replaces each recorded tensor that is about to be written to by a copy through which the graph leads:
    the copy has the value and the gradient that the tensor had before.
    """

    def __init__(self, recorded: dict[Any, Tensor]) -> None:
        super().__init__()
        self._recorded = recorded

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = {x.untyped_storage().data_ptr() for x in _written_by(func, args, kwargs)}
        copies: dict[int, Tensor] = {}
        for key, x in self._recorded.items() if written else ():
            is_parameter = x.is_leaf and x.requires_grad  # autograd allows no writes to these
            if id(x) not in copies and x.untyped_storage().data_ptr() in written and not is_parameter:
                copies[id(x)] = x.clone()
                # from here on the graph leads from the tensor to the copy: its gradient arrives there
                x.copy_(copies[id(x)])
            self._recorded[key] = copies.get(id(x), x)
        return func(*args, **kwargs)


class ReadOnly(FunctionMode):
    """Refuses what would write to some tensors, given by the place of their numbers in memory with a name."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in _written_by(func, args, kwargs):
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
    if kwargs.get("inplace"):
        return True
    is_named_so = name.endswith("_") and not name.startswith("_")  # as add_
    is_assignment = name == "__setitem__" or (name.startswith("__i") and name not in READING)  # as __iadd__
    return is_named_so or is_assignment


def _written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a call writes to: its first argument, or ``out``."""
    written = [*(args[:1] if writes(func, kwargs) else ()), kwargs.get("out")]
    yield from (x for _, x in tensors_in(written))


FILLS: Final = ("normal_", "uniform_", "zero_", "fill_")
"""Methods of a tensor that draw it, or make it a constant, whatever it held."""
CONSTANTS: Final = ("zero_", "fill_", "zeros_", "ones_", "constant_")
"""Methods of a tensor, and functions of ``torch.nn.init``, that make all entries one number."""


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
    """Records what user code writes to whole parameters, by the ``id`` of each; what modules of torch write
    themselves is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, list[Write]] = {}
        self._data: dict[int, tuple[Tensor, nn.Parameter]] = {}
        """What ``data`` of a parameter returned, with that parameter."""

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0] if args else kwargs.get("tensor")
        if id(target) in self._data:
            _, target = self._data[id(target)]
        result = func(*args, **kwargs)
        if not isinstance(target, nn.Parameter):
            return result
        if func == DATA.__get__:
            self._data[id(result)] = result, target
        elif writes(func, kwargs) or func == DATA.__set__:
            self._note(target, func.__name__)
        return result

    def _note(self, parameter: nn.Parameter, function: str) -> None:
        by, through = _caller()
        if any(module.startswith("torch.nn.modules") for module in through):
            return
        is_plain = "torch.nn.init" in through or function in FILLS
        self.seen.setdefault(id(parameter), []).append(Write(function, by, is_plain))


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


class _OfParameters(NamedTuple):
    """A parameter, or what a function of parameters alone returned."""

    parameter: str
    """The path of the first of them."""
    tensor: Tensor
    """Held so that no other tensor gets its ``id``."""
    other: Tensor
    """Its value at the other values of the parameters."""


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
        self._known: dict[int, _OfParameters] = {
            id(p): _OfParameters(path, p, others[path].detach())
            for path, p in model.named_parameters()
            if path in others
        }
        """By ``id``: the parameters, and what functions of them alone returned."""
        self._see, self._instead, self._counts = see, instead, Counter[str]()

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        tensors = [x for _, x in tensors_in((args, kwargs))]
        known = list(dict.fromkeys(id(x) for x in tensors if id(x) in self._known))
        if not known or writes(func, kwargs) or kwargs.get("out") is not None:
            return result  # a second call would write again

        def with_other_values_of(ids: Collection[int]) -> Any:
            """Call the function again with the other values of these tensors."""
            other_args, other_kwargs = map_tensors(
                (args, kwargs), lambda _, x: self._known[id(x)].other if id(x) in ids else x
            )
            return func(*other_args, **other_kwargs)

        if all(id(x) in self._known for x in tensors):
            self._follow(result, self._known[known[0]].parameter, lambda: with_other_values_of(known))
            return result
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        return self._read(result, getattr(func, "__name__", ""), known, with_other_values_of)

    def _follow(self, result: Any, parameter: str, other_result: Callable[[], Any]) -> None:
        """Let what a function of parameters alone returned count as the first of them."""
        new = [x for _, x in tensors_in(result) if id(x) not in self._known]
        if not new:
            return
        others = [x for _, x in tensors_in(other_result())]
        for x, other in zip(new, others, strict=False):
            self._known[id(x)] = _OfParameters(parameter, x, other)

    def _read(
        self,
        result: Tensor,
        function: str,
        known: Sequence[int],
        other_result: Callable[[Collection[int]], Any],
    ) -> Any:
        """Show each parameter that a function reads, and return what the function is to return."""
        instead = list[int]()
        for number in known:
            parameter = self._known[number].parameter
            nth = self._counts[parameter]
            self._counts[parameter] += 1
            if self._see is not None:
                change = result - other_result([number])
                self._see(ParameterReading(parameter, nth, function, change))
            if (parameter, nth) in self._instead:
                instead.append(number)
        return other_result(instead) if instead else result

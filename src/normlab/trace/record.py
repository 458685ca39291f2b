"""See and change what flows through a step, with hooks on modules and at calls of torch functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import FunctionType
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normlab.errors import UserError
from normlab.trace.tensors import Side, Tap, activations, forward_hooks, tensors_in, unwrap

ROOM: Final = 256
"""How many hooks on tensors are held before those of dead tensors are released."""
WIDE: Final = torch.float64
NARROW: Final = (torch.float32, torch.float16, torch.bfloat16)
CASTS: Final = {Tensor.float, Tensor.half, Tensor.bfloat16}
DROPOUTS: Final = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
}  # fmt: skip
OWN: Final = "Function.apply"
"""The name under which calls of autograd functions written in Python are recorded."""
RUNNING: Final = list[type]()
"""The autograd functions that are running now, inside which nothing has a graph."""
READING: Final = ("__int__", "__iter__", "__invert__", "__index__", "__init__")
"""Methods of tensors with names that begin like in-place ones, but do not write."""


class Want(NamedTuple):
    """What to record: a tensor that enters or leaves the modules whose path matches a glob, or its gradient.

    ``keep`` runs inside the hook, without gradients: it returns a statistic, a sample of rows, or the tensor
    itself. ``first`` takes only the first tensor of a call.
    """

    module: str
    side: Side = "output"
    signal: Literal["value", "grad"] = "value"
    keep: Callable[[Tensor], Any] = Tensor.detach
    first: bool = False


class Seen(NamedTuple):
    """One recorded value."""

    tap: Tap
    want: Want
    value: Any
    nth: int = 0
    """How many tensors of the call come before this one."""


def matching(modules: Mapping[str, nn.Module], glob: str) -> list[str]:
    """Return the paths that a path or a glob names. Raises UserError if there are none."""
    matched = [glob] if glob in modules else [path for path in modules if fnmatchcase(path, glob)]
    if not matched:
        some = ", ".join([path for path in modules if path][:8])
        raise UserError(f"no module matches {glob!r}; the paths begin {some}, …")
    return matched


@contextmanager
def record(
    model: nn.Module, wants: Iterable[Want], *, on_error: Callable[[Exception], None] | None = None
) -> Iterator[list[Seen]]:
    """Fill the list, in order, with what somebody else's step shows. Nothing waits for the device.

    What is taken out of the list is released. A failure raises where the model runs, unless ``on_error``
    takes it. Raises UserError for a want that matches no module.

    >>> from normlab.trace.record import Want
    >>> with normlab.record(model, [Want("decoder.end", keep=torch.linalg.vector_norm)]) as seen:
    ...     _ = loss(model, batch)
    >>> [(one.tap.module, one.value > 0) for one in seen]
    [('decoder.end', tensor(True))]
    """
    modules = dict(unwrap(model).named_modules())
    here: dict[str, list[Want]] = {}
    for want in wants:
        for path in matching(modules, want.module):
            here.setdefault(path, []).append(want)
    hooks = _Hooks(here, on_error)
    try:
        with forward_hooks({path: modules[path] for path in modules if path in here}, hooks.see):
            yield hooks.seen
    finally:
        for handle in hooks.handles:
            handle.remove()


class _Hooks:
    """Applies wants to what modules show, and holds the hooks that wait for gradients."""

    def __init__(self, wants: dict[str, list[Want]], on_error: Callable[[Exception], None] | None) -> None:
        self._wants, self._on_error = wants, on_error
        self._calls = Counter[tuple[str, Side]]()
        self.handles: list[Any] = []
        self._room = ROOM
        self.seen: list[Seen] = []

    def see(self, path: str, side: Side, values: Any) -> None:
        again = torch._C._current_graph_task_id() != -1  # a checkpointed layer runs again in backward
        call = self._calls[path, side]
        self._calls[path, side] += not again
        with self._caught():
            for want in self._wants[path]:
                if want.side == side and not (again and (want.signal == "value" or side == "input")):
                    self._apply(want, Tap(path, side, call=call), values)

    def _apply(self, want: Want, where: Tap, values: Any) -> None:
        for nth, (place, x) in enumerate(activations(values)):
            tap = Tap(where.module, where.side, place, where.call)

            def add(value: Tensor, tap: Tap = tap, nth: int = nth) -> None:
                with self._caught(), torch.no_grad():
                    self.seen.append(Seen(tap, want, want.keep(value), nth))

            if want.signal == "value":
                add(x)
            elif x.requires_grad:
                self._await(x, add)
            if want.first:
                return

    def _await(self, x: Tensor, add: Callable[[Tensor], None]) -> None:
        if len(self.handles) >= self._room:
            self.handles = [handle for handle in self.handles if handle.hooks_dict_ref() is not None]
            self._room = ROOM + 2 * len(self.handles)
        self.handles.append(x.register_hook(add))

    @contextmanager
    def _caught(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)


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
            with self:  # what it calls is seen too
                return _seen_through(func)(*args, **kwargs)
        return self.called(func, args, kwargs)

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
    if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
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
def own_functions(see: Callable[[FunctionCall], None]) -> Iterator[None]:
    """Inside this block, pass each call of an autograd function written in Python to ``see``."""
    base = torch.autograd.Function
    own = base.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        RUNNING.append(cls)
        try:
            result = own.__func__(cls, *args, **kwargs)
        finally:
            RUNNING.pop()
        see(FunctionCall(OWN, "", args, kwargs, result))
        return result

    base.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        base.apply = own  # type: ignore[method-assign]


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


def writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of torch writes to its first argument."""
    name = getattr(func, "__name__", "")
    inplace = (name.endswith("_") and not name.startswith("_")) or bool(kwargs.get("inplace"))
    return inplace or name == "__setitem__" or (name.startswith("__i") and name not in READING)

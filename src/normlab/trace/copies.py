"""Copies of a model that run their own modules and weights, and the proof that one does.

``copy.deepcopy`` copies modules and tensors, but no functions. Where a module holds a function that leads
back to the model, such as a ``forward`` that was wrapped on the instance, its copy would run the original's
modules.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from normlab.private_torch import is_functorch_wrapped, is_traceable_wrapper_subclass
from normlab.setups.setup import Loss
from normlab.trace.autograd import Weights
from normlab.trace.budget import require_time
from normlab.trace.reach import deep_copy
from normlab.trace.restore import undisturbed
from normlab.trace.tensors import tensors_in, unwrap
from normlab.trace.trace import Trace

CONTAINERS: Final = (dict, list, set, deque)
"""Kinds of containers that are filled after they are made, so that they may hold themselves."""
FIXED: Final = (FunctionType, MethodType, partial, tuple, frozenset)
"""Kinds of objects that are made with what they hold."""


def copied_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a model; ``memo`` is that of ``deepcopy``. After the deadline of ``passes_until``, none is begun.

    Locks and modules of Python, which have no copies, are shared. Functions that its modules hold lead to the
    copy wherever they led to the model: hooks, and a ``forward`` that was wrapped by a closure, a partial or
    ``torch.compile``.

    Functions are followed as far as Python shows what they hold; ``proof_of`` says whether that was enough.
    """
    require_time()
    memo = {} if memo is None else memo
    twin = deep_copy(model, memo)
    lead_to_copies(memo)
    return twin


def lead_to_copies(memo: dict[int, Any]) -> None:
    """Replace the functions that copies hold, if they lead to what was copied.

    ``memo`` is that of ``deepcopy``; what is copied for the sake of these functions is added to it.
    """
    _Rebinding(memo).rebind_copies()


class _Rebinding:
    """Makes functions, and what they hold, again for copies, each once.

    Followed are what is called (functions, methods, partials, objects that can be called, such as those that
    wrap a function) and containers. Any other object is shared unless it was copied already: it may lead
    anywhere, as a trainer leads to its data.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._copies = dict[int, Any]()
        """By identity: what was made here or by ``deepcopy``."""
        self._globals = dict[int, dict[str, Any]]()
        """By the identity of a file's globals: the globals of its functions that are made again."""

    def rebind_copies(self) -> None:
        """Go through every copied object, also those that are copied on the way."""
        done = set[int]()
        while waiting := [x for x in self._known_copies() if id(x) not in done]:
            for holder in waiting:
                done.add(id(holder))
                self._rebind_in(holder)

    def _known_copies(self) -> list[Any]:
        """Return the copies. Under its own identity, the memo also lists originals, to keep them alive."""
        for key, value in self._memo.items():
            if key not in (id(value), id(self._memo)):
                self._copies[id(value)] = value
        return list(self._copies.values())

    def _rebind_in(self, holder: Any) -> None:
        """Replace what a copy holds. Its containers are copies, too, and have their own turn."""
        if isinstance(holder, dict):
            held: Mapping[Any, Any] = holder
            target: Any = holder
        elif isinstance(holder, (list, deque)):
            held, target = dict(enumerate(holder)), holder
        elif isinstance(holder, FIXED) or not hasattr(holder, "__dict__"):
            return
        else:
            held = target = vars(holder)  # not by setattr, which a module uses to register or to refuse
        for key, value in list(held.items()):
            if not isinstance(value, CONTAINERS) and (new := self._for_copies(value)) is not value:
                target[key] = new

    def _for_copies(self, value: Any) -> Any:
        """Return what takes the place of a value in copies: itself, unless it leads to what was copied."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        is_copy = id(value) in self._copies and not isinstance(value, FIXED)
        return value if is_copy or not self._leads_to_copied(value) else self._made_again(value)

    def _made_again(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self._for_copies(value.__func__), self._for_copies(value.__self__))
        if isinstance(value, partial):
            positional = [self._for_copies(x) for x in value.args]
            named = {name: self._for_copies(x) for name, x in value.keywords.items()}
            new = partial(self._for_copies(value.func), *positional, **named)
            vars(new).update({name: self._for_copies(x) for name, x in vars(value).items()})
            return new
        if isinstance(value, (tuple, frozenset)):
            items = [self._for_copies(x) for x in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return self._filled(value)

    def _filled(self, value: Any) -> Any:
        """Copy a container, a module or an object that can be called, and fill it."""
        if isinstance(value, nn.Module):
            new = deep_copy(value, self._memo)
            self._known_copies()
            return new
        try:
            new = copy.copy(value)
        except Exception:  # an object of the user's may refuse
            return value
        if new is value:  # as a cached function, which cannot be copied
            return value
        self._memo[id(value)] = self._copies[id(new)] = new
        if isinstance(value, dict):
            for key, held in value.items():
                new[key] = self._for_copies(held)
        elif isinstance(value, (list, deque)):
            for i, held in enumerate(value):
                new[i] = self._for_copies(held)
        elif isinstance(value, set):
            new.clear()
            new.update(self._for_copies(held) for held in value)
        else:
            for name, held in vars(value).items():
                vars(new)[name] = self._for_copies(held)
        return new

    def _function(self, function: FunctionType) -> FunctionType:
        """Make a function again. A cell is filled only then, since what it holds may hold the function."""
        cells = tuple(CellType() for _ in function.__closure__ or ())
        named = _named_globals(function)
        moved = self._leads_to_copied(tuple(named.values()))
        space = self._space_of(function) if moved else function.__globals__
        new = FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
        self._memo[id(function)] = self._copies[id(new)] = new
        for cell, empty in zip(function.__closure__ or (), cells, strict=True):
            with suppress(ValueError):  # nothing is in it yet
                empty.cell_contents = self._for_copies(cell.cell_contents)
        new.__defaults__ = self._for_copies(function.__defaults__)
        if function.__kwdefaults__:
            new.__kwdefaults__ = {n: self._for_copies(x) for n, x in function.__kwdefaults__.items()}
        new.__qualname__, new.__doc__ = function.__qualname__, function.__doc__
        new.__module__, new.__annotations__ = function.__module__, function.__annotations__
        vars(new).update({name: self._for_copies(x) for name, x in vars(function).items()})
        if moved:
            space.update({name: self._for_copies(x) for name, x in named.items()})
        return new

    def _space_of(self, function: FunctionType) -> dict[str, Any]:
        """Return the globals of the copies of a file's functions: what one of them sets, the others see."""
        known = self._globals.setdefault(id(function.__globals__), {})
        known.update({name: x for name, x in function.__globals__.items() if name not in known})
        return known

    def _leads_to_copied(self, value: Any) -> bool:
        """Return whether something that was copied can be reached from a value."""
        waiting, known = [value], set[int]()
        while waiting:
            inner = waiting.pop()
            if self._memo.get(id(inner), inner) is not inner:
                return True
            if id(inner) not in known:
                known.add(id(inner))
                waiting.extend(_held_by(inner))
        return False


@dataclass
class Use:
    """What ran of a model, and what was read of it."""

    modules: set[str] = field(default_factory=set)
    """Paths of the modules that were called."""
    tensors: set[str] = field(default_factory=set)
    """Paths of the parameters and buffers that functions of torch were given."""

    @property
    def paths(self) -> list[str]:
        """Both, in the order of their names; "" is the model as a whole."""
        return sorted(self.modules | self.tensors)

    def beside(self, other: Use) -> set[str]:
        """Return the paths that are not in the other use."""
        return self.modules - other.modules | self.tensors - other.tensors


@contextmanager
def use_of(model: nn.Module, *, in_graph: bool = False) -> Iterator[Use]:
    """Record, inside this block, what is used of a model, by whatever means it is reached; with ``in_graph``,
    tensors count only where a gradient may flow from what is computed of them.

    The hook is torch's global one: nothing is attached to the model, which may be somebody else's.
    """
    use = Use()
    paths = {id(module): path for path, module in model.named_modules()}

    def called(module: nn.Module, _: Any) -> None:
        if id(module) in paths:
            use.modules.add(paths[id(module)])

    handle = register_module_forward_pre_hook(called)
    try:
        with _Reads(model, use, in_graph=in_graph):
            yield use
    finally:
        handle.remove()


class _Reads(TorchFunctionMode):
    """Sees functions of torch that read a model's parameters and buffers, or views of them."""

    def __init__(self, model: nn.Module, use: Use, *, in_graph: bool) -> None:
        super().__init__()
        self._use, self._in_graph = use, in_graph
        self._paths = dict[Any, str]()
        for path, x in (*model.named_parameters(), *model.named_buffers()):
            self._paths |= dict.fromkeys(_marks_of(x), path)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        marks = {mark for _, x in tensors_in((args, kwargs or {})) for mark in _marks_of(x)}
        known = marks & self._paths.keys()
        result = func(*args, **kwargs or {})
        if known and _is_reading(result, in_graph=self._in_graph):
            self._use.tensors.update(self._paths[mark] for mark in known)
        return result


def _marks_of(x: Tensor) -> Iterator[Any]:
    """Yield what a tensor is known by: itself, and its storage, if it has one, which its views have too."""
    yield id(x)
    is_wrapper = is_traceable_wrapper_subclass(x) or is_functorch_wrapped(x)
    if x.layout is torch.strided and not x.is_meta and not is_wrapper:
        storage = x.untyped_storage()
        if storage.nbytes():
            yield storage.device, storage.data_ptr()


def _is_reading(result: Any, *, in_graph: bool) -> bool:
    """Return whether a function returns numbers, and not just a tensor's size, type or device."""
    if in_graph:
        return any(x.grad_fn is not None for _, x in tensors_in(result))
    return isinstance(result, float) or any(True for _ in tensors_in(result))


OTHER_MODEL: Final = (
    "the loss runs another model than it is given: call the one that loss(model, batch) receives"
)


class Proof(NamedTuple):
    """Whether a loss runs the model that it is given, and whether a copy of that model runs by itself."""

    runs: bool
    refusal: str = ""
    """Why no copy of the model may stand in for it, and what to do; empty if one may."""
    twin: nn.Module | None = None
    """The copy that was run, with the model's weights, if it may stand in for the model."""
    copy_s: float = 0.0
    """Seconds that copying took."""


def proof_of(model: nn.Module, batch: Any, loss_of: Loss) -> Proof:
    """Run a model once, then a copy of it, and compare what is used of the two.

    A copy may stand in for the model if its pass uses nothing of the original, and uses of the copy all that
    the model's own pass uses of the model. What the model's own pass raises is not caught.
    """
    kind = type(model).__name__
    begun = time.monotonic()
    twin: nn.Module | Exception
    try:
        twin = copied_model(model)
    except Exception as error:  # the model may be anyone's
        twin = error
    copy_s = time.monotonic() - begun
    weights = weights_apart(model, twin if isinstance(twin, nn.Module) else None)
    (needed,) = _uses(model, weights, batch, loss_of, model)
    if not needed.paths:
        return Proof(False, OTHER_MODEL)
    try:
        if isinstance(twin, Exception):
            raise twin
        strayed, used = uses_of_copy(twin, model, batch, loss_of)
    except Exception as error:
        return Proof(True, f"a copy of {kind} cannot be made or run: {type(error).__name__}: {error}")
    if strayed.paths:
        return Proof(True, refusal_of(model, strayed, used))
    if missing := needed.beside(used):
        # the first pass may have kept a table for all later ones
        (again,) = _uses(model, weights, batch, loss_of, model)
        missing &= again.beside(used)
    if missing:
        return Proof(
            True, f"a copy of {kind} does not use {min(missing) or 'the module itself'}, as {kind} does"
        )
    return Proof(True, twin=twin, copy_s=copy_s)


def weights_apart(model: nn.Module, twin: nn.Module | None) -> dict[str, Tensor]:
    """Return the values of a model's parameters in tensors to which its passes do not write: those of a copy,
    or new ones where that has none, or others.
    """
    copies = dict[str, Tensor]()
    if twin is not None:
        copies |= {name: p.detach() for name, p in twin.named_parameters()}
    values = dict[str, Tensor]()
    for name, p in model.named_parameters():
        other = copies.get(name)
        is_apart = other is not None and set(_marks_of(other)).isdisjoint(_marks_of(p.detach()))
        values[name] = other if is_apart and same_bits(p, other) else p.detach().clone()
    return values


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal; what is not a number equals itself."""
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def put_back_weights(model: nn.Module, weights: Weights) -> None:
    """Give parameters these values, by their paths, without writing to those that have them."""
    for name, p in model.named_parameters():
        if name in weights and not same_bits(p, weights[name]):
            p.data.copy_(weights[name])


def uses_of_copy(twin: nn.Module, model: nn.Module, batch: Any, loss_of: Loss) -> tuple[Use, Use]:
    """Run one pass of a copy, and return what it uses of the model that it was made from, and of the copy."""
    with undisturbed(model):  # whose modules may run, after all
        strayed, used = _uses(twin, weights_apart(twin, model), batch, loss_of, model, twin)
    return strayed, used


def _uses(called: nn.Module, weights: Weights, batch: Any, loss_of: Loss, *watched: nn.Module) -> list[Use]:
    """Run one pass of a model, and return what it uses of each model that is watched.

    A pass may write to its weights, as a table with ``max_norm`` does: they are put back.
    """
    uses = list[Use]()

    def watched_loss(model: nn.Module, batch: Any) -> Any:
        with ExitStack() as stack:
            uses[:] = [stack.enter_context(use_of(module)) for module in watched]
            return loss_of(model, batch)

    try:
        Trace(called, batch, watched_loss).once()
    finally:
        put_back_weights(called, weights)
    return uses


def refusal_of(model: nn.Module, strayed: Use, used: Use) -> str:
    """Say what a pass of a copy used of the original, and what to do about it."""
    kind = type(unwrap(model)).__name__
    if not used.paths:
        return OTHER_MODEL
    where = strayed.paths[0] or "the module itself"
    return (
        f"a copy of {kind} still uses {where} of the original: call only the model that the loss, or the "
        "step, receives, define forward in its class, and hold what that wraps as a submodule"
    )


def _held_by(value: Any) -> Iterator[Any]:
    """Yield what is followed from a value."""
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # nothing is in it yet
                yield cell.cell_contents
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from vars(value).values()
        yield from _named_globals(value).values()
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values(), *vars(value).values())
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (tuple, frozenset, list, set, deque)):
        yield from value
    elif isinstance(value, nn.Module):
        yield from (*value.modules(), *value.parameters(), *value.buffers())
    elif callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from vars(value).values()


def _named_globals(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function's code names, without the functions of other files."""
    space, named = function.__globals__, dict[str, Any]()
    for name in _names_in(function.__code__):
        value = space.get(name)
        elsewhere = isinstance(value, FunctionType) and value.__globals__ is not space
        if name in space and not elsewhere:
            named[name] = value
    return named


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # of a function that this one defines
            yield from _names_in(constant)

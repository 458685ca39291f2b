"""Name the tensors of a forward pass by where they are seen, and catch them there."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normlab.errors import UserError
from normlab.spec.arguments import validate_arguments

Side = Literal["input", "output"]
Place = tuple[int | str, ...]
Call = Callable[[nn.Module, Any], Any]
"""``call(model, batch)``: the model's output."""
WRITES = re.compile(r"[^_].*[^_]_|__i(?!n|ter)\w+__|__setitem__")
"""Names of the functions that write to their first argument."""


@dataclass(frozen=True)
class Tap:
    """One tensor that enters or leaves one call of a module.

    ``place`` leads to it: the position or keyword of an argument, or the index, key or field of an output,
    and onwards through what is nested; () is an output that is the tensor itself. ``call`` counts the calls
    of the module in a forward pass, from 0.
    """

    module: str
    side: Side
    place: Place = ()
    call: int = 0

    def __str__(self) -> str:
        where = "".join(f"[{key!r}]" for key in self.place)
        return f"{self.module}.{self.side}{where}" + (f" of call {self.call}" if self.call else "")


def leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Yield every tensor in tuples, lists, mappings and dataclasses, with its place."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*place, key))
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from leaves(item, (*place, i))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), (*place, field.name))


def activations(value: Any) -> Iterator[tuple[Place, Tensor]]:
    """Yield the floating tensors `[..., D]` among them."""
    return ((place, x) for place, x in leaves(value) if x.is_floating_point() and x.ndim > 1 and x.numel())


def unwrapped(model: nn.Module) -> list[nn.Module]:
    """Return the model and what its wrappers (data parallel, compiled) hold, the bare model last."""
    models = [model]
    while True:
        outer = models[-1]
        if isinstance(outer, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            models.append(outer.module)
        elif isinstance(inner := getattr(outer, "_orig_mod", None), nn.Module):
            models.append(inner)
        else:
            return models


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers, whose module paths are the ones that count."""
    return unwrapped(model)[-1]


def compiles(module: nn.Module) -> bool:
    """Whether calls of the module run compiled code."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def watching(modules: Mapping[str, nn.Module], see: Callable[[str, Side, Any], None]) -> Iterator[None]:
    """Call ``see(path, side, values)``, inside this block, with the inputs and outputs of each module."""

    def watch(path: str, module: nn.Module) -> Iterator[Any]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            see(path, "input", {**dict(enumerate(args)), **kwargs})

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            see(path, "output", output)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    handles: list[Any] = []
    try:
        for path, module in modules.items():
            handles.extend(watch(path, module))
        yield
    finally:
        for handle in handles:
            handle.remove()


@validate_arguments
@contextmanager
def capture(model: nn.Module, taps: Iterable[Tap]) -> Iterator[dict[Tap, Tensor]]:
    """Fill the dictionary, inside this block, with the tensors of one forward pass, graphs included, as they
    were when they were seen, whatever is then added to them in place.

    Raises UserError for a module that the model does not have.
    """
    modules = dict(bare(model).named_modules())
    wanted: dict[tuple[str, Side, int], list[Tap]] = defaultdict(list)
    for tap in taps:
        if tap.module not in modules:
            raise UserError(f"the model has no module {tap.module!r}; read_structure gives taps that it has")
        wanted[tap.module, tap.side, tap.call].append(tap)
    calls: Counter[tuple[str, Side]] = Counter()
    caught: dict[Tap, Tensor] = {}

    def see(path: str, side: Side, values: Any) -> None:
        here = wanted.get((path, side, calls[path, side]), ())
        calls[path, side] += 1
        for tap in here:
            caught[tap] = at(values, tap.place)

    with watching({path: modules[path] for path, _, _ in wanted}, see), _Preserve(caught):
        yield caught


class _Preserve(TorchFunctionMode):
    """Puts a copy in the place of each of these tensors that is about to be written to, with the graph
    leading through the copy: it has the value, and the gradient, that the tensor had before.
    """

    def __init__(self, caught: dict[Tap, Tensor]) -> None:
        super().__init__()
        self._caught = caught

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        writes = WRITES.fullmatch(getattr(func, "__name__", "")) or given.get("inplace")
        written = [*(args[:1] if writes else ()), given.get("out")]
        for storage in {x.untyped_storage().data_ptr() for _, x in leaves(written)}:
            self._preserve(storage)
        return func(*args, **given)

    def _preserve(self, storage: int) -> None:
        held = {id(x): x for x in self._caught.values() if x.untyped_storage().data_ptr() == storage}
        for i, x in held.items():
            if not (x.is_leaf and x.requires_grad):  # autograd lets nothing write to these
                held[i] = x.clone()
                x.copy_(held[i])
        self._caught |= {tap: held[id(x)] for tap, x in self._caught.items() if id(x) in held}


def at(values: Any, place: Place) -> Any:
    """Return the value at a place."""
    for key in place:
        nested = isinstance(values, (Mapping, tuple, list))
        values = values[key] if nested else getattr(values, str(key))
    return values


_CALLING: ContextVar[tuple[nn.Module, Call | None] | None] = ContextVar("_CALLING", default=None)


@contextmanager
def calling(model: nn.Module, call: Call | None) -> Iterator[None]:
    """Let ``call_model`` call this model by ``call(model, batch)`` inside this block; without a call, by the
    type of the batch.
    """
    before = _CALLING.set((model, call))
    try:
        yield
    finally:
        _CALLING.reset(before)


def call_of(model: nn.Module) -> Call | None:
    """Return the function by which ``call_model`` calls this model, None where it goes by the type of the
    batch.
    """
    given = _CALLING.get()
    return given[1] if given is not None and given[0] is model else None


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call ``model(**batch)``, ``model(*batch)`` or ``model(batch)``, by the type of the batch, or as the
    surrounding ``calling`` says.
    """
    if (call := call_of(model)) is not None:
        return call(model, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


@contextmanager
def eager() -> Iterator[None]:
    """Run modules as they were written inside this block, hooks included: without compiled code, and without
    torch's fast path through encoder layers, which packs padded rows into nested tensors.
    """
    compiler = "torch._dynamo" in sys.modules  # nothing is compiled without it, and importing it takes long
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.compiler.set_stance("force_eager") if compiler else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep the model in evaluation mode inside this block, without gradients and as ``eager`` runs it."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), eager():
            yield
    finally:
        for module in training:
            module.training = True

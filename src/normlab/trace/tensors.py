"""Find tensors in nested values and modules inside wrappers, and see what modules read and write."""

from __future__ import annotations

import copy
import gc
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor, nn

from normlab.private_torch import compiler_is_loaded, inside_compiled, unsaved_buffers

T = TypeVar("T")
Side = Literal["input", "output"]
Place = tuple[int | str, ...]
Call = Callable[[nn.Module, Any], Any]
"""``call(model, batch)``: the model's output."""
PARALLEL: Final = (nn.parallel.DistributedDataParallel, nn.DataParallel)
LATER: Final = 10**6
"""A count of steps late in training, when every schedule is over."""


@dataclass(frozen=True)
class Tap:
    """One tensor that enters or leaves one call of a module.

    ``place`` leads to it: the position or keyword of an argument, or the index, key or field of an output,
    and so on through nested values; () is an output that is itself the tensor. ``call`` counts the calls of
    the module in a forward pass, from 0.
    """

    module: str
    side: Side
    place: Place = ()
    call: int = 0

    def __str__(self) -> str:
        where = "".join(f"[{key!r}]" for key in self.place)
        tensor = f"{self.module}.{self.side}" if self.module else self.side
        return f"{tensor}{where}" + (f" of call {self.call}" if self.call else "")


def tensors_in(value: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Yield every tensor in tuples, lists, mappings and dataclasses, with its place."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, (*place, key))
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors_in(item, (*place, i))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if hasattr(value, field.name):  # one that is being built lacks some
                yield from tensors_in(getattr(value, field.name), (*place, field.name))


def is_zero(x: Tensor) -> bool:
    """Return whether every entry of a tensor is 0. The first entry is looked at first: in most tensors that
    settles it.
    """
    return not x.reshape(-1)[:1].any() and not x.any()


def place_name(place: Place) -> str:
    """Return the name of an entry of a batch; a batch that is one tensor has none, and is named itself."""
    return ".".join(map(str, place)) or "batch"


def bytes_of(x: Tensor) -> bytes:
    """Return the bytes of a tensor's entries, in order."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def rows_of(batch: Any) -> int:
    """Return B, the length that most tensors of a batch begin with."""
    lengths = Counter(x.size(0) for _, x in tensors_in(batch) if x.ndim)  # nested tensors have no shape
    return lengths.most_common(1)[0][0] if lengths else 1


def numbers_in(value: Any) -> int:
    """Return how many numbers the tensors of a batch hold; 1 if they hold none."""
    return sum(x.numel() for _, x in tensors_in(value)) or 1


def activations(value: Any) -> Iterator[tuple[Place, Tensor]]:
    """Yield the floating tensors `[..., D]` in a nested value, with their places; vectors and empty ones are
    left out.
    """
    return (
        (place, x) for place, x in tensors_in(value) if x.is_floating_point() and x.ndim > 1 and x.numel()
    )


def map_tensors(
    value: Any,
    change: Callable[[Place, Tensor], Tensor],
    place: Place = (),
    *,
    other: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Return the same nested value with each tensor changed, and each ``other`` object."""
    if isinstance(value, Tensor):
        return change(place, value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, change, (*place, key), other=other) for key, item in value.items()}
        with suppress(Exception):  # of the same kind where a dict makes one, as Hugging Face's encodings
            return type(value)(items)  # pyrefly: ignore[bad-argument-count]
        return items
    if isinstance(value, (tuple, list)):
        made = [map_tensors(item, change, (*place, i), other=other) for i, item in enumerate(value)]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in fields(value):
            changed = map_tensors(getattr(value, field.name), change, (*place, field.name), other=other)
            object.__setattr__(new, field.name, changed)  # which also sets those of a frozen dataclass
        return new
    return other(value)


def copied_batch(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """Copy a batch, so that nothing that is done with it reaches the original: not its numbers, and not what
    its tensors were computed from. ``dtype`` is that of the floating tensors in the copy.

    Objects of other classes are copied too, as far as Python can.
    """

    def tensor(_: Place, x: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and x.is_floating_point() else x.dtype
        new = x.detach().to(wanted, copy=True)
        return new.requires_grad_(x.requires_grad)

    def other(value: Any) -> Any:
        try:
            return value if isinstance(value, nn.Module) else copy.deepcopy(value)
        except Exception:  # of any kind of object
            return value

    return map_tensors(batch, tensor, other=other)


def at(value: Any, place: Place) -> Any:
    """Return the value at a place."""
    for key in place:
        nested = isinstance(value, (Mapping, tuple, list))
        value = value[key] if nested else getattr(value, str(key))
    return value


def replaced(value: Any, place: Place, new: Tensor) -> Any:
    """Return the nested value with another tensor at this place."""
    return map_tensors(value, lambda here, x: new if here == place else x)


def unwrapped(model: nn.Module) -> list[nn.Module]:
    """Return the model and what its wrappers (data parallel, compiled) hold, the bare model last."""
    models = [model]
    while True:
        outer = models[-1]
        if isinstance(outer, PARALLEL):
            models.append(outer.module)
        elif (inner := inside_compiled(outer)) is not None:
            models.append(inner)
        else:
            return models


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are saved with a model's weights, by name."""
    unsaved = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in unsaved_buffers(module)
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in unsaved}


def counts(model: nn.Module) -> dict[str, Tensor]:
    """Return the saved buffers that are one integer: they count steps or batches during training."""
    integers = (torch.int32, torch.int64)
    return {n: b for n, b in saved_buffers(model).items() if not b.dim() and b.dtype in integers}


def later_counts(model: nn.Module) -> dict[str, Tensor]:
    """Return the ``counts`` as they are late in training, as new tensors."""
    return {name: count.clamp(min=LATER) for name, count in counts(model).items()}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers; its module paths are the ones that count."""
    return unwrapped(model)[-1]


def loose_tensors(model: nn.Module) -> list[str]:
    """Return the paths of floating tensors that modules hold as plain attributes."""
    registered = {id(t) for t in (*model.parameters(), *model.buffers())}

    def holds_loose(value: Any) -> bool:
        return any(x.is_floating_point() and id(x) not in registered for _, x in tensors_in(value))

    loose = list[str]()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            is_plain = not name.startswith("_") and not isinstance(value, nn.Module)
            if is_plain and holds_loose(value):
                loose.append(f"{path}.{name}".strip("."))
    return loose


def unregistered(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the modules that are kept in plain lists, tuples and dicts, by the path of the attribute.

    The model counts neither them among its modules nor their parameters among its own.
    """
    registered, hidden = set(model.modules()), dict[str, list[nn.Module]]()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if others := [m for m in _modules_in(value) if m not in registered]:
                hidden[f"{path}.{name}" if path else name] = others
    return hidden


def _modules_in(value: Any, depth: int = 3) -> Iterator[nn.Module]:
    """Yield the modules in a plain container, and in those that it holds, down to some depth."""
    if not depth or not isinstance(value, (Mapping, list, tuple)):
        return
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, nn.Module):
            yield item
        else:
            yield from _modules_in(item, depth - 1)


def shared_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, compared by storage if it has one."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        has_storage = not p.is_meta and p.numel() > 0
        names.setdefault(p.data_ptr() if has_storage else id(p), []).append(name)
    return [of_one for of_one in names.values() if len(of_one) > 1]


@contextmanager
def forward_hooks(
    modules: Mapping[str, nn.Module], see: Callable[[str, Side, Any], Any], *, even_if_stopped: bool = False
) -> Iterator[None]:
    """Call ``see(path, side, values)``, inside this block, with the inputs and outputs of each module; those
    of a call that raises are None, and shown only ``even_if_stopped``.
    """
    with ExitStack() as stack:
        for path, module in modules.items():

            def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = path) -> None:
                see(path, "input", {**dict(enumerate(args)), **kwargs})

            def after(_: Any, __: Any, output: Any, path: str = path) -> None:
                see(path, "output", output)

            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, always_call=even_if_stopped).remove)
        yield


@contextmanager
def first_calls(
    modules: Mapping[str, nn.Module], keep: Callable[[Any], T | None]
) -> Iterator[dict[str, tuple[T, T]]]:
    """Inside this block, fill the dictionary with what ``keep`` makes of the values that enter and leave the
    first call of each module, inner modules first; a call for which it returns None does not count.
    """
    entered: dict[str, T] = {}
    calls: dict[str, tuple[T, T]] = {}

    def see(path: str, side: Side, values: Any) -> None:
        if path in calls or (kept := keep(values)) is None:
            return
        if side == "input":
            entered.setdefault(path, kept)
        elif path in entered:
            calls[path] = entered[path], kept

    with forward_hooks(modules, see):
        yield calls


def apart(entered: Mapping[Any, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of a call, from what ``forward_hooks`` shows."""
    args = tuple(value for key, value in entered.items() if isinstance(key, int))
    return args, {key: value for key, value in entered.items() if not isinstance(key, int)}


def arguments_of(module: nn.Module, entered: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call by name, from the inputs that ``forward_hooks`` shows."""
    args, named = apart(entered)
    return inspect.signature(module.forward).bind(*args, **named).arguments


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call ``model(**batch)``, ``model(*batch)`` or ``model(batch)``, by the type of the batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def refusal(who: str, batch: Any, error: Exception, word: str = "") -> str:
    """Say what raised on a batch; with a word, also how batches are passed and how to pass them otherwise."""
    kind = f"keywords {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    how = ""
    if word:
        how = (
            ". A dict is passed as keywords, a tuple or list as arguments, anything else as it is; pass "
            f"{word}=lambda model, batch: … to call the model in another way"
        )
    if isinstance(batch, list):
        how += ". A list of tensors is one batch; give several as a DataLoader, or a list of tuples or dicts"
    return f"{who} raised {type(error).__name__} on the batch ({kind}): {error}{how}"


@contextmanager
def eager() -> Iterator[None]:
    """Inside this block, run modules as they were written, hooks included: without compiled code, and without
    torch's fast path through encoder layers, which packs padded rows into nested tensors.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.compiler.set_stance("force_eager") if compiler_is_loaded() else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def unscanned() -> Iterator[None]:
    """Inside this block, collect garbage only among its own objects: scanning all others is slow."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

"""See what enters and leaves modules while a model runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

from normlab.trace.tensors import Place

T = TypeVar("T")
Side = Literal["input", "output"]


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
        return f"{self.module}.{self.side}{where}" + (f" of call {self.call}" if self.call else "")


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

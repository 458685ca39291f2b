"""Digests of what changes the losses of trials, by which a folder of trials recognizes its setup."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from normlab.setups.setup import Setup
from normlab.trace.dry_run import groups_of
from normlab.trace.optimizers import copied
from normlab.trace.restore import restored
from normlab.trace.tensors import bytes_of, tensors_in


def fingerprint(setup: Setup, batches: Sequence[Any], **plan: Any) -> dict[str, str]:
    """Digests, by name, of what changes the losses of trials: weights, optimizer, code, batches, plan."""
    with restored(setup):
        model, optimizers, _ = copied(setup)
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        options = [sorted((k, v) for k, v in g.items() if k != "params") for g in groups_of(optimizers)]
    marks = {
        "model": _digest([type(model).__name__, *_bits(state)]),
        "optimizer": _digest([*(type(optimizer).__name__ for optimizer in optimizers), repr(options)]),
    }
    for name in ("loss", "step", "scheduler"):
        marks[name] = _digest([_code(getattr(setup, name))])
    once_each = {id(batch): batch for batch in batches}.values()
    marks["batches"] = _digest([bits for batch in once_each for bits in _bits(batch)])
    for name, value in plan.items():
        marks[name] = str(value)
    return marks


def _bits(value: Any) -> Iterator[bytes | str]:
    """Yield place, type, shape and bytes of each tensor."""
    for place, x in tensors_in(value):
        yield f"{place} {x.dtype} {list(x.shape)}"
        yield bytes_of(x)


def _digest(parts: Sequence[bytes | str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update((part if isinstance(part, bytes) else part.encode()) + b"\0")
    return digest.hexdigest()


def _code(value: Any) -> str:
    """What an object computes, as far as source and plain values say it.

    Of a function it is the source, with the plain values that it closes over or has as defaults; of a partial
    also those that it holds; of any other object, such as a schedule, the name of its class with its plain
    attributes and the functions among them.
    """
    if isinstance(value, partial):
        held = {**{str(place): entry for place, entry in enumerate(value.args)}, **value.keywords}
        return " ".join(["partial", _code(value.func), *_entries(held)])
    function = getattr(value, "__func__", value)
    if not inspect.isfunction(function):
        return " ".join([type(value).__name__, *_entries(getattr(value, "__dict__", {}))])
    text = function.__code__.co_code.hex()
    with suppress(OSError):  # a function that was typed in has no source
        text = inspect.getsource(function)
    values = [*inspect.getclosurevars(function).nonlocals.values(), *(function.__defaults__ or ())]
    return f"{text} {_plain(values)!r}"


def _entries(by_name: Mapping[str, Any]) -> Iterator[str]:
    """Yield the plain values that an object holds, and the code of functions, such as those of LambdaLR."""
    for name, held in sorted(by_name.items()):
        entries = held if isinstance(held, (list, tuple)) else [held]
        if plain_values := _plain(entries):
            yield f"{name}={plain_values!r}"
        yield from (f"{name}={_code(entry)}" for entry in entries if inspect.isfunction(entry))


def _plain(values: Iterable[Any]) -> list[bool | int | float | str]:
    return [value for value in values if isinstance(value, (bool, int, float, str))]

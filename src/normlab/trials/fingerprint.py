"""Digests of what changes the losses of trials, by which a folder of trials recognizes its setup."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
    """The source of a function, with the plain values that it closes over or has as defaults; for any other
    object, the name of its class.
    """
    function = getattr(value, "__func__", value)
    if not inspect.isfunction(function):
        return type(value).__name__
    text = function.__code__.co_code.hex()
    with suppress(OSError):  # a function that was typed in has no source
        text = inspect.getsource(function)
    values = [*inspect.getclosurevars(function).nonlocals.values(), *(function.__defaults__ or ())]
    return f"{text} {[x for x in values if isinstance(x, (bool, int, float, str))]!r}"

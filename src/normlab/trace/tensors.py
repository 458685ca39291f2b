"""Find, read and replace the tensors in nested values, such as batches and outputs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

Place = tuple[int | str, ...]


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
            yield from tensors_in(getattr(value, field.name), (*place, field.name))


def bytes_of(x: Tensor) -> bytes:
    """Return the number of bytes in a tensor's entries."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def rows_of(batch: Any) -> int:
    """Return B, the length that most tensors of a batch begin with."""
    lengths = Counter(x.shape[0] for _, x in tensors_in(batch) if x.ndim)
    return lengths.most_common(1)[0][0] if lengths else 1


def activations(value: Any) -> Iterator[tuple[Place, Tensor]]:
    """Yield the floating tensors `[..., D]` among them."""
    return (
        (place, x) for place, x in tensors_in(value) if x.is_floating_point() and x.ndim > 1 and x.numel()
    )


def map_tensors(value: Any, change: Callable[[Place, Tensor], Tensor], place: Place = ()) -> Any:
    """Return the same nested value with each tensor changed; other objects stay the same."""
    if isinstance(value, Tensor):
        return change(place, value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, change, (*place, key)) for key, item in value.items()}
        with suppress(Exception):  # of the same kind where a dict makes one, as Hugging Face's encodings
            return type(value)(items)  # pyrefly: ignore[bad-argument-count]
        return items
    if isinstance(value, (tuple, list)):
        made = [map_tensors(item, change, (*place, i)) for i, item in enumerate(value)]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in fields(value):  # a frozen one too
            own = map_tensors(getattr(value, field.name), change, (*place, field.name))
            object.__setattr__(new, field.name, own)
        return new
    return value


def at(value: Any, place: Place) -> Any:
    """Return the value at a place."""
    for key in place:
        nested = isinstance(value, (Mapping, tuple, list))
        value = value[key] if nested else getattr(value, str(key))
    return value


def replaced(value: Any, place: Place, new: Tensor) -> Any:
    """Return the nested value with another tensor at this place."""
    return map_tensors(value, lambda here, x: new if here == place else x)

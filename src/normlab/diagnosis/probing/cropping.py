"""Smaller batches, for studies that would take too long on a whole one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from normlab.diagnosis.reading.subject import Subject
from normlab.errors import UserError
from normlab.trace.tensors import tensors_in


def cropped(subject: Subject, tokens: int) -> tuple[Subject, int]:
    """Return the subject on the first rows of its batch, and its number of tokens.

    There are as many rows as keep its longest stream within ``tokens`` tokens, but at least one.

    Raises UserError where the loss fails on fewer rows, as one does that holds targets of its own.
    """
    rows, used = _count(subject.batch) or 1, _tokens(subject)
    kept = max(1, rows * tokens // used)
    if kept >= rows:
        return subject, used
    small = replace(subject, batch=split(subject.batch, -(-rows // kept))[0])
    try:
        return small, _tokens(small)
    except Exception as error:
        raise UserError(
            f"on the first {kept} of the {rows} rows of the batch the loss fails with "
            f"{type(error).__name__}: {error}; give a batch of at most {tokens} tokens, or tokens={used} "
            "to use all of it"
        ) from error


def _tokens(subject: Subject) -> int:
    taps = [stack.sublayers[0].before for stack in subject.structure.stacks]
    return max(x.numel() // x.shape[-1] for x in subject.trace(taps).once().taps.values())


def _count(batch: Any) -> int:
    return next((len(x) for _, x in tensors_in(batch) if x.ndim), 0)


def split(batch: Any, parts: int) -> list[Any]:
    """Split a batch into at most ``parts`` mini-batches of consecutive rows.

    Every tensor whose first dimension is that of the first one is split; anything else goes to all parts.

    Raises UserError for a batch without a tensor.
    """
    count = _count(batch)
    if not count:
        raise UserError(f"a batch of type {type(batch).__name__} has no rows to split; pass batches=[…]")
    bounds = [round(i * count / min(parts, count)) for i in range(min(parts, count) + 1)]
    return [_cut(batch, count, slice(a, b)) for a, b in pairwise(bounds)]


def _cut(value: Any, count: int, part: slice) -> Any:
    if isinstance(value, Tensor):
        return value[part] if value.ndim and len(value) == count else value
    if isinstance(value, Mapping):
        return {key: _cut(item, count, part) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_cut(item, count, part) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return replace(value, **{name: _cut(item, count, part) for name, item in given.items()})
    return value

"""The documents that are packed into rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.trace.facts import Unknown
from normlab.trace.facts.padding import end_runs

if TYPE_CHECKING:
    from normlab.trace.facts.facts import Facts


def documents_of(facts: Facts) -> Tensor:
    """Return the documents' numbers `[B, T]`. Raises Unknown if nothing says that rows are packed.

    They are declared, or read off positions that restart at 0 within a row, numbers that stay the same in
    runs and (unlike segments) are looked up in no table, or offsets of the documents in a flat row.
    """
    ids = facts.tokens.ids
    if ids.shape[1] < 2:
        raise Unknown("rows hold one token each")
    declared = facts.declared.documents
    if declared is not None:
        return _declared(facts, declared)
    read = [f.argument(0, "input") for f in facts.lookups]
    for place, entry in facts.entries.items():
        if place == facts.tokens.place or entry.is_floating_point() or entry.dtype == torch.bool:
            continue
        if entry.ndim == 2 and entry.shape[0] == ids.shape[0] and entry.shape[1] >= ids.shape[1]:
            own = entry[:, facts.tokens.columns].cpu().long()
            starts = restarts(own)
            tables = (x for x in read if isinstance(x, Tensor) and x.shape == entry.shape)
            if starts is None and not any(torch.equal(x, entry) for x in tables):
                starts = _changes(own)
            if starts is not None:
                return starts.long().cumsum(1)
        if entry.ndim == 1 and (numbers := _offsets(entry.cpu(), ids)) is not None:
            return numbers
    raise Unknown(
        "nothing says that rows hold several documents: positions that restart, document numbers, or "
        "declare documents"
    )


def restarts(positions: Tensor) -> Tensor | None:
    """Return `[B, T]`, True where positions that otherwise count up by one restart at 0 within a row."""
    up, anew = positions.diff(dim=1) == 1, positions[:, 1:] == 0
    inside = anew & ~up & ~end_runs(anew)[1]  # without zeros under padding
    if not bool((positions[:, 0] == 0).all()) or not bool((up | anew).all()) or not bool(inside.any()):
        return None
    return F.pad(inside, (1, 0))


def _changes(numbers: Tensor) -> Tensor | None:
    """Return `[B, T]`, True where numbers that stay the same in runs change; None if they do not.

    They never return to a number that they left, and at most half of the steps in a row are changes.
    """
    change = numbers[:, 1:] != numbers[:, :-1]
    if not bool(change.any()) or bool((change.float().mean(1) > 0.5).any()):
        return None
    runs = [row.unique_consecutive() for row in numbers]
    if any(len(own.unique()) < len(own) for own in runs):
        return None
    if set(torch.unique(numbers).tolist()) == {0, 1} and not bool((numbers[:, 0] == 0).all()):
        return None  # ones, then zeros: a mask
    return F.pad(change, (1, 0))


def _offsets(offsets: Tensor, ids: Tensor) -> Tensor | None:
    """Return the numbers from cumulative lengths, from 0 to the length of the one flat row."""
    whole = len(offsets) > 2 and (int(offsets[0]), int(offsets[-1])) == (0, ids.numel())
    if not whole or not bool((offsets.diff() > 0).all()):
        return None
    starts = torch.zeros(ids.numel(), dtype=torch.long)
    starts[offsets[1:-1].long()] = 1
    return starts.cumsum(0).reshape(ids.shape)


def _declared(facts: Facts, declared: object) -> Tensor:
    if isinstance(declared, str):
        entry = next((x for p, x in facts.entries.items() if p and p[-1] == declared), None)
        if entry is None:
            raise Unknown(f"the batch has no entry {declared!r}, which is declared to hold the documents")
        declared = entry
    numbers = torch.as_tensor(declared).cpu().long()
    ids = facts.tokens.ids
    if numbers.ndim != 2 or numbers.shape[0] != ids.shape[0] or numbers.shape[1] < ids.shape[1]:
        raise Unknown(f"documents are declared as {list(numbers.shape)}, and tokens are {list(ids.shape)}")
    return numbers[:, : ids.shape[1]]

"""Which document each position of a packed batch belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normlab.trace.facts import Unknown
from normlab.trace.facts.padding import runs

if TYPE_CHECKING:
    from normlab.trace.facts.facts import Facts


def documents_of(facts: Facts) -> Tensor:
    """Return the documents' numbers `[B, T]`. Raises Unknown where nothing says that rows are packed.

    Declared; or positions in the batch that begin anew at 0 within a row; or numbers that stay the same in
    runs and are looked up in no table, as segments are; or offsets of the documents in a flat row.
    """
    ids = facts.tokens.ids
    if ids.shape[1] < 2:
        raise Unknown("rows hold one token each")
    declared = facts.declared.documents
    if declared is not None:
        return _declared(facts, declared)
    looked_up = [f.argument(0, "input") for f in facts.lookups]
    for place, entry in facts.entries.items():
        if place == facts.tokens.place or entry.is_floating_point() or entry.dtype == torch.bool:
            continue
        if entry.ndim == 2 and entry.shape[0] == ids.shape[0] and entry.shape[1] >= ids.shape[1]:
            own = entry[:, facts.tokens.columns].cpu().long()
            starts = restarts(own)
            if starts is None and not any(_is(x, entry) for x in looked_up):
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
    """`[B, T]`, True where positions, one more at each step otherwise, begin anew at 0 within a row."""
    step = positions[:, 1:] - positions[:, :-1]
    anew = positions[:, 1:] == 0
    counts = (step == 1) | anew
    inside = anew & (step != 1)
    inside = inside & ~runs(anew)[1]  # zeros under padding
    if not bool((positions[:, 0] == 0).all()) or not bool(counts.all()) or not bool(inside.any()):
        return None
    return torch.cat([torch.zeros_like(inside[:, :1]), inside], 1)


def _changes(numbers: Tensor) -> Tensor | None:
    """`[B, T]`, True where numbers that stay the same in runs change; None if they are no such numbers.

    They never return to a number that they left, but for a filling at the end, and some run is longer than
    one position.
    """
    change = numbers[:, 1:] != numbers[:, :-1]
    if not bool(change.any()) or bool((change.float().mean(1) > 0.5).any()):
        return None
    for row, moved in zip(numbers, change, strict=True):
        runs = [int(row[0]), *row[1:][moved].tolist()]
        if len(set(runs)) != len(runs):
            return None
    if set(torch.unique(numbers).tolist()) == {0, 1} and not bool((numbers[:, 0] == 0).all()):
        return None  # ones, then zeros: a mask
    return torch.cat([torch.zeros_like(change[:, :1]), change], 1)


def _offsets(offsets: Tensor, ids: Tensor) -> Tensor | None:
    """The numbers by cumulative lengths, which begin with 0 and end with the length of the one flat row."""
    if (
        len(offsets) < 3
        or int(offsets[0]) != 0
        or int(offsets[-1]) != ids.numel()
        or not bool((offsets.diff() > 0).all())
    ):
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


def _is(x: object, entry: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == entry.shape and bool(torch.equal(x, entry))

"""Find the documents that are packed into rows of a batch.

A batch may give them as positions that restart, as a number for each token, as lengths, or as offsets in a
flat row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.trace.facts import Unknown
from normlab.trace.facts.masks import runs_at_ends
from normlab.trace.facts.readings import Readings
from normlab.trace.facts.tokens import Tokens


def documents_of(readings: Readings, tokens: Tokens) -> Tensor:
    """Return the documents' numbers `[B, T]`. Raises Unknown if nothing says that rows are packed.

    They are declared, or read off positions that restart at 0 within a row, numbers that stay the same in
    runs and (unlike segments) are looked up in no table, or offsets of the documents in a flat row.
    """
    if tokens.ids.shape[1] < 2:
        raise Unknown("rows hold one token each")
    declared = readings.declared.documents
    if declared is not None:
        return _declared(readings, tokens, declared)
    looked_up = [call.argument(0, "input") for call in readings.lookups]
    for place, entry in readings.entries.items():
        if place == tokens.place:
            continue
        alike = [x for x in looked_up if isinstance(x, Tensor) and x.shape == entry.shape]
        are_segments = any(torch.equal(x, entry) for x in alike)
        numbers = _documents_in(entry, tokens, only_positions=are_segments)
        if numbers is not None:
            return numbers
    raise Unknown(
        "nothing says that rows hold several documents: positions that restart, document numbers, or "
        "declare documents"
    )


def _documents_in(entry: Tensor, tokens: Tokens, *, only_positions: bool = False) -> Tensor | None:
    """Return the documents' numbers `[B, T]` that an entry of the batch gives, as positions, as numbers
    (unless ``only_positions``) or as offsets; None if it gives none.
    """
    ids = tokens.ids
    if entry.is_floating_point() or entry.dtype == torch.bool:
        return None
    if entry.ndim == 1:
        return _offsets(entry.cpu(), ids)
    if entry.ndim != 2 or entry.shape[0] != ids.shape[0] or entry.shape[1] < ids.shape[1]:
        return None
    beside_tokens = entry[:, tokens.columns].cpu().long()
    starts = restarts(beside_tokens)
    if starts is None and not only_positions:
        starts = _changes(beside_tokens)
    return None if starts is None else starts.long().cumsum(1)


def repeats_documents(entry: Tensor, tokens: Tokens, documents: Tensor) -> bool:
    """Return whether an entry of the batch says the same as these documents `[B, T]`, or hides no token."""
    if entry.shape == tokens.ids.shape and bool((entry == 1).all()):
        return True  # a mask
    numbers = _documents_in(entry, tokens)
    if numbers is None:
        numbers = _from_lengths(entry, tokens)
    return numbers is not None and torch.equal(numbers.diff(dim=1) != 0, documents.diff(dim=1) != 0)


def _from_lengths(lengths: Tensor, tokens: Tokens) -> Tensor | None:
    """Return the documents' numbers `[B, T]` from their lengths `[B, N]`, which add up to the length of a row
    and may be filled up with zeros; None if these are no such lengths.
    """
    if lengths.is_floating_point() or lengths.dtype == torch.bool or tokens.entry.ndim != 2:
        return None
    rows, length = tokens.entry.shape
    if lengths.ndim != 2 or lengths.shape[0] != rows or bool((lengths < 0).any()):
        return None
    if bool((lengths.sum(1) != length).any()):
        return None
    documents = torch.arange(lengths.shape[1])
    numbers = torch.stack([documents.repeat_interleave(row) for row in lengths.cpu().long()])
    return numbers[:, tokens.columns]


def restarts(positions: Tensor) -> Tensor | None:
    """Return `[B, T]`, True where positions that otherwise count up by one restart at 0 within a row; None if
    these are no such positions.
    """
    goes_up, is_zero = positions.diff(dim=1) == 1, positions[:, 1:] == 0
    _, zeros_at_end = runs_at_ends(is_zero)  # as under padding
    restarting = is_zero & ~goes_up & ~zeros_at_end
    begin_at_zero = bool((positions[:, 0] == 0).all())
    if not begin_at_zero or not bool((goes_up | is_zero).all()) or not bool(restarting.any()):
        return None
    return F.pad(restarting, (1, 0))


def _changes(numbers: Tensor) -> Tensor | None:
    """Return `[B, T]`, True where numbers that stay the same in runs change; None if they do not.

    They never return to a number that they left, at most half of the steps in a row are changes, and they
    are more than zeros and ones.
    """
    change = numbers[:, 1:] != numbers[:, :-1]
    if not bool(change.any()) or bool((change.float().mean(1) > 0.5).any()):
        return None
    for row in numbers:
        runs = row.unique_consecutive()
        if len(runs.unique()) < len(runs):
            return None
    if set(torch.unique(numbers).tolist()) == {0, 1}:
        return None  # a mask, such as one of prompts, or segments
    return F.pad(change, (1, 0))


def _offsets(offsets: Tensor, ids: Tensor) -> Tensor | None:
    """Return the numbers from cumulative lengths, from 0 to the length of the one flat row."""
    if not is_offsets(offsets, ids.numel()):
        return None
    starts = torch.zeros(ids.numel(), dtype=torch.long)
    starts[offsets[1:-1].long()] = 1
    return starts.cumsum(0).reshape(ids.shape)


def is_offsets(x: Tensor, length: int) -> bool:
    """Return whether a tensor counts up from 0 to this length, as the offsets of several documents do."""
    if x.ndim != 1 or len(x) < 3 or x.is_floating_point() or x.dtype == torch.bool:
        return False
    return (int(x[0]), int(x[-1])) == (0, length) and bool((x.diff() > 0).all())


def _declared(readings: Readings, tokens: Tokens, declared: object) -> Tensor:
    """Return the numbers `[B, T]` that are declared, or that an entry of the batch holds whose name is.
    Raises Unknown if they do not fit the tokens.
    """
    if isinstance(declared, str):
        entry = next((x for p, x in readings.entries.items() if p and p[-1] == declared), None)
        if entry is None:
            raise Unknown(f"the batch has no entry {declared!r}, which is declared to hold the documents")
        declared = entry
    numbers = torch.as_tensor(declared).cpu().long()
    ids = tokens.ids
    if numbers.ndim != 2 or numbers.shape[0] != ids.shape[0] or numbers.shape[1] < ids.shape[1]:
        raise Unknown(f"documents are declared as {list(numbers.shape)}, and tokens are {list(ids.shape)}")
    return numbers[:, : ids.shape[1]]

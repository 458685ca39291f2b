"""Find the ids that a model reads in its batch, by what it looks up in tables of embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.trace.facts.readings import Readings
from normlab.trace.functions import FunctionCall
from normlab.trace.tensors import Place, replaced


class Tokens(NamedTuple):
    """The ids that the model reads, and where they come from in the batch."""

    place: Place
    ids: Tensor
    """`[B, T]` as the model looks them up, or as in the batch if the model reads them in another layout."""
    column: int
    """The column of the batch's tensor where they begin; -1 if the model puts a start before the labels."""
    transposed: bool
    """Whether the batch holds `[T, B]`."""
    vocabulary: int
    entry: Tensor
    """`[B, T']`, the whole entry of the batch; the ids may be a part of it."""

    @property
    def start(self) -> int:
        """The column of an entry of the batch that belongs to the first id."""
        return max(self.column, 0)

    @property
    def columns(self) -> slice:
        """The columns of an entry of the batch that belong to the ids."""
        return slice(self.start, self.start + self.ids.shape[1])


def looked_up(entries: Mapping[Place, Tensor], lookups: Sequence[FunctionCall], rows: int) -> list[Tokens]:
    """Return all entries of a batch of ``rows`` rows that lookups read, the largest vocabulary first."""
    of_ids = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    candidates = {place: x for place, x in entries.items() if x.dtype in of_ids and x.ndim == 2}
    texts: dict[Place, Tokens] = {}
    for call in sorted(lookups, key=lambda f: -f.argument(1, "weight").shape[0]):
        ids, table = call.argument(0, "input"), call.argument(1, "weight")
        if not isinstance(ids, Tensor) or ids.is_nested or ids.ndim not in (1, 2):
            continue
        # labels may hold the same numbers: the entry that the table reads itself comes first, and alone
        for place, entry in sorted(candidates.items(), key=lambda item: not _share(ids, item[1])):
            tokens = _match(ids, place, entry, (rows, len(table)))
            if tokens is None:
                continue
            are_positions = len(tokens.ids) > 1 and bool((tokens.ids == tokens.ids[:1]).all())
            if place not in texts and not are_positions:
                texts[place] = tokens
            if _share(ids, entry):
                break
    return list(texts.values())


def looked_up_through(readings: Readings, known: Sequence[Tokens]) -> list[Tokens]:
    """Return the other entries of the batch that lookups read through a function of each id, such as
    ``ids.clamp(min=0)`` or ``ids % size``, the largest vocabulary first.

    An entry is changed at some places, drawn at random. If it is read so, the ids that are looked up change
    at no other place.

    Args:
        readings: What a pass of the step showed.
        known: The entries that lookups read as they are.
    """
    places = {tokens.place for tokens in known}
    rows = readings.rows
    lookups = {i: call for i, call in enumerate(readings.lookups) if _may_be_tokens(call, rows, known)}
    if not lookups:
        return []
    texts: list[Tokens] = []
    draw = torch.Generator().manual_seed(2)
    for place, entry in readings.entries.items():
        if place in places or not _may_hold_tokens(entry, rows):
            continue
        picked = (torch.rand(entry.shape, generator=draw) < 0.5).to(entry.device)
        change = _Change(entry, with_others(entry, picked), picked)
        batch = replaced(readings.trace.batch, place, change.after)
        lookups_of_changed = readings.lookups_of(readings.trace.again(batch=batch))
        if len(lookups_of_changed) != len(readings.lookups):
            continue
        for i, call in lookups.items():
            tokens = _read_through(place, change, call, lookups_of_changed[i])
            if tokens is not None:
                texts.append(tokens)
                break
    return sorted(texts, key=lambda tokens: -tokens.vocabulary)


class _Change(NamedTuple):
    """An entry `[B, T']` of a batch, what it becomes, and where it is changed."""

    before: Tensor
    after: Tensor
    picked: Tensor


def _read_through(
    place: Place, change: _Change, call: FunctionCall, call_of_changed: FunctionCall
) -> Tokens | None:
    """Return the tokens that a lookup reads through a function of each id of an entry; None if it does not.

    Args:
        place: Where the entry is in the batch.
        change: How it was changed.
        call: The lookup in the step itself.
        call_of_changed: The same lookup where the batch holds the changed entry.
    """
    moved = call_of_changed.argument(0, "input") != call.argument(0, "input")
    column = _column_of(moved.cpu(), change.picked.cpu())
    if column is None:
        return None
    ids, changed_ids = change.before.cpu().long(), change.after.cpu().long()
    columns = slice(column, column + moved.shape[1])
    part = ids[:, columns]
    read = torch.stack([part, changed_ids[:, columns]])
    looked_up = torch.stack([x.argument(0, "input").cpu().long() for x in (call, call_of_changed)])
    if not _is_function_of(read, looked_up):
        return None
    return Tokens(place, part, column, False, len(call.argument(1, "weight")), ids)


def hidden_tokens(readings: Readings) -> Iterator[tuple[Place, Tensor]]:
    """Yield entries of the batch that lookups read in part, and the mask over them of what is hidden.

    At these places the same id is looked up whatever stands there, though a later token of the row is read.
    What is hidden at random does not count.
    """
    rows = readings.rows
    lookups = {i: call for i, call in enumerate(readings.lookups) if _may_be_tokens(call, rows, ())}
    if not lookups or not _same_lookups(readings.lookups, readings.lookups_of(readings.trace.again(seed=1))):
        return
    for place, entry in readings.entries.items():
        if not _may_hold_tokens(entry, rows):
            continue
        everywhere = torch.ones_like(entry, dtype=torch.bool)
        changed = replaced(readings.trace.batch, place, with_others(entry, everywhere))
        lookups_of_changed = readings.lookups_of(readings.trace.again(batch=changed))
        if len(lookups_of_changed) != len(readings.lookups):
            continue
        for i, call in lookups.items():
            ids = call.argument(0, "input")
            if entry.shape[1] < ids.shape[1]:
                continue
            read = ids != lookups_of_changed[i].argument(0, "input")
            followed = read.flip(1).cumsum(1).flip(1) > 0
            hidden = followed & ~read
            if hidden.any() and len(torch.unique(ids[hidden])) == 1:
                yield place, F.pad(hidden, (0, entry.shape[1] - ids.shape[1]))


def _same_lookups(lookups: Sequence[FunctionCall], others: Sequence[FunctionCall]) -> bool:
    """Return whether two steps look the same ids up."""
    pairs = zip(lookups, others, strict=False)
    are_equal = (torch.equal(a.argument(0, "input"), b.argument(0, "input")) for a, b in pairs)
    return len(lookups) == len(others) and all(are_equal)


def _may_hold_tokens(entry: Tensor, rows: int) -> bool:
    """Return whether an entry of the batch holds a row of whole numbers, of several values, for each row."""
    if entry.ndim != 2 or entry.is_floating_point() or entry.dtype == torch.bool or entry.shape[0] != rows:
        return False
    return len(torch.unique(entry[entry >= 0])) > 1


def with_others(entry: Tensor, picked: Tensor) -> Tensor:
    """Return an entry with another one of its numbers at the picked places."""
    values = torch.unique(entry[entry >= 0])
    index = torch.searchsorted(values, entry.clamp_min(int(values[0])).contiguous())
    return torch.where(picked, values[(index + 1) % len(values)], entry)


def _is_function_of(ids: Tensor, looked_up: Tensor) -> bool:
    """Return whether equal ids are looked up as equal ones wherever they stand; masked words are not."""
    _, number = torch.unique(ids, return_inverse=True)
    image = torch.empty(
        int(number.max()) + 1, dtype=looked_up.dtype
    )  # of each id, one that is looked up for it
    image[number.flatten()] = looked_up.flatten()
    return torch.equal(image[number], looked_up)


def _may_be_tokens(call: FunctionCall, rows: int, known: Sequence[Tokens]) -> bool:
    """Return whether a lookup reads ids of its own in each row, other ones than those that are known."""
    ids = call.argument(0, "input")
    if not isinstance(ids, Tensor) or ids.is_nested or ids.ndim != 2 or len(ids) != rows or rows < 2:
        return False
    ids = ids.cpu().long()
    is_known = any(tokens.ids.shape == ids.shape and tokens.ids.equal(ids) for tokens in known)
    return bool((ids != ids[:1]).any()) and not is_known


def _column_of(moved: Tensor, picked: Tensor) -> int | None:
    """Return the column of the picked places `[B, W]` at which ids `[B, T]` begin of which only picked ones
    moved; None if others did, or none.
    """
    for column in range(min(picked.shape[1] - moved.shape[1], 2) + 1):
        part = picked[:, column : column + moved.shape[1]]
        if part.shape == moved.shape and bool(moved.any()) and not bool((moved & ~part).any()):
            return column
    return None


def _share(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are views of the same numbers in memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _match(ids: Tensor, place: Place, entry: Tensor, size: tuple[int, int]) -> Tokens | None:
    """Return the looked-up ids as part of an entry of the batch `[B, T']` or `[T', B]`; None if they are not.

    They begin at one of its first columns, or they are its labels preceded by one start.

    Args:
        ids: The ids, `[B, T]`, `[T, B]` or flat.
        place: Where the entry is in the batch.
        entry: The entry.
        size: B, and how many rows the table has.
    """
    (rows, vocabulary), ids, entry = size, ids.cpu().long(), entry.cpu().long()
    if ids.ndim == 1:
        is_same = ids.numel() == entry.numel() and torch.equal(ids, entry.reshape(-1))
        return Tokens(place, entry, 0, False, vocabulary, entry) if is_same else None
    for ids_by_row in (ids, ids.T):
        for is_transposed, entry_by_row in ((False, entry), (True, entry.T)):
            if not len(ids_by_row) == len(entry_by_row) == rows:
                continue
            column = _column_in(ids_by_row, entry_by_row)
            if column is not None:
                whole = ids_by_row if column < 0 else entry_by_row
                return Tokens(place, ids_by_row, column, is_transposed, vocabulary, whole)
    return None


def _column_in(ids: Tensor, entry: Tensor) -> int | None:
    """Return the column of an entry `[B, T']` at which ids `[B, T]` begin; -1 if they are its labels preceded
    by one start, and None if they are neither.
    """
    width, spare = ids.shape[1], entry.shape[1] - ids.shape[1]
    for column in range(min(spare, 2) + 1):
        if torch.equal(entry[:, column : column + width], ids):
            return column
    labels = entry[:, : width - 1]  # negative where the loss ignores them
    are_labels = spare in (0, -1) and width > 2
    if are_labels and bool(((labels == ids[:, 1:]) | (labels < 0)).all()):
        return -1
    return None

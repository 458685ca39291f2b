"""The ids that a model reads, and where they come from in the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.trace.functions import FunctionCall
from normlab.trace.tensors import Place


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
    known = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    integers = {p: x for p, x in entries.items() if x.dtype in known and x.ndim == 2}
    found: dict[Place, Tokens] = {}
    for call in sorted(lookups, key=lambda f: -f.argument(1, "weight").shape[0]):
        ids, table = call.argument(0, "input"), call.argument(1, "weight")
        if not isinstance(ids, Tensor) or ids.ndim not in (1, 2):
            continue
        for place, entry in integers.items():
            tokens = _match(ids, place, entry, (rows, len(table)))
            if tokens is None or place in found:
                continue
            if len(tokens.ids) < 2 or bool((tokens.ids != tokens.ids[:1]).any()):  # others are positions
                found[place] = tokens
    return list(found.values())


def _match(ids: Tensor, place: Place, entry: Tensor, size: tuple[int, int]) -> Tokens | None:
    """Return the looked-up ids as part of an entry of the batch `[B, T']` or `[T', B]`; None if they are not.

    They begin at one of its first columns, or they are its labels preceded by one start.
    """
    (rows, vocabulary), ids, entry = size, ids.cpu().long(), entry.cpu().long()
    if ids.ndim == 1:
        same = ids.numel() == entry.numel() and torch.equal(ids, entry.reshape(-1))
        return Tokens(place, entry, 0, False, vocabulary, entry) if same else None
    for looked in (ids, ids.T):
        for transposed, own in ((False, entry), (True, entry.T)):
            if looked.shape[0] != own.shape[0] or looked.shape[0] != rows:
                continue
            width, spare = looked.shape[1], own.shape[1] - looked.shape[1]
            for column in range(min(spare, 2) + 1):
                if torch.equal(own[:, column : column + width], looked):
                    return Tokens(place, looked, column, transposed, vocabulary, own)
            shifted = own[:, : width - 1]
            if spare in (0, -1) and width > 2 and bool(((shifted == looked[:, 1:]) | (shifted < 0)).all()):
                return Tokens(place, looked, -1, transposed, vocabulary, looked)
    return None

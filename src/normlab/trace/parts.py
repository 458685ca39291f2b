"""Parts of a batch that stand for all of it, where a pass of the whole batch would take too long."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from normlab.trace.tensors import Place, map_tensors, numbers_in, rows_of, tensors_in
from normlab.trace.trace import Trace

LARGE: Final = 1_000_000_000
"""Positions times parameters for which a pass in float64 takes about a quarter of a second on one core, so
that all properties take about a minute.
"""
COLUMNS: Final = 32
"""The fewest columns that a part keeps."""
ROWS: Final = 2
"""How many rows a part keeps: the fewest that show whether rows depend on each other."""


def small_parts(trace: Trace, parameters: int) -> list[Any]:
    """Return parts of the batch of a step to try in its place; none if a pass of all of it is quick.

    The first part is two rows with the first columns, if columns may be dropped; the last is two rows as they
    are. The model may not run on either.

    Args:
        trace: the step; it may be run once, on two rows, to see how much a pass computes.
        parameters: how many numbers its model has.
    """
    batch = trace.batch
    rows = rows_of(batch)
    has_nested = any(x.is_nested for _, x in tensors_in(batch))
    # rows of different lengths in one nested tensor are never cut
    if has_nested or rows < ROWS or _positions(trace, parameters) * parameters <= LARGE:
        return []
    parts = []
    width = max((x.shape[1] for x in _ids_in(batch)), default=0)
    kept_columns = max(COLUMNS, LARGE // parameters // ROWS)
    if width > kept_columns and _may_lose_columns(_ids_in(batch)):
        parts.append(_cut(batch, width, kept_columns))
    if rows > ROWS:
        parts.append(first_rows(batch))
    return parts


def first_rows(batch: Any) -> Any:
    """Return the first two rows of a batch."""
    return _cut(batch, 0, 0)


def _positions(trace: Trace, parameters: int) -> float:
    """Return how often a pass of the whole batch uses each parameter, on average.

    That is the number of ids, if the model reads ids. In what numbers are in a batch besides, such as the
    pixels of images, the model may see any number of positions: these are counted on two rows.
    """
    batch, rows = trace.batch, rows_of(trace.batch)
    by_ids = float(rows * max((x.shape[1] for x in _ids_in(batch)), default=1))
    if by_ids * parameters > LARGE or numbers_in(batch) * parameters <= LARGE or not parameters:
        return by_ids
    counter = FlopCounterMode(display=False)
    all_parameters = frozenset(name for name, _ in trace.model.named_parameters())
    with suppress(Exception), counter:  # the model may not run on two rows
        trace.again(batch=first_rows(batch), rewritten=all_parameters).once()
    multiplications = counter.get_total_flops() / 2  # each is counted together with an addition
    per_row = multiplications / min(ROWS, rows)
    return max(by_ids, per_row * rows / parameters)


def _ids_in(batch: Any) -> list[Tensor]:
    """Return the matrices of integers that have a row for each row of the batch."""
    rows = rows_of(batch)
    tensors = [x for _, x in tensors_in(batch) if not x.is_nested]
    return [x for x in tensors if x.ndim == 2 and x.shape[0] == rows and not x.is_floating_point()]


def _may_lose_columns(ids: Sequence[Tensor]) -> bool:
    """Return whether all integers have one width, and none may be a mask, a position or a document: these
    would mean something else in a part.
    """
    if len({x.shape[1] for x in ids}) != 1:
        return False
    for x in ids:
        is_mask = len(torch.unique(x)) <= 2
        falls = float((x.diff(dim=1) < 0).float().mean())
        counts_up = falls <= 0.1  # as positions and the numbers of documents do
        if is_mask or counts_up:
            return False
    return True


def _cut(batch: Any, width: int, kept_columns: int) -> Any:
    """Return the first two rows; of axes of that width, as many columns as are kept.

    Parts are contiguous, as batches are when they are drawn: a model may call ``targets.view(-1)``.
    """
    rows = rows_of(batch)

    def cut(_: Place, x: Tensor) -> Tensor:
        if not x.ndim or x.shape[0] != rows:
            return x
        x = x[:ROWS]
        for axis in range(1, x.ndim):
            if width and x.shape[axis] == width:
                x = x.narrow(axis, 0, kept_columns)
        return x.contiguous()

    return map_tensors(batch, cut)

"""Padded batches of sentence pairs, in an order that depends only on the seed and the epoch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from normlab.base.model_config import derive
from normlab.lab.data.draws import drop_words, permutation
from normlab.lab.data.ragged import Ints, TokenPairs
from normlab.lab.data.shapes import Shape
from normlab.lab.data.tokenizer import BOS, EOS, PAD


@dataclass(frozen=True)
class TensorBatch:
    """A micro-batch of int64 tensors. Empty rows are all PAD and count no tokens."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by the names of their fields."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device | str) -> Self:
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors().items()}
        return replace(self, **moved)


@dataclass(frozen=True)
class Batch(TensorBatch):
    """One micro-batch of pairs."""

    source: torch.Tensor
    """``[B, S]``: ids, EOS, PAD ..."""
    target_in: torch.Tensor
    """``[B, T]``: BOS, ids, PAD ..."""
    target_out: torch.Tensor
    """``[B, T]``: ids, EOS, PAD ..."""
    tokens: int
    """Tokens of ``target_out``, EOS included, PAD not."""

    @property
    def padded_tokens(self) -> int:
        """Tokens of both sides, padding included."""
        return self.source.numel() + self.target_in.numel()

    def recounted(self) -> Batch:
        """Return the batch with its tokens counted anew, after it was cut or changed from another."""
        return replace(self, tokens=int((self.target_out != PAD).sum()))


class PairBatches:
    """Endless training batches: index i is the i-th micro-batch over all epochs, so resuming needs only i.

    In every epoch each pair occurs once, in the smallest shape that holds it. Pairs that do not fill a batch
    of their shape go to the next shape, so only one batch of an epoch has empty rows. Every epoch has
    ``steps_per_epoch`` batches. Memory is 5 bytes per pair, and 20 more while an epoch is planned.
    """

    def __init__(self, pairs: TokenPairs, shapes: Sequence[Shape], seed: int) -> None:
        if len(pairs) == 0:
            raise ValueError("there is no pair to make batches of; pass at least one")
        self._pairs, self._shapes, self._seed = pairs, tuple(shapes), seed
        self._bucket = _buckets(pairs, self._shapes)
        sizes = np.bincount(self._bucket, minlength=len(shapes))
        self._layout = _layout(sizes, self._shapes)
        self._epoch = -1
        """The epoch that is planned."""
        self._rows: Ints = self._bucket[:0]
        """Its pairs, shuffled within each bucket."""
        self._order: Ints = self._bucket[:0]
        """Its batches, as rows of the layout."""
        self._planning = threading.Lock()

    @property
    def steps_per_epoch(self) -> int:
        return len(self._layout)

    def _plan_epoch(self, epoch: int) -> None:
        # The old plan is dropped first, so that memory never holds two.
        self._epoch, self._rows, self._order = -1, self._bucket[:0], self._bucket[:0]
        shuffled = permutation(len(self._pairs), derive(self._seed, "shuffle", epoch))
        buckets = self._bucket[shuffled]
        self._rows = np.concatenate([shuffled[buckets == k] for k in range(int(buckets.max()) + 1)])
        self._order = permutation(len(self._layout), derive(self._seed, "batch_order", epoch))
        self._epoch = epoch

    def at(self, index: int, *, word_dropout: float = 0.0, seed: int = 0) -> Batch:
        """Return the micro-batch ``index``, counted from 0 over all epochs.

        With ``word_dropout`` each input token, on both sides, becomes UNK with that probability, drawn from a
        generator of (``seed``, ``index``); ``target_out`` is left as it is.
        """
        epoch, step = divmod(index, self.steps_per_epoch)
        with self._planning:
            if epoch != self._epoch:
                self._plan_epoch(epoch)
            start, stop, k = self._layout[self._order[step]]
            rows = self._rows[start:stop].astype(np.int64)
        dropout = (word_dropout, derive(seed, "word_dropout", index)) if word_dropout else None
        return _collate(self._pairs, rows, self._shapes[k], dropout)


def _buckets(pairs: TokenPairs, shapes: Sequence[Shape]) -> NDArray[np.uint8]:
    """Return the smallest shape that holds each pair. Raises ValueError if there is none."""
    buckets = np.empty(len(pairs), np.uint8)
    longest = np.zeros(2, np.int64)
    start = 0
    for lengths in pairs.lengths_in_parts():
        source, target = (side + 1 for side in lengths)
        longest = np.maximum(longest, [source.max(), target.max()])
        bucket = buckets[start : start + len(source)]
        bucket[:] = len(shapes) - 1
        for k in range(len(shapes) - 2, -1, -1):
            bucket[(source <= shapes[k].source) & (target <= shapes[k].target)] = k
        start += len(source)
    largest = shapes[-1]
    if longest[0] > largest.source or longest[1] > largest.target:
        raise ValueError(
            f"the largest shape holds {largest.source} + {largest.target} tokens, but the pairs need "
            f"up to {longest[0]} + {longest[1]}; plan the shapes from these pairs with plan_shapes"
        )
    return buckets


def _layout(sizes: Ints, shapes: Sequence[Shape]) -> NDArray[np.int64]:
    """Return ``[batches, 3]``: begin and end of each batch among the pairs grouped by bucket, and its shape.

    Pairs left over from a shape come right before those of the next one, so they begin its first batch.
    """
    batches = []
    start = stop = 0
    for k, (size, shape) in enumerate(zip(sizes, shapes, strict=True)):
        stop += int(size)
        starts = np.arange(start, stop - shape.rows + 1, shape.rows)
        batches.append(np.stack([starts, starts + shape.rows, np.full(len(starts), k)], axis=1))
        start += len(starts) * shape.rows
    if start < stop:
        batches.append(np.array([[start, stop, len(shapes) - 1]]))
    return np.concatenate(batches)


def dev_batches(pairs: TokenPairs, max_tokens: int) -> list[Batch]:
    """Batch every pair once, shortest first, with at most ``max_tokens`` positions or one pair per batch."""
    source, target = (lengths + 1 for lengths in pairs.lengths)
    order = np.argsort(source + target, kind="stable")
    batches: list[Batch] = []
    start = 0
    while start < len(order):
        rest = order[start:]
        widest = np.maximum.accumulate(source[rest]) + np.maximum.accumulate(target[rest])
        positions = widest * np.arange(1, len(rest) + 1)  # of a batch of the first, the first two …
        count = max(1, int(np.searchsorted(positions, max_tokens, side="right")))
        rows = rest[:count]
        shape = Shape(int(source[rows].max()), int(target[rows].max()), count)
        batches.append(_collate(pairs, rows, shape))
        start += count
    return batches


def _collate(pairs: TokenPairs, rows: Ints, shape: Shape, dropout: tuple[float, int] | None = None) -> Batch:
    """Pad ``rows`` to ``shape``; ``dropout`` is the probability and the seed of word dropout."""
    source, source_lengths = pairs.source.padded(rows, shape.source)
    target, target_lengths = pairs.target.padded(rows, shape.target)
    every_row = np.arange(len(rows))
    source[every_row, source_lengths] = EOS
    # Every row has room for an EOS, so only padding falls off the end.
    target_in = np.concatenate([np.full((len(rows), 1), BOS), target[:, :-1]], axis=1)
    target[every_row, target_lengths] = EOS
    if dropout is not None:
        drop_words([source, target_in], *dropout)
    empty_rows = ((0, shape.rows - len(rows)), (0, 0))
    padded = [np.pad(side, empty_rows, constant_values=PAD) for side in (source, target_in, target)]
    return Batch(*map(torch.from_numpy, padded), tokens=int(target_lengths.sum()) + len(rows))

"""Padded batches of a fixed list of shapes, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from normlab.config.randomness import derive
from normlab.data.ragged import Ints, TokenPairs
from normlab.data.shapes import Shape
from normlab.data.tokenizer import BOS, EOS, PAD, UNK


@dataclass(frozen=True)
class Batch:
    """One micro-batch, int64. Empty rows are PAD throughout and count no token."""

    source: torch.Tensor
    """``[B, S]``: ids, EOS, PAD ..."""
    target_in: torch.Tensor
    """``[B, T]``: BOS, ids, PAD ..."""
    target_out: torch.Tensor
    """``[B, T]``: ids, EOS, PAD ..."""
    tokens: int
    """Tokens of ``target_out``, EOS included, PAD not."""
    source_tokens: int

    @property
    def padded_tokens(self) -> int:
        """Tokens of both sides, padding included."""
        return self.source.numel() + self.target_in.numel()

    def to(self, device: torch.device | str) -> Batch:
        sides = (self.source, self.target_in, self.target_out)
        source, target_in, target_out = (side.to(device, non_blocking=True) for side in sides)
        return replace(self, source=source, target_in=target_in, target_out=target_out)

    def recounted(self) -> Batch:
        """The same with its own numbers of tokens, where it is a part or a change of another."""
        target, source = (int((side != PAD).sum()) for side in (self.target_out, self.source))
        return replace(self, tokens=target, source_tokens=source)


class Batches:
    """Endless training batches: index i is the i-th micro-batch over all epochs, so resuming needs only i.

    In every epoch each pair occurs once, in the smallest shape that holds it. Pairs that do not fill a batch
    of their shape go to the next shape, so only one batch of an epoch has empty rows. Every epoch has
    ``steps_per_epoch`` batches. Memory is 5 bytes a pair, and 20 more while an epoch is planned.
    """

    def __init__(self, pairs: TokenPairs, shapes: Sequence[Shape], seed: int) -> None:
        if len(pairs) == 0:
            raise ValueError("there is no pair to make batches of; pass at least one")
        self._pairs, self._shapes, self._seed = pairs, tuple(shapes), seed
        self._bucket = _buckets(pairs, self._shapes)
        sizes = np.bincount(self._bucket, minlength=len(shapes))
        self._layout = _layout(sizes, self._shapes)
        self._epoch = -1
        self._rows: Ints = self._bucket[:0]
        self._order: Ints = self._bucket[:0]
        self._planning = threading.Lock()

    @property
    def steps_per_epoch(self) -> int:
        return len(self._layout)

    def _plan_epoch(self, epoch: int) -> None:
        # The old plan is dropped first: there is never room for two.
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
        drop = (word_dropout, derive(seed, "word_dropout", index)) if word_dropout else None
        return _collate(self._pairs, rows, self._shapes[k], drop)


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

    Pairs that a shape leaves over come right before those of the next one, and so begin its first batch.
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
    """Every pair once, shortest first, in batches of at most ``max_tokens`` positions or of one pair."""
    source, target = (lengths + 1 for lengths in pairs.lengths)
    order = np.argsort(source + target, kind="stable")
    batches: list[Batch] = []
    start = 0
    while start < len(order):
        rest = order[start:]
        widest = np.maximum.accumulate(source[rest]) + np.maximum.accumulate(target[rest])
        count = max(1, int(np.searchsorted(widest * np.arange(1, len(rest) + 1), max_tokens, side="right")))
        rows = rest[:count]
        batches.append(_collate(pairs, rows, Shape(int(source[rows].max()), int(target[rows].max()), count)))
        start += count
    return batches


def _collate(pairs: TokenPairs, rows: Ints, shape: Shape, drop: tuple[float, int] | None = None) -> Batch:
    """Pads ``rows`` to ``shape``; ``drop`` is the probability and the seed of word dropout."""
    source, source_lengths = pairs.source.padded(rows, shape.source)
    ids, target_lengths = pairs.target.padded(rows, shape.target)
    each = np.arange(len(rows))
    source[each, source_lengths] = EOS
    target_in = np.concatenate([np.full((len(rows), 1), BOS), ids[:, :-1]], axis=1)
    ids[each, target_lengths] = EOS
    if drop is not None:
        drop_words([source, target_in], *drop)
    empty = ((0, shape.rows - len(rows)), (0, 0))
    padded = (np.pad(side, empty, constant_values=PAD) for side in (source, target_in, ids))
    return Batch(
        *map(torch.from_numpy, padded),
        tokens=int(target_lengths.sum()) + len(rows),
        source_tokens=int(source_lengths.sum()) + len(rows),
    )


def drop_words(inputs: Sequence[Ints], probability: float, seed: int) -> None:
    """Word dropout: replace each id of a word by UNK with that probability, in place."""
    draws = uniform(seed, sum(ids.size for ids in inputs))
    for ids in inputs:
        draw, draws = draws[: ids.size], draws[ids.size :]
        ids[(draw.reshape(ids.shape) < probability) & (ids > EOS)] = UNK


# NumPy promises the bits of PCG64 for ever, but not what Generator's methods make of them.
def uniform(seed: int, *shape: int) -> NDArray[np.float64]:
    """Draw numbers from 0 to 1, without 1, that depend on the seed alone."""
    draws = np.random.PCG64(seed).random_raw(math.prod(shape))
    return ((draws >> np.uint64(11)).astype(np.float64) / 2**53).reshape(shape)


def permutation(count: int, seed: int) -> Ints:
    """Return the numbers below ``count`` in an order that depends on the seed alone, as uint32 if that holds
    them: the order that sorts as many draws of 64 bits.
    """
    order = np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")
    return order.astype(np.uint32 if count <= 2**32 else np.int64)

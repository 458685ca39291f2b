"""Padded batches of few shapes, in an order that depends only on the seed and the epoch.

There are few shapes, so that code can be compiled for each, and they leave little padding.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from normlab.base.model_config import derive
from normlab.lab.data.ragged import Ints, TokenPairs
from normlab.lab.data.tokenizer import BOS, EOS, PAD, UNK


@dataclass(frozen=True)
class Shape:
    """Rows of a micro-batch, and the length of its sources and targets with BOS and EOS."""

    source: int
    target: int
    rows: int


def plan_shapes(pairs: TokenPairs, max_tokens: int, count: int = 16) -> list[Shape]:
    """Plan at most ``count`` shapes of at most ``max_tokens`` tokens; a pair that fits one fits all later
    ones.

    The first cut gives every shape an equal share of the tokens. Then each corner (S, T) in turn moves to the
    place between its neighbours that gives the fewest padded tokens, sum_k n_k (S_k + T_k) with n_k pairs
    fitting shape k but not k - 1, until none can move. The last shape holds every pair. A shape has at least
    one row, even if that exceeds ``max_tokens``. Long lengths are rounded up to a multiple of a unit, to keep
    the table of all lengths small. Memory is 24 bytes per pair.
    """
    if len(pairs) == 0:
        raise ValueError("there is no pair to plan batch shapes for; pass at least one")
    longest = np.max([[s.max(), t.max()] for s, t in pairs.lengths_in_parts()], axis=0) + 1
    unit = -(-int(longest.max()) // 512)
    parts = ((np.stack(sides) + unit) // unit for sides in pairs.lengths_in_parts())
    lengths = np.concatenate([part.astype(np.int16) for part in parts], axis=1)
    corners = _equal_shares(lengths, count)
    size = corners[-1] + 1
    cells = lengths[0] * np.int32(size[1]) + lengths[1]
    table = np.bincount(cells, minlength=size.prod()).reshape(size)
    fit = table.cumsum(0).cumsum(1)  # fit[s, t]: pairs with source <= s and target <= t
    _move_corners(corners, fit)

    shapes: list[Shape] = []
    held = 0
    for corner in corners:
        if fit[tuple(corner)] > held:
            held = int(fit[tuple(corner)])
            sides = np.minimum(corner * unit, longest).tolist()
            shapes.append(Shape(*sides, rows=max(1, max_tokens // sum(sides))))
    return shapes


def _equal_shares(lengths: NDArray[np.int16], count: int) -> list[NDArray[np.int64]]:
    """Return corners that each hold nine tenths of one of ``count`` parts with equally many tokens; the last
    holds all pairs.

    The pairs, of ``lengths`` `[2, pairs]`, are sorted by number of tokens, equal ones in the order of the
    text, then cut into the parts.
    """
    tokens = lengths.sum(axis=0, dtype=np.int16)
    wanted = tokens.sum(dtype=np.int64) * np.arange(1, count) / count
    cuts = np.searchsorted(np.sort(tokens).cumsum(dtype=np.float64), wanted)
    parts = np.split(np.argsort(tokens, kind="stable"), cuts)
    corners = [np.quantile(lengths[:, part], 0.9, axis=1) for part in parts if len(part)]
    corners[-1] = lengths.max(axis=1)
    return list(np.maximum.accumulate(np.array(corners).astype(np.int64)))


def _move_corners(corners: list[NDArray[np.int64]], fit: NDArray[np.int64]) -> None:
    """Run at most 20 sweeps of the descent of ``plan_shapes`` in place; the last corner stays."""
    for _ in range(20):
        moved = False
        for k in range(len(corners) - 1):
            low = corners[k - 1] if k else np.zeros(2, np.int64)
            high = corners[k + 1]
            window = fit[low[0] : high[0] + 1, low[1] : high[1] + 1]
            size = np.add.outer(np.arange(low[0], high[0] + 1), np.arange(low[1], high[1] + 1))
            positions = (window - fit[tuple(low)]) * size + (fit[tuple(high)] - window) * high.sum()
            at = np.unravel_index(np.argmin(positions), positions.shape)
            here = tuple(corners[k] - low)
            if positions[at] < positions[here]:
                corners[k] = low + np.array(at)
                moved = True
        if not moved:
            return


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
        self._rows: Ints = self._bucket[:0]
        self._order: Ints = self._bucket[:0]
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
        count = max(1, int(np.searchsorted(widest * np.arange(1, len(rest) + 1), max_tokens, side="right")))
        rows = rest[:count]
        batches.append(_collate(pairs, rows, Shape(int(source[rows].max()), int(target[rows].max()), count)))
        start += count
    return batches


def _collate(pairs: TokenPairs, rows: Ints, shape: Shape, drop: tuple[float, int] | None = None) -> Batch:
    """Pad ``rows`` to ``shape``; ``drop`` is the probability and the seed of word dropout."""
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
    return Batch(*map(torch.from_numpy, padded), tokens=int(target_lengths.sum()) + len(rows))


def drop_words(inputs: Sequence[Ints], probability: float, seed: int) -> None:
    """Word dropout: replace each id of a word by UNK with that probability, in place."""
    draws = uniform(seed, sum(ids.size for ids in inputs))
    for ids in inputs:
        draw, draws = draws[: ids.size], draws[ids.size :]
        ids[(draw.reshape(ids.shape) < probability) & (ids > EOS)] = UNK


# NumPy guarantees the bits of PCG64 forever, but not what Generator's methods make of them.
def uniform(seed: int, *shape: int) -> NDArray[np.float64]:
    """Draw numbers from 0 to 1, excluding 1, that depend only on the seed."""
    draws = np.random.PCG64(seed).random_raw(math.prod(shape))
    return ((draws >> np.uint64(11)).astype(np.float64) / 2**53).reshape(shape)


def permutation(count: int, seed: int) -> Ints:
    """Return the numbers below ``count`` in an order that depends only on the seed, as uint32 if that holds
    them: the order that sorts ``count`` draws of 64 bits.
    """
    order = np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")
    return order.astype(np.uint32 if count <= 2**32 else np.int64)


T = TypeVar("T")

AHEAD: Final = 2
"""Number of batches that each worker makes ahead."""


class Prefetch(Generic[T]):
    """Return ``make(index)`` from ``at(index)``, computed in advance.

    The indices ``index + stride``, ``index + 2 stride`` … below ``stop`` are expected next; any other index
    is computed on request. ``make`` must depend only on the index and be safe to call from ``workers``
    threads at once; with 0 workers there is no thread. ``at`` raises the exceptions of ``make``.
    """

    def __init__(self, make: Callable[[int], T], *, workers: int, stop: int, stride: int = 1) -> None:
        self._make, self._stop, self._stride = make, stop, stride
        self._ahead = AHEAD * workers
        self._workers = ThreadPoolExecutor(workers, "loader") if workers else None
        self._coming: dict[int, Future[T]] = {}

    def at(self, index: int) -> T:
        if self._workers is None:
            return self._make(index)
        wanted = [index, *range(index + self._stride, self._stop, self._stride)[: self._ahead]]
        for other in self._coming.keys() - set(wanted):
            self._coming.pop(other).cancel()
        for i in wanted:
            if i not in self._coming:
                self._coming[i] = self._workers.submit(self._make, i)
        return self._coming.pop(index).result()

    def close(self) -> None:
        """Stop the threads once each has finished its batch."""
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)

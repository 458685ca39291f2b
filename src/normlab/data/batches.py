"""Padded batches of a fixed list of shapes, in an order that depends on seed and epoch alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from normlab.data.tokenizer import BOS, EOS, PAD, UNK
from normlab.spec.randomness import derive

Ints = NDArray[np.integer]


@dataclass(frozen=True)
class Ragged:
    """Sentences of different lengths end to end: sentence i is ``tokens[offsets[i]:offsets[i + 1]]``."""

    tokens: Ints
    offsets: Ints

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]], dtype: type[np.integer] = np.int32) -> Ragged:
        offsets = np.zeros(len(sentences) + 1, np.int64)
        np.cumsum([len(sentence) for sentence in sentences], out=offsets[1:])
        tokens = np.fromiter((token for sentence in sentences for token in sentence), dtype, int(offsets[-1]))
        return cls(tokens, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> list[int]:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]].tolist()

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def padded(self, rows: Ints, width: int) -> tuple[Ints, Ints]:
        """``[B, width]`` ids padded with PAD, and ``[B]`` lengths."""
        starts = np.asarray(self.offsets[rows])
        lengths = np.asarray(self.offsets[rows + 1]) - starts
        column = np.arange(width)
        inside = column < lengths[:, None]
        ids = np.full(inside.shape, PAD, np.int64)
        ids[inside] = self.tokens[(starts[:, None] + column)[inside]]
        return ids, lengths


@dataclass(frozen=True)
class TokenPairs:
    """Both sides as ids without special tokens."""

    source: Ragged
    target: Ragged

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        """Tokens of each source and each target, special tokens not counted."""
        return self.source.lengths, self.target.lengths


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
    """Of ``target_out``, EOS included, PAD not."""
    source_tokens: int

    @property
    def positions(self) -> int:
        """Of both sides, padding included."""
        return self.source.numel() + self.target_in.numel()

    def to(self, device: torch.device | str) -> Batch:
        return replace(
            self,
            source=self.source.to(device, non_blocking=True),
            target_in=self.target_in.to(device, non_blocking=True),
            target_out=self.target_out.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class Shape:
    """Positions of a micro-batch, ``[rows, source]`` and ``[rows, target]``, with those of BOS and EOS."""

    source: int
    target: int
    rows: int


def plan_shapes(source_lengths: Ints, target_lengths: Ints, max_tokens: int, count: int = 16) -> list[Shape]:
    """At most ``count`` shapes of at most ``max_tokens`` positions; what fits one fits all later ones.

    Lengths are in tokens without special tokens. The first cut gives every shape an equal share of the
    tokens. Then each corner (S, T) in turn moves to the place between its neighbours that leaves the fewest
    positions, sum_k n_k (S_k + T_k) with n_k pairs fitting shape k but not k - 1, until none can move. The
    last holds every pair. A shape has one row even if that is more than ``max_tokens``.
    """
    if len(source_lengths) == 0:
        raise ValueError("there is no pair to plan batch shapes for; pass at least one")
    sides = np.stack([source_lengths, target_lengths]).astype(np.int64) + 1
    # Very long texts are planned on a coarser grid, so that the table below stays small.
    unit = -(-int(sides.max()) // 512)
    cells = -(-sides // unit)
    fit = np.zeros(cells.max(axis=1) + 1, np.int64)
    np.add.at(fit, (cells[0], cells[1]), 1)
    fit = fit.cumsum(0).cumsum(1)  # fit[s, t]: pairs with source <= s and target <= t

    total = cells.sum(axis=0)
    order = np.argsort(total, kind="stable")
    mass = total[order].cumsum()
    cuts = np.searchsorted(mass, mass[-1] * np.arange(1, count) / count)
    parts = np.split(order, cuts)
    corners = [np.quantile(cells[:, part], 0.9, axis=1).astype(np.int64) for part in parts if len(part)]
    corners = list(np.maximum.accumulate(np.array([*corners[:-1], cells.max(axis=1)])))
    _move_corners(corners, fit)

    shapes: list[Shape] = []
    held = 0
    for corner in corners:
        if fit[tuple(corner)] > held:
            held = int(fit[tuple(corner)])
            source, target = (int(side) for side in np.minimum(corner * unit, sides.max(axis=1)))
            shapes.append(Shape(source, target, max(1, max_tokens // (source + target))))
    return shapes


def _move_corners(corners: list[NDArray[np.int64]], fit: NDArray[np.int64], sweeps: int = 20) -> None:
    """Coordinate descent of ``plan_shapes``, in place; the last corner stays."""
    for _ in range(sweeps):
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


class Batches:
    """Endless training batches: index i is the i-th micro-batch over all epochs, so resuming needs i alone.

    In every epoch each pair occurs once, in the smallest shape that holds it. What is left of a shape at the
    end goes to the next one, so only one batch of an epoch has empty rows. An epoch always has
    ``steps_per_epoch`` batches, whatever its order.
    """

    def __init__(self, pairs: TokenPairs, shapes: Sequence[Shape], seed: int) -> None:
        source, target = (lengths + 1 for lengths in pairs.lengths)
        largest = shapes[-1]
        if len(pairs) == 0:
            raise ValueError("there is no pair to make batches of; pass at least one")
        if source.max() > largest.source or target.max() > largest.target:
            raise ValueError(
                f"the largest shape holds {largest.source} + {largest.target} positions, but the pairs need "
                f"up to {source.max()} + {target.max()}; plan the shapes from these pairs with plan_shapes"
            )
        fits = [np.maximum(source - shape.source, target - shape.target) <= 0 for shape in shapes]
        self._bucket = np.argmax(np.stack(fits), axis=0)
        self._pairs, self._shapes, self._seed = pairs, tuple(shapes), seed
        self._epoch, self._plan = 0, self._plan_epoch(0)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._plan)

    def _plan_epoch(self, epoch: int) -> list[tuple[Shape, Ints]]:
        order = permutation(len(self._pairs), derive(self._seed, "shuffle", epoch))
        plan: list[tuple[Shape, Ints]] = []
        left = order[:0]
        for k, shape in enumerate(self._shapes):
            rows = np.concatenate([left, order[self._bucket[order] == k]])
            full = len(rows) // shape.rows * shape.rows
            plan += [(shape, rows[start : start + shape.rows]) for start in range(0, full, shape.rows)]
            left = rows[full:]
        if len(left):
            plan.append((self._shapes[-1], left))
        return [plan[i] for i in permutation(len(plan), derive(self._seed, "batch_order", epoch))]

    def at(self, index: int, *, word_dropout: float = 0.0, seed: int = 0) -> Batch:
        """The micro-batch ``index``, counted from 0 over all epochs.

        With ``word_dropout`` each input token, on both sides, becomes UNK with that probability, by a
        generator of (``seed``, ``index``); ``target_out`` stays whole.
        """
        epoch, step = divmod(index, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, self._plan_epoch(epoch)
        shape, rows = self._plan[step]
        drop = (word_dropout, derive(seed, "word_dropout", index)) if word_dropout else None
        return _collate(self._pairs, rows, shape, drop)


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
    target_out = ids
    target_out[each, target_lengths] = EOS
    if drop is not None:
        drop_words([source, target_in], *drop)
    empty = ((0, shape.rows - len(rows)), (0, 0))
    return Batch(
        source=torch.from_numpy(np.pad(source, empty, constant_values=PAD)),
        target_in=torch.from_numpy(np.pad(target_in, empty, constant_values=PAD)),
        target_out=torch.from_numpy(np.pad(target_out, empty, constant_values=PAD)),
        tokens=int(target_lengths.sum()) + len(rows),
        source_tokens=int(source_lengths.sum()) + len(rows),
    )


def drop_words(inputs: Sequence[Ints], probability: float, seed: int) -> None:
    """Word dropout, in place: each id of a word becomes UNK with that probability."""
    uniform = _uniform(sum(ids.size for ids in inputs), seed)
    for ids in inputs:
        draw, uniform = uniform[: ids.size], uniform[ids.size :]
        ids[(draw.reshape(ids.shape) < probability) & (ids > EOS)] = UNK


# NumPy promises the bits of PCG64 for ever, but not what Generator's methods make of them.
def permutation(count: int, seed: int) -> Ints:
    """The numbers below ``count`` in an order that depends on the seed alone."""
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")


def _uniform(count: int, seed: int) -> NDArray[np.float64]:
    """In [0, 1), with 53 bits each."""
    return (np.random.PCG64(seed).random_raw(count) >> np.uint64(11)).astype(np.float64) / 2**53

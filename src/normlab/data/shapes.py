"""Shapes of micro-batches: few, so that code can be compiled for each, and with little padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normlab.data.ragged import TokenPairs


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
    fitting shape k but not k - 1, until none can move. The last holds every pair. A shape has one row even if
    that is more than ``max_tokens``. Memory does not grow with the text.
    """
    if len(pairs) == 0:
        raise ValueError("there is no pair to plan batch shapes for; pass at least one")
    cells = _Cells(pairs)
    table = cells.table()
    corners = _equal_shares(cells, table, count)
    fit = table.cumsum(0).cumsum(1)  # fit[s, t]: pairs with source <= s and target <= t
    _move_corners(corners, fit)

    shapes: list[Shape] = []
    held = 0
    for corner in corners:
        if fit[tuple(corner)] > held:
            held = int(fit[tuple(corner)])
            source, target = (int(side) for side in np.minimum(corner * cells.unit, cells.longest))
            shapes.append(Shape(source, target, max(1, max_tokens // (source + target))))
    return shapes


class _Cells:
    """The lengths (source, target) of each pair on a grid, coarser for long texts to keep tables small."""

    def __init__(self, pairs: TokenPairs) -> None:
        self._pairs = pairs
        self.longest = np.max([[s.max(), t.max()] for s, t in pairs.lengths_in_parts()], axis=0) + 1
        """`[2]`: length of the longest source and of the longest target."""
        self.unit = -(-int(self.longest.max()) // 512)
        self.most = -(-self.longest // self.unit)

    def parts(self) -> Iterator[NDArray[np.int64]]:
        """Yield `[2, pairs]` at a time, in the order of the text."""
        for sides in self._pairs.lengths_in_parts():
            yield -(-(np.stack(sides).astype(np.int64) + 1) // self.unit)

    def table(self) -> NDArray[np.int64]:
        shape = self.most + 1
        table = np.zeros(shape.prod(), np.int64)
        for source, target in self.parts():
            table += np.bincount(source * shape[1] + target, minlength=len(table))
        return table.reshape(shape)


def _equal_shares(cells: _Cells, table: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Return corners that each hold nine tenths of one of ``count`` parts with equally many tokens; the last
    holds all pairs.

    The pairs are sorted by their tokens, equals in the order of the text, and then cut into the parts.
    """
    totals = np.add.outer(np.arange(table.shape[0]), np.arange(table.shape[1]))
    held = np.zeros(totals.max() + 1, np.int64)
    np.add.at(held, totals, table)
    first = held.cumsum() - held  # rank[t]: of the first pair of so many tokens
    cuts = _cuts(held, first, count)
    share_of = np.searchsorted(cuts, first, side="right")
    cut_through = np.flatnonzero(np.searchsorted(cuts, first + held - 1, side="right") > share_of)
    sides = [np.zeros(count * size, np.int64) for size in table.shape]
    for part in cells.parts():
        tokens = part.sum(axis=0)
        share = share_of[tokens]
        for total in cut_through:
            equal = np.flatnonzero(tokens == total)
            share[equal] = np.searchsorted(cuts, first[total] + np.arange(len(equal)), side="right")
            first[total] += len(equal)
        for side, cell, size in zip(sides, part, table.shape, strict=True):
            side += np.bincount(share * size + cell, minlength=len(side))
    shares = zip(*(side.reshape(count, -1) for side in sides), strict=True)
    corners = [[_nine_tenths(side) for side in both] for both in shares if both[0].any()]
    return list(np.maximum.accumulate(np.array([*corners[:-1], cells.most])))


def _cuts(held: NDArray[np.int64], first: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the ranks at which the sorted pairs are cut; ``held[n]`` pairs have n tokens."""
    tokens = np.arange(len(held))
    mass = (held * tokens).cumsum()
    cuts = []
    for wanted in mass[-1] * np.arange(1, count) / count:
        total = int(np.searchsorted(mass, wanted))
        missing = math.ceil(wanted) - int(mass[total] - held[total] * total)
        cuts.append(int(first[total]) - (-missing // total) - 1)
    return np.array(cuts, np.int64)


def _nine_tenths(histogram: NDArray[np.int64]) -> int:
    """Return ``int(numpy.quantile(values, 0.9))`` of the values that a histogram counts."""
    last = int(histogram.sum()) - 1
    place = last * 0.9
    below = math.floor(place)
    beyond = histogram.cumsum()
    low, high = (int(np.searchsorted(beyond, i, side="right")) for i in (below, min(below + 1, last)))
    share = place - below
    # In NumPy's own order of operations, or a whole number could end just below itself.
    return int(high - (high - low) * (1 - share) if share >= 0.5 else low + (high - low) * share)


def _move_corners(corners: list[NDArray[np.int64]], fit: NDArray[np.int64], sweeps: int = 20) -> None:
    """Run the coordinate descent of ``plan_shapes`` in place; the last corner stays."""
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

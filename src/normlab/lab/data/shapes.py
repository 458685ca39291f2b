"""The shapes of padded batches: few, so that code can be compiled for each, and with little padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normlab.lab.data.ragged import TokenPairs


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
    lengths = _lengths_in_units(pairs, unit)
    corners = _equal_shares(lengths, count)
    size = corners[-1] + 1
    cells = lengths[0] * np.int32(size[1]) + lengths[1]
    table = np.bincount(cells, minlength=size.prod()).reshape(size)
    fit = table.cumsum(0).cumsum(1)  # fit[s, t]: pairs with source <= s and target <= t
    _move_corners(corners, fit)

    shapes: list[Shape] = []
    held = 0
    for corner in corners:
        if fit[tuple(corner)] == held:  # no pair is new to this shape
            continue
        held = int(fit[tuple(corner)])
        source, target = np.minimum(corner * unit, longest).tolist()
        shapes.append(Shape(source, target, rows=max(1, max_tokens // (source + target))))
    return shapes


def _lengths_in_units(pairs: TokenPairs, unit: int) -> NDArray[np.int16]:
    """Return the lengths of all pairs with EOS or BOS, `[2, pairs]`, rounded up to units."""
    parts = []
    for lengths in pairs.lengths_in_parts():
        with_special = np.stack(lengths) + 1
        parts.append(((with_special + unit - 1) // unit).astype(np.int16))
    return np.concatenate(parts, axis=1)


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
            # every place (s, t) from low to high, both included
            window = fit[low[0] : high[0] + 1, low[1] : high[1] + 1]
            size = np.add.outer(np.arange(low[0], high[0] + 1), np.arange(low[1], high[1] + 1))
            in_this, in_next = window - fit[tuple(low)], fit[tuple(high)] - window
            padded_tokens = in_this * size + in_next * high.sum()
            best = np.unravel_index(np.argmin(padded_tokens), padded_tokens.shape)
            now = tuple(corners[k] - low)
            if padded_tokens[best] < padded_tokens[now]:
                corners[k] = low + np.array(best)
                moved = True
        if not moved:
            return

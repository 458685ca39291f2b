"""How often recipes train: shares with exact intervals, and Fisher's exact test between two."""

from __future__ import annotations

from functools import cache

from scipy.stats import binomtest, fisher_exact

from normlab.comparison.result import Interval
from normlab.comparison.seeds import LEVEL, MOST_SEEDS


def share(trained: int, runs: int) -> Interval:
    """The share of runs that trained with its 95% interval (Clopper and Pearson 1934), from 0 to 1."""
    return Interval(trained / runs, *_ends(trained, runs))


def share_gap(only_first: int, only_second: int, pairs: int) -> Interval:
    """The share of pairs of which the first run alone trained minus that of the second alone, -1 to 1.

    Its sign is that of McNemar's exact test (1947): of the pairs whose runs differ, one half would be no gap.
    The ends of that share's exact interval are multiplied by the share of pairs that differ, of whose exact
    interval the end is taken that makes the result wider.
    """
    differing = only_first + only_second
    low, high = (2 * p - 1 for p in (_ends(only_first, differing) if differing else (0.0, 1.0)))
    few, many = _ends(differing, pairs)
    ends = low * (many if low < 0 else few), high * (many if high > 0 else few)
    return Interval((only_first - only_second) / pairs, *ends)


def _ends(found: int, runs: int) -> tuple[float, float]:
    ends = binomtest(found, runs).proportion_ci(1 - LEVEL, method="exact")
    return float(ends.low), float(ends.high)


@cache
def fisher(a: tuple[int, int], b: tuple[int, int]) -> float:
    """The two-sided p that two recipes, each (trained, runs), train equally often."""
    return float(fisher_exact([[k, n - k] for k, n in (a, b)]).pvalue)


def seeds_for_shares(a: tuple[int, int], b: tuple[int, int], pairs: int) -> int | None:
    """The smallest number of seeds at which the same two shares differ significantly among so many pairs;
    None if it takes more than ``MOST_SEEDS``.
    """
    for seeds in range(2, MOST_SEEDS + 1):
        counts = [(round(k / n * seeds), seeds) for k, n in (a, b)]
        if pairs * fisher(counts[0], counts[1]) < LEVEL:
            return seeds
    return None

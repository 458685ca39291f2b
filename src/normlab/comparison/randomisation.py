"""Whether two sets of trained models differ on a test text by more than chance, whatever other seeds would
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from normlab.comparison.scale import Array
from normlab.errors import UserError

Combine = Callable[[Array], Array]
"""Sums of statistics `[..., k]` to scores `[...]`."""

_SEED = 20050629
_ROUNDING = 1e-9
"""Scores of the same examples in another order differ by rounding, far less than any exchange does."""
_CHUNK = 512
"""Exchanges drawn at a time: bounds memory at some 10 kB an example."""


def paired_randomisation(a: Array, b: Array, combine: Combine, *, trials: int) -> float:
    r"""Two-sided p of no difference, :math:`(1 + \#\{|d_r| \ge |d|\}) / (1 + R)`, d being the mean score of
    ``a`` minus that of ``b``.

    In each of R trials every example's outputs of ``a`` and of ``b``, those of all seeds together, are
    exchanged with a probability of one half. Both are statistics `[seeds, examples, k]` of the same examples;
    the k-th seed of one takes the place of the k-th of the other. Raises UserError for different numbers of
    seeds or examples. Riezler and Maxwell 2005, Figure 1 (W05-0908).
    """
    if a.shape != b.shape:
        raise UserError(
            f"a has {a.shape[0]} seeds of {a.shape[1]} examples and b {b.shape[0]} of {b.shape[1]}, but all "
            f"outputs for an example are exchanged at once; give as many seeds and examples of both"
        )
    seeds, examples, width = a.shape
    sum_a, sum_b = a.sum(axis=1), b.sum(axis=1)
    seen = abs(combine(sum_a).mean() - combine(sum_b).mean())
    surplus = (a - b).transpose(1, 0, 2).reshape(examples, seeds * width)
    as_large = 0
    for exchanged in _exchanges(examples, trials):
        moved = (exchanged @ surplus).reshape(-1, seeds, width)
        found = combine(sum_a - moved).mean(axis=1) - combine(sum_b + moved).mean(axis=1)
        as_large += int((np.abs(found) >= seen - _ROUNDING).sum())
    return (1 + as_large) / (1 + trials)


def _exchanges(examples: int, trials: int) -> Iterator[Array]:
    """1 where an example's outputs are exchanged, `[chunk, examples]`; the same for every pair."""
    random = np.random.default_rng(_SEED)
    for start in range(0, trials, _CHUNK):
        rows = min(_CHUNK, trials - start)
        yield random.integers(2, size=(rows, examples)).astype(np.float64)

"""Which differences of a test score are more than chance: in the choice of examples, and in the seeds.

A system is a recipe with its seeds. Its score is the mean over seeds of the score of the whole test text,
which is a function (``Task.combine``) of statistics summed over examples: sentences, documents. Two kinds of
chance are measured and added. *Examples*: they are drawn again with replacement, the same ones for every
system and seed (paired bootstrap; Koehn 2004, W04-3250). *Seeds*: their scores spread by more than examples
explain. With two or three seeds that spread is itself known badly. Drawing seeds again with replacement, as
one does examples, ignores that: of pairs of equal recipes whose seeds lie far apart it calls a third
different at p < 0.05 with two seeds and a quarter with three. So the sum goes through Student's t, with
Welch's degrees of freedom.

Beside it stands paired approximate randomisation (Riezler and Maxwell 2005, Figure 1, W05-0908). It asks
whether it matters which of two models gave which output, and says nothing of other seeds of their recipes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from scipy.stats import t as student_t

from normlab.errors import UserError
from normlab.spec.comparison import Difference, Interval
from normlab.spec.metric import Metric

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Combine = Callable[[Array], Array]
"""Sums of statistics `[..., k]` to scores `[...]`."""

RESAMPLES = 2000
LEVEL = 0.05
"""A difference whose corrected p is below this is called significant; intervals cover the rest."""

_DRAW_SEED = 20040725
_EXCHANGE_SEED = 20050629
_ROUNDING = 1e-9
"""Scores of the same examples in another order differ by rounding, far less than any exchange does."""
_CHUNK = 512
"""Resamples drawn at a time: bounds memory at some 10 kB an example."""


def interval(rows: Array, combine: Combine, metric: Metric, *, resamples: int = RESAMPLES) -> Interval:
    """The mean score over seeds with its 95% interval, from statistics `[seeds, examples, k]`."""
    system = _System(rows, combine, resamples)
    value = float(system.scores.mean())
    error, freedom = _standard_error(system.resampled.mean(axis=1), (system,))
    margin = error * float(student_t.isf(LEVEL / 2, freedom))
    return Interval(value, metric.bounded(value - margin), metric.bounded(value + margin))


def paired_bootstrap(
    a: Array, b: Array, combine: Combine, *, resamples: int = RESAMPLES
) -> tuple[Interval, float]:
    """Mean score of ``a`` minus that of ``b`` with its 95% interval, and the two-sided p of no difference.

    Both are statistics `[seeds, examples, k]` of the same examples; the number of seeds may differ. With one
    seed each, p speaks of these two models alone, not of their recipes.
    """
    return _compare(_System(a, combine, resamples), _System(b, combine, resamples))


def paired_randomisation(a: Array, b: Array, combine: Combine, *, trials: int = RESAMPLES) -> float:
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


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """p-values corrected for their number, in their order; Holm 1979.

    The k-th smallest of m becomes the largest of (m - i + 1) p_i over i <= k, at most 1. Calling those below
    0.05 significant is wrong about any of them with a probability of at most 0.05.
    """
    order = np.argsort(p_values)
    steps = np.minimum(1.0, np.arange(len(order), 0, -1) * np.asarray(p_values)[order])
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(steps)
    return tuple(corrected.tolist())


def differences(
    systems: Mapping[str, Array], combine: Combine, *, resamples: int = RESAMPLES
) -> tuple[Difference, ...]:
    """Every pair of systems, each by its statistics `[seeds, examples, k]`; p Holm-corrected over all."""
    measured = {name: _System(rows, combine, resamples) for name, rows in systems.items()}
    pairs = list(itertools.combinations(measured, 2))
    found = [_compare(measured[a], measured[b]) for a, b in pairs]
    corrected = holm([p for _, p in found])
    exchanged = [
        paired_randomisation(systems[a], systems[b], combine, trials=resamples)
        if len(systems[a]) == len(systems[b])
        else None
        for a, b in pairs
    ]
    return tuple(
        Difference(a, b, delta, p, fair, fair < LEVEL, swapped)
        for (a, b), (delta, p), fair, swapped in zip(pairs, found, corrected, exchanged, strict=True)
    )


class _System:
    """A system's scores by seed, on the text and on every resample of its examples."""

    def __init__(self, rows: Array, combine: Combine, resamples: int) -> None:
        seeds, self.examples, width = rows.shape
        self.scores: Array = combine(rows.sum(axis=1))
        flat = rows.transpose(1, 0, 2).reshape(self.examples, seeds * width)
        drawn = [weights @ flat for weights in _draws(self.examples, resamples)]
        self.resampled: Array = combine(np.concatenate(drawn).reshape(resamples, seeds, width))
        self.by_seeds, self.by_seeds_raw = self._seed_variance()

    def _seed_variance(self) -> tuple[float, float]:
        """Variance of the mean over seeds: the part that examples do not explain, and the whole."""
        seeds = len(self.scores)
        if seeds == 1:
            return 0.0, 0.0
        seen = float(self.scores.var(ddof=1))
        by_examples = float(self.resampled.var(axis=1, ddof=1).mean()) - seen
        return max(0.0, seen - max(0.0, by_examples)) / seeds, seen / seeds


def _compare(a: _System, b: _System) -> tuple[Interval, float]:
    if a.examples != b.examples:
        raise UserError(f"a has {a.examples} examples and b {b.examples}; score both on the same text")
    delta = float(a.scores.mean() - b.scores.mean())
    error, freedom = _standard_error(a.resampled.mean(axis=1) - b.resampled.mean(axis=1), (a, b))
    margin = error * float(student_t.isf(LEVEL / 2, freedom))
    interval = Interval(delta, delta - margin, delta + margin)
    if delta == 0 or a.examples < 2:
        return interval, 1.0
    p = 2 * float(student_t.sf(abs(delta) / error, freedom)) if error else 0.0
    return interval, p


def _standard_error(resampled: Array, systems: Sequence[_System]) -> tuple[float, float]:
    """Standard error of a score or difference whose resamples are given, and its degrees of freedom
    (Satterthwaite 1946).

    The variance by examples counts as known; that by seeds, of n seeds, has n - 1 degrees of freedom.
    """
    variance = float(resampled.var()) + sum(s.by_seeds for s in systems)
    seeds = [(s.by_seeds_raw, len(s.scores) - 1) for s in systems if len(s.scores) > 1]
    doubt = sum(seen**2 / freedom for seen, freedom in seeds)
    if not doubt:
        return math.sqrt(variance), math.inf
    return math.sqrt(variance), max(variance**2 / doubt, min(freedom for _, freedom in seeds))


def _exchanges(examples: int, trials: int) -> Iterator[Array]:
    """1 where an example's outputs are exchanged, `[chunk, examples]`; the same for every pair."""
    random = np.random.default_rng(_EXCHANGE_SEED)
    for start in range(0, trials, _CHUNK):
        rows = min(_CHUNK, trials - start)
        yield random.integers(2, size=(rows, examples)).astype(np.float64)


def _draws(examples: int, resamples: int) -> Iterator[Array]:
    """How often each example is drawn, `[chunk, examples]` at a time; the same for every system."""
    random = np.random.default_rng(_DRAW_SEED)
    for start in range(0, resamples, _CHUNK):
        rows = min(_CHUNK, resamples - start)
        drawn = random.integers(examples, size=(rows, examples)) + examples * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * examples)
        yield counts.reshape(rows, examples).astype(np.float64)

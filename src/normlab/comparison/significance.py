"""Which differences of test BLEU are more than chance: in the choice of sentences, and in the seeds.

A system is a recipe with its seeds; its score is the mean over seeds of corpus BLEU. Two kinds of chance are
measured and added. *Sentences*: they are drawn again with replacement, the same ones for every system and
seed (paired bootstrap; Koehn 2004, W04-3250). *Seeds*: their scores spread by more than sentences explain.
With two or three seeds that spread is itself known badly. Drawing seeds again with replacement, as one does
sentences, ignores that: of pairs of equal recipes whose seeds lie far apart it calls a third different at
p < 0.05 with two seeds and a quarter with three. So the sum goes through Student's t, its degrees of freedom
counted as Welch does.

Beside it stands paired approximate randomisation (Riezler and Maxwell 2005, Figure 1, W05-0908). It asks of
the models that there are, and not of their recipes, whether it matters which of two wrote which translation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from scipy.stats import t as student_t

from normlab.errors import UserError
from normlab.spec.comparison import Difference, Interval
from normlab.tasks.scores import bleu_of_sums as corpus_scores
from normlab.tasks.scores import bleu_tokens, check_lengths

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

RESAMPLES = 2000
LEVEL = 0.05
"""A difference whose corrected p is below this is called significant; intervals cover the rest."""

_DRAW_SEED = 20040725
_EXCHANGE_SEED = 20050629
_ROUNDING = 1e-9
"""BLEU of the same sentences in another order differs by rounding, far less than any exchange does."""
_CHUNK = 512
"""Resamples drawn at a time: bounds memory at some 10 kB a sentence."""


def sentence_statistics(
    outputs: Sequence[Sequence[str]], references: Sequence[str], *, target_lang: str = ""
) -> Array:
    """`[seeds, sentences, 10]`: what corpus BLEU is a function of, by sentence.

    In order: tokens of the translation, of the reference, matching 1- to 4-grams, and 1- to 4-grams of the
    translation; sacreBLEU's tokens for the language (13a for most). Summed over sentences, ``corpus_scores``
    makes them BLEU.
    """
    # effective_order concerns sentence scores alone, which nobody looks at
    metric = BLEU(effective_order=True, tokenize=bleu_tokens(target_lang))
    rows: list[list[list[int]]] = []
    for hypotheses in outputs:
        check_lengths(hypotheses, references)
        found = [metric.sentence_score(h, [r]) for h, r in zip(hypotheses, references, strict=True)]
        rows.append([[s.sys_len, s.ref_len, *s.counts, *s.totals] for s in found])
    return np.array(rows, dtype=np.float64)


def bleu_interval(statistics: Array, *, resamples: int = RESAMPLES) -> Interval:
    """Mean BLEU over seeds with its 95% interval, from `[seeds, sentences, 10]` statistics."""
    system = _System(statistics, resamples)
    value = float(system.scores.mean())
    error, freedom = _standard_error(system.resampled.mean(axis=1), (system,))
    margin = error * float(student_t.isf(LEVEL / 2, freedom))
    return Interval(value, max(0.0, value - margin), min(100.0, value + margin))


def paired_bootstrap(a: Array, b: Array, *, resamples: int = RESAMPLES) -> tuple[Interval, float]:
    """Mean BLEU of ``a`` minus that of ``b`` with its 95% interval, and the two-sided p of no difference.

    Both are `[seeds, sentences, 10]` statistics of the same sentences; the number of seeds may differ. With
    one seed each, p speaks of these two models alone, not of their recipes.
    """
    return _compare(_System(a, resamples), _System(b, resamples))


def paired_randomisation(a: Array, b: Array, *, trials: int = RESAMPLES) -> float:
    r"""Two-sided p of no difference, :math:`(1 + \#\{|d_r| \ge |d|\}) / (1 + R)`, d being mean BLEU of ``a``
    minus that of ``b``.

    In each of R trials every sentence's translations by ``a`` and by ``b``, those of all seeds together, are
    exchanged with a probability of one half. Both are `[seeds, sentences, 10]` statistics of the same
    sentences; the k-th seed of one takes the place of the k-th of the other. Raises UserError for different
    numbers of seeds or sentences. Riezler and Maxwell 2005, Figure 1 (W05-0908).
    """
    if a.shape != b.shape:
        raise UserError(
            f"a has {a.shape[0]} seeds of {a.shape[1]} sentences and b {b.shape[0]} of {b.shape[1]}, but all "
            f"translations of a sentence are exchanged at once; give as many seeds and sentences of both"
        )
    seeds, sentences, width = a.shape
    sum_a, sum_b = a.sum(axis=1), b.sum(axis=1)
    seen = abs(corpus_scores(sum_a).mean() - corpus_scores(sum_b).mean())
    surplus = (a - b).transpose(1, 0, 2).reshape(sentences, seeds * width)
    as_large = 0
    for exchanged in _exchanges(sentences, trials):
        moved = (exchanged @ surplus).reshape(-1, seeds, width)
        found = corpus_scores(sum_a - moved).mean(axis=1) - corpus_scores(sum_b + moved).mean(axis=1)
        as_large += int((np.abs(found) >= seen - _ROUNDING).sum())
    return (1 + as_large) / (1 + trials)


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """p-values corrected for their number, in their order; Holm 1979.

    The k-th smallest of m becomes the largest of (m - i + 1) p_i over i <= k, at most 1. Calling those below
    0.05 significant is wrong about any of them with a probability of at most 0.05.
    """
    count = len(p_values)
    order = sorted(range(count), key=lambda i: p_values[i])
    corrected, largest = [0.0] * count, 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (count - rank) * p_values[i]))
        corrected[i] = largest
    return tuple(corrected)


def differences(
    systems: Mapping[str, Sequence[Sequence[str]]],
    references: Sequence[str],
    *,
    resamples: int = RESAMPLES,
    target_lang: str = "",
) -> tuple[Difference, ...]:
    """Every pair of systems, each a list over seeds of lists of translations; p Holm-corrected over all."""
    statistics = {
        name: sentence_statistics(outputs, references, target_lang=target_lang)
        for name, outputs in systems.items()
    }
    measured = {name: _System(rows, resamples) for name, rows in statistics.items()}
    pairs = list(itertools.combinations(measured, 2))
    found = [_compare(measured[a], measured[b]) for a, b in pairs]
    corrected = holm([p for _, p in found])
    return tuple(
        Difference(
            a, b, delta, p, fair, fair < LEVEL, _randomised(statistics[a], statistics[b], trials=resamples)
        )
        for (a, b), (delta, p), fair in zip(pairs, found, corrected, strict=True)
    )


class _System:
    """A system's scores by seed, on the text and on every resample of its sentences."""

    def __init__(self, statistics: Array, resamples: int) -> None:
        seeds, self.sentences, _ = statistics.shape
        self.scores: Array = corpus_scores(statistics.sum(axis=1))
        flat = statistics.transpose(1, 0, 2).reshape(self.sentences, seeds * 10)
        drawn = [weights @ flat for weights in _draws(self.sentences, resamples)]
        self.resampled: Array = corpus_scores(np.concatenate(drawn).reshape(resamples, seeds, 10))

        self.by_seeds, self.by_seeds_raw = self._seed_variance()

    def _seed_variance(self) -> tuple[float, float]:
        """Variance of the mean over seeds: what sentences do not explain of it, and all that is seen."""
        seeds = len(self.scores)
        if seeds == 1:
            return 0.0, 0.0
        seen = float(self.scores.var(ddof=1))
        by_sentences = float(self.resampled.var(axis=1, ddof=1).mean()) - seen
        return max(0.0, seen - max(0.0, by_sentences)) / seeds, seen / seeds


def _compare(a: _System, b: _System) -> tuple[Interval, float]:
    if a.sentences != b.sentences:
        raise UserError(f"a has {a.sentences} sentences and b {b.sentences}; score both on the same text")
    delta = float(a.scores.mean() - b.scores.mean())
    error, freedom = _standard_error(a.resampled.mean(axis=1) - b.resampled.mean(axis=1), (a, b))
    margin = error * float(student_t.isf(LEVEL / 2, freedom))
    interval = Interval(delta, delta - margin, delta + margin)
    if delta == 0 or a.sentences < 2:
        return interval, 1.0
    p = 2 * float(student_t.sf(abs(delta) / error, freedom)) if error else 0.0
    return interval, p


def _standard_error(resampled: Array, systems: Sequence[_System]) -> tuple[float, float]:
    """Of a score or difference whose resamples are given, and its degrees of freedom (Satterthwaite 1946).

    The variance by sentences counts as known; that by seeds, of n seeds, has n - 1 degrees of freedom.
    """
    variance = float(resampled.var()) + sum(s.by_seeds for s in systems)
    seeds = [(s.by_seeds_raw, len(s.scores) - 1) for s in systems if len(s.scores) > 1]
    doubt = sum(seen**2 / freedom for seen, freedom in seeds)
    if not doubt:
        return math.sqrt(variance), math.inf
    return math.sqrt(variance), max(variance**2 / doubt, min(freedom for _, freedom in seeds))


def _randomised(a: Array, b: Array, *, trials: int) -> float | None:
    return paired_randomisation(a, b, trials=trials) if len(a) == len(b) else None


def _exchanges(sentences: int, trials: int) -> Iterator[Array]:
    """1 where a sentence's translations are exchanged, `[chunk, sentences]`; the same for every pair."""
    random = np.random.default_rng(_EXCHANGE_SEED)
    for start in range(0, trials, _CHUNK):
        rows = min(_CHUNK, trials - start)
        yield random.integers(2, size=(rows, sentences)).astype(np.float64)


def _draws(sentences: int, resamples: int) -> Iterator[Array]:
    """How often each sentence is drawn, `[chunk, sentences]` at a time; the same for every system."""
    random = np.random.default_rng(_DRAW_SEED)
    for start in range(0, resamples, _CHUNK):
        rows = min(_CHUNK, resamples - start)
        drawn = random.integers(sentences, size=(rows, sentences)) + sentences * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * sentences)
        yield counts.reshape(rows, sentences).astype(np.float64)

"""From scores by seed to answers: the mean of each thing compared, the noise, and what is true of each pair.

Arguments called ``values`` are scores on the scale of ``MetricScale``, one for each seed, NaN where a run did
not train.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from normlab.base.metric import Metric
from normlab.judging import statistics
from normlab.judging.difference import Interval
from normlab.judging.sentences import Contender, Standings, of_training

MOST_DIGITS: Final = 8


def digits_for(noise: float | None, scores: Sequence[float]) -> int:
    """Return the decimals of a score: two digits of the noise or, if that is not known, four of the score."""
    largest = max(map(abs, scores), default=0.0)
    if noise:
        digits = 1 - math.floor(math.log10(noise))
    elif largest:
        digits = 3 - math.floor(math.log10(largest))
    else:
        digits = 3
    return min(MOST_DIGITS, max(0, digits))


def mean_of(values: statistics.Array, metric: Metric) -> Interval | None:
    """Return the mean score over the seeds that trained, with its 95% interval; None if none trained."""
    mean, margin = map(float, statistics.mean_margin(values))
    if np.isnan(mean):
        return None
    scale = statistics.MetricScale(metric)
    value, low, high = (float(scale.scores(np.array(end))) for end in (mean, mean - margin, mean + margin))
    return Interval(value) if np.isnan(margin) else Interval(value, low, high)


def noise_of(several: Iterable[statistics.Array], metric: Metric) -> float | None:
    r"""Return the root mean square difference between the scores of two seeds of the same thing.

    It is :math:`\sqrt{2} s`, with the standard deviation s over seeds pooled over ``several`` values; None if
    nothing trained at two seeds.
    """
    pooled = statistics.pooled(values[np.isfinite(values)] for values in several)
    if pooled is None:
        return None
    centre, moved = np.array(pooled.centre), np.array((2 * pooled.variance) ** 0.5)
    return abs(float(statistics.MetricScale(metric).difference(centre, moved)))


def answer_of(
    standings: Standings, contrast: statistics.Contrasts, index: int, values: statistics.Array
) -> dict[str, Any]:
    """Return the fields of a ``Difference`` that say how good the two are when they train, without words.

    ``values`` ``[2, seeds]`` are those of the pair that ``contrast`` has at ``index``.
    """
    common_seeds = int(contrast.common[index])
    if not contrast.given[index]:
        return {"seeds": common_seeds, "answer": "open"}
    delta, margin, p = (float(of_pairs[index]) for of_pairs in (contrast.delta, contrast.margin, contrast.p))
    scale = statistics.MetricScale(standings.headline)
    common = values[:, np.isfinite(values).all(axis=0)]

    def difference_of_scores(on_scale: float) -> float:
        return float(scale.difference(common.mean(), np.array(on_scale)))

    interval = Interval(*map(difference_of_scores, (delta, delta - margin, delta + margin)))
    known = {"seeds": common_seeds, "delta": interval, "p": p}
    if p < statistics.LEVEL:
        return {**known, "answer": "better"}
    if interval.largest <= standings.margin:
        return {**known, "answer": "equal"}
    # It is open: how many seeds would show the difference seen, or the margin if that is larger? Seeds are
    # counted on the scale, where the margin is as large as the scale's slope at these scores says.
    effect, effect_on_scale = abs(interval.value), abs(delta)
    if standings.margin > effect:
        slope = abs(difference_of_scores(1e-3)) / 1e-3
        effect, effect_on_scale = standings.margin, standings.margin / slope
    spread = float(contrast.spread[index])
    if common_seeds < 3:  # two differences say little about their spread, the recipes' own spreads a bit more
        spread = max(spread, float(np.sqrt(common.var(axis=1, ddof=1).sum())))
    # a difference spreads as the root of two recipes' variances, and the effect is in deviations of one
    in_deviations = effect_on_scale * 2**0.5 / spread
    needed = statistics.seeds_needed(len(standings.ranked), in_deviations, len(standings.seeds) + 1)
    return {**known, "answer": "open", "effect": effect, "seeds_needed": needed}


def training_of(a: Contender, b: Contender, pairs: int) -> dict[str, Any]:
    """Return the fields of a ``Difference`` that say how often each of the two trains.

    ``pairs`` is the number of pairs that are compared, by which p is corrected.
    """
    if not a.ended or not b.ended:
        return {}
    counts = (a.trained, a.ended), (b.trained, b.ended)
    p = min(1.0, pairs * statistics.fisher(*counts))
    settles = statistics.seeds_for_shares(*counts, pairs) if p >= statistics.LEVEL else None
    return {"p_trains": p, "trains_sentence": of_training(a, b, p, settles)}

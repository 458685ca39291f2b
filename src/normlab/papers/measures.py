r"""Measures of trained runs, each a frozen dataclass of the cells that it reads: scores, differences between
cells, and how many runs train.

A score is averaged and compared over seeds on a scale without edges (``statistics.MetricScale``), so no
interval leaves the metric's range. A run without a score, such as one that diverged before its first
validation, gets the worst one: papers print such runs as 0 BLEU or as a failure, and leave none out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, dataclass_transform

from normlab.papers.claim import Measure

if TYPE_CHECKING:
    from normlab.papers.studies.trained import Trained

Cells: TypeAlias = str | Sequence[str]
"""A cell, or several, whose mean on the metric's scale is taken."""
C = TypeVar("C", bound=Cells)
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class OfRuns(ABC):
    """A number taken from an artefact's runs. Each subclass is a frozen dataclass."""

    version: ClassVar[int] = 1
    """Raised when the same runs give other numbers, so earlier results are stale."""
    within_seeds: ClassVar[bool] = False
    """Whether it compares cells within seeds; ratios do so on the scale of logarithms."""
    of_gradients: ClassVar[bool] = False
    """Whether it reads gradient norms, which then get their own table."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True)(cls)

    @abstractmethod
    def measure(self, runs: Trained) -> Measure:
        """Take the number."""

    def reads(self) -> frozenset[str]:
        """The cells that it reads."""
        values = [getattr(self, f.name) for f in fields(self) if f.name in ("a", "b", "cell", "cells")]
        values += getattr(self, "pairs", ())
        return frozenset(chain(*([v] if isinstance(v, str) else v for v in values)))

    def content(self) -> dict[str, Any]:
        """Return what it measures, as plain data."""
        own = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        return {"measure": type(self).__name__, "version": self.version, **own}


class _OfTwo(OfRuns, Generic[C]):
    """A comparison of cells within seeds."""

    a: C
    b: C
    within_seeds = True

    def both(self, of: Callable[[C], T]) -> tuple[T, T]:
        return of(self.a), of(self.b)

    def by_seed(self, values: Callable[[C], Iterable[T]]) -> Iterator[tuple[T, T]]:
        return zip(*self.both(values), strict=True)


class _OfMetric(OfRuns):
    """A number taken from a metric of cells."""

    metric: str


class _ScoresOfTwo(_OfTwo[C], _OfMetric):
    """A comparison of a metric of cells, which is the first field."""


class Score(_OfMetric):
    """The mean test score of a cell."""

    cell: str

    def measure(self, runs: Trained) -> Measure:
        return runs.mean_score(self.metric, runs.together(self.metric, self.cell))


class Difference(_ScoresOfTwo[Cells]):
    """The test score of ``a`` minus that of ``b`` within seeds; of several cells, their mean on the scale."""

    def measure(self, runs: Trained) -> Measure:
        return runs.score_difference(self.metric, *self.both(partial(runs.together, self.metric)))


class DifferenceOfTrained(_ScoresOfTwo[str]):
    """``Difference`` over the seeds at which both cells train to the end; open if fewer than two do."""

    def measure(self, runs: Trained) -> Measure:
        kept = [all(seed) for seed in self.by_seed(runs.trained_to_the_end)]
        if sum(kept) < 2:
            return Measure(math.nan, -math.inf, math.inf, sum(kept))
        scores = self.both(lambda cell: runs.together(self.metric, cell)[kept])
        return runs.score_difference(self.metric, *scores)


class DifferenceSize(_ScoresOfTwo[str]):
    """The size of ``Difference`` either way; its interval begins at 0 if the signs of its ends differ."""

    def measure(self, runs: Trained) -> Measure:
        found = Difference(self.metric, self.a, self.b).measure(runs)
        ends = sorted((abs(found.low), abs(found.high)))
        return Measure(abs(found.value), 0.0 if found.low < 0 < found.high else ends[0], ends[1], found.runs)


class BestDifference(_ScoresOfTwo[Sequence[str]]):
    """The best test score of any cell in ``a`` minus that of any in ``b``, within seeds. The best of several
    favours the side that has more cells: a claim uses this only if it works against the claim.
    """

    def measure(self, runs: Trained) -> Measure:
        return runs.score_difference(self.metric, *self.both(partial(runs.best, self.metric)))


class BestScore(_OfMetric):
    """The mean over seeds of the best test score of any cell."""

    cells: Sequence[str]

    def measure(self, runs: Trained) -> Measure:
        return runs.mean_score(self.metric, runs.best(self.metric, self.cells))


class ShareTrained(OfRuns):
    """The share of the runs of some cells that train, with its exact interval (Clopper and Pearson 1934)."""

    cells: Sequence[str]
    to_the_end: ClassVar[bool] = False

    def measure(self, runs: Trained) -> Measure:
        trained = runs.trained_to_the_end if self.to_the_end else runs.trained
        return runs.share([*chain.from_iterable(map(trained, self.cells))])


class ShareTrainedToTheEnd(ShareTrained):
    """``ShareTrained`` of runs that have not collapsed at their last validation, either."""

    to_the_end = True


class ShareBetter(_ScoresOfTwo[str]):
    """The share of seeds at which ``a`` has a better test score than ``times`` that of ``b``, with its exact
    interval. A run that does not train to its end is worse than any that does, so how often and how well a
    recipe trains form one order, and no failed run is in a mean; if neither does, ``a`` is no better.
    ``times`` above 1 asks for more only of a metric of which higher is better, such as BLEU.
    """

    times: float = 1.0
    within_seeds = False

    def measure(self, runs: Trained) -> Measure:
        sign = 1.0 if runs.metric(self.metric).higher_is_better else -1.0

        def ranks(cell: str, factor: float) -> list[tuple[bool, float]]:
            seeds = zip(runs.trained_to_the_end(cell), runs.scores(self.metric, cell), strict=True)
            return [(trained, sign * factor * float(score) if trained else 0.0) for trained, score in seeds]

        both = zip(ranks(self.a, 1.0), ranks(self.b, self.times), strict=True)
        return runs.share([x > y for x, y in both])


class ShareGap(_OfTwo[Sequence[str]]):
    """The share of the runs of ``a`` that train minus that of ``b``, paired in order."""

    within_seeds = False

    def measure(self, runs: Trained) -> Measure:
        return runs.share_gap(*self.both(lambda cells: [*chain.from_iterable(map(runs.trained, cells))]))


class PairsBetter(_OfMetric):
    """The share of pairs (a, b) of cells in which ``a`` has the better test score, over the seeds at which
    both train, with its exact interval; all of 0 to 1 if there are none.
    """

    pairs: Sequence[tuple[str, str]]

    def measure(self, runs: Trained) -> Measure:
        higher, scores = runs.metric(self.metric).higher_is_better, partial(runs.scores, self.metric)
        ahead = [
            bool(x > y if higher else x < y)
            for pair in self.pairs
            for x, y, *both in zip(*map(scores, pair), *map(runs.trained, pair), strict=True)
            if all(both)
        ]
        return runs.share(ahead) if ahead else Measure(0.5, 0.0, 1.0)


class StepsRatio(_OfTwo[str]):
    """The first step at which the NLL of ``a`` on dev is as low as that of ``b`` ever is, over the step at
    which ``b`` is that good, as a geometric mean over seeds. A run of ``a`` that never gets there counts with
    its last step, which is too small, so the interval then has no upper end.
    """

    def measure(self, runs: Trained) -> Measure:
        ratios, arrived = list[float](), True
        for first, second in self.by_seed(partial(runs.on_dev, "nll")):
            step, best = min(second, key=_value)
            reached = next((s for s, nll in first if nll <= best), None)
            ratios.append((reached or first[-1][0]) / step)
            arrived = arrived and reached is not None
        found = runs.mean_ratio(ratios)
        return found if arrived else replace(found, high=math.inf)


class DevAt(_ScoresOfTwo[str]):
    """The dev score of ``a`` minus that of ``b`` after a share of the training, as a mean over seeds."""

    share: float

    def measure(self, runs: Trained) -> Measure:
        curves = self.by_seed(partial(runs.on_dev, self.metric))
        return runs.mean(_at(first, self.share) - _at(second, self.share) for first, second in curves)


class BestOnDev(_ScoresOfTwo[str]):
    """The best dev score of ``a`` in its training minus that of ``b``, as a mean over seeds."""

    def measure(self, runs: Trained) -> Measure:
        best = max if runs.metric(self.metric).higher_is_better else min
        curves = self.by_seed(partial(runs.on_dev, self.metric))
        return runs.mean(best(map(_value, first)) - best(map(_value, second)) for first, second in curves)


class SharePastBest(OfRuns):
    """The share of the runs of some cells whose best dev NLL comes before their last validation, so that more
    steps would not have made them better: a fact about these runs, without an interval.
    """

    cells: Sequence[str]

    def measure(self, runs: Trained) -> Measure:
        curves = [curve for cell in self.cells for curve in runs.on_dev("nll", cell)]
        past = [min(curve, key=_value) != curve[-1] for curve in curves]
        return Measure.exact(sum(past) / len(past))


class SpikesDifference(_OfTwo[str]):
    """The steps after the warm-up with a spike of the gradient norm, in per cent: ``a`` minus ``b``, within
    seeds; open if no run has any.
    """

    version = 2
    of_gradients = True

    def measure(self, runs: Trained) -> Measure:
        spikes = [*self.by_seed(runs.spikes)]
        if not any(map(any, spikes)):
            return Measure(0.0, -math.inf, math.inf, len(spikes))
        return runs.mean(x - y for x, y in spikes)


class GradientRatio(_OfTwo[str]):
    """The median gradient norm of ``a`` after the warm-up over that of ``b``, within seeds."""

    version = 2
    of_gradients = True

    def measure(self, runs: Trained) -> Measure:
        return runs.mean_ratio(x / y for x, y in self.by_seed(runs.median_gradients))


class DisorderedPairs(OfRuns):
    """The number of pairs, among runs that reach at most ``good`` on the headline metric, in which the one
    with the better dev loss has the worse score, each at the validation with its best loss.
    """

    good: float

    def measure(self, runs: Trained) -> Measure:
        headline, ends = runs.metric("").name, list[tuple[float, float]]()
        for cell in runs.cells:
            for losses, scores in zip(runs.on_dev("nll", cell), runs.on_dev(headline, cell), strict=True):
                if losses:
                    step, loss = min(losses, key=_value)
                    ends.append((loss, dict(scores).get(step, 0.0)))
        bad = [one for one in ends if one[1] <= self.good]
        return Measure.exact(float(sum(a[0] < b[0] and a[1] < b[1] for a in bad for b in bad)))


class TrainPerplexityRatio(_OfTwo[str]):
    """The label-smoothed perplexity of ``a`` on its training text over that of ``b``, within seeds, at the
    best weights on dev and without dropout.
    """

    def measure(self, runs: Trained) -> Measure:
        losses = self.by_seed(lambda cell: (model.training_loss() for model in runs.models(cell)))
        return runs.mean_ratio(math.exp(x - y) for x, y in losses)


class ScoreRatio(_ScoresOfTwo[str]):
    """The test score of ``a`` over that of ``b``, within seeds."""

    def measure(self, runs: Trained) -> Measure:
        return runs.mean_ratio(x / y for x, y in self.by_seed(partial(runs.scores, self.metric)))


class RiseRatio(_ScoresOfTwo[Sequence[str]]):
    """The first score in ``a`` over the second, over the same of ``b``, within seeds."""

    def measure(self, runs: Trained) -> Measure:
        scores = partial(runs.scores, self.metric)
        ratios = self.by_seed(lambda two: [x / y for x, y in zip(*map(scores, two), strict=True)])
        return runs.mean_ratio(x / y for x, y in ratios)


class FoldDifference(OfRuns):
    """The largest difference between logits of a run and of its plain form in float32, over the largest
    logit; the largest of all seeds.
    """

    cell: str

    def measure(self, runs: Trained) -> Measure:
        return Measure.exact(max(model.fold_difference() for model in runs.models(self.cell)))


class ConstantRatio(OfRuns):
    """C of Theorem 2 at the best weights on dev over C at initialisation, within seeds (Liu et al. 2020,
    Section 4.2, arXiv 2004.08249).
    """

    cell: str

    def measure(self, runs: Trained) -> Measure:
        return runs.mean_ratio(m.constant_ratio(seed) for seed, m in enumerate(runs.models(self.cell), 1))


class ScaleGrowth(OfRuns):
    """The least-squares slope of ln g by layer, for one kind of sublayer, as a mean over seeds."""

    cell: str
    role: str

    def measure(self, runs: Trained) -> Measure:
        return runs.mean(model.scale_growth(self.role) for model in runs.models(self.cell))


class ScaleRatio(_OfTwo[str]):
    """g in ``a`` over g in ``b``, within seeds: at the ``output``, or its mean over the sublayers in the
    ``late`` third of the decoder.
    """

    where: str

    def measure(self, runs: Trained) -> Measure:
        scales = self.by_seed(lambda cell: (model.scale_at(self.where) for model in runs.models(cell)))
        return runs.mean_ratio(x / y for x, y in scales)


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _at(curve: Sequence[tuple[int, float]], share: float) -> float:
    """Return the value at the last step up to a share of the training."""
    last = curve[-1][0]
    return next(value for step, value in reversed(curve) if step <= share * last or step == curve[0][0])

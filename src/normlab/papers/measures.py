r"""Measures of trained runs, each a frozen dataclass of the cells that it reads: scores, differences between
cells, and how many runs train.

A score is averaged and compared over seeds on a scale without edges (``comparison.scale``), so that no
interval leaves the metric's range. A run without a score, such as one that diverged before its first
validation, has the worst one: papers print such runs as 0 BLEU or as a failure, and leave none out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from normlab.papers.claim import Measure

if TYPE_CHECKING:
    from normlab.papers.studies.trained import Trained

Cells: TypeAlias = str | Sequence[str]
"""A cell, or several of which the mean on the metric's scale is taken."""


@dataclass(frozen=True)
class OfRuns(ABC):
    """A number that is taken from an artefact's runs."""

    version: ClassVar[int] = 1
    """Raised when other numbers come out of the same runs, so that earlier results are stale."""
    within_seeds: ClassVar[bool] = False
    """Whether it compares cells within seeds; ratios do on the scale of logarithms."""
    of_gradients: ClassVar[bool] = False
    """Whether it reads gradient norms, which are then a table of their own."""

    @abstractmethod
    def measure(self, runs: Trained) -> Measure:
        """Take the number."""

    def reads(self) -> frozenset[str]:
        """The cells that it reads."""
        values = [getattr(self, f.name) for f in fields(self) if f.name in ("a", "b", "cell", "cells")]
        values += getattr(self, "pairs", ())
        return frozenset(chain(*([v] if isinstance(v, str) else v for v in values)))

    def content(self) -> dict[str, Any]:
        """What it measures, as plain data."""
        own = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        return {"measure": type(self).__name__, "version": self.version, **own}


@dataclass(frozen=True)
class Score(OfRuns):
    """The mean test score of a cell."""

    metric: str
    cell: str

    def measure(self, runs: Trained) -> Measure:
        of = runs.metric(self.metric)
        return runs.mean_score(of, runs.together(of, self.cell))


@dataclass(frozen=True)
class Difference(OfRuns):
    """The test score of ``a`` minus that of ``b`` within seeds; of several cells their mean on the scale."""

    metric: str
    a: Cells
    b: Cells
    within_seeds = True

    def measure(self, runs: Trained) -> Measure:
        of = runs.metric(self.metric)
        return runs.score_difference(of, *(runs.together(of, cells) for cells in (self.a, self.b)))


@dataclass(frozen=True)
class DifferenceOfTrained(OfRuns):
    """``Difference`` over the seeds at which both cells train to the end; open where fewer than two do."""

    metric: str
    a: str
    b: str
    within_seeds = True

    def measure(self, runs: Trained) -> Measure:
        of, cells = runs.metric(self.metric), (self.a, self.b)
        both = [all(seed) for seed in zip(*map(runs.trained_to_the_end, cells), strict=True)]
        if sum(both) < 2:
            return Measure(math.nan, -math.inf, math.inf, sum(both))
        return runs.score_difference(of, *(runs.together(of, cell)[both] for cell in cells))


@dataclass(frozen=True)
class DifferenceSize(OfRuns):
    """The size of ``Difference`` either way; its interval begins at 0 where the signs of its ends differ."""

    metric: str
    a: str
    b: str
    within_seeds = True

    def measure(self, runs: Trained) -> Measure:
        found = Difference(self.metric, self.a, self.b).measure(runs)
        ends = sorted((abs(found.low), abs(found.high)))
        return Measure(abs(found.value), 0.0 if found.low < 0 < found.high else ends[0], ends[1], found.runs)


@dataclass(frozen=True)
class BestDifference(OfRuns):
    """The best test score of any cell in ``a`` minus that of any in ``b``, within seeds. The best of several
    favours the side that has more cells: such a claim is one that this works against.
    """

    metric: str
    a: Sequence[str]
    b: Sequence[str]
    within_seeds = True

    def measure(self, runs: Trained) -> Measure:
        of = runs.metric(self.metric)
        return runs.score_difference(of, runs.best(of, self.a), runs.best(of, self.b))


@dataclass(frozen=True)
class BestScore(OfRuns):
    """The mean over seeds of the best test score of any cell."""

    metric: str
    cells: Sequence[str]

    def measure(self, runs: Trained) -> Measure:
        of = runs.metric(self.metric)
        return runs.mean_score(of, runs.best(of, self.cells))


@dataclass(frozen=True)
class ShareTrained(OfRuns):
    """The share of the runs of some cells that train, with its exact interval (Clopper and Pearson 1934)."""

    cells: Sequence[str]

    def measure(self, runs: Trained) -> Measure:
        return runs.share([one for cell in self.cells for one in runs.trained(cell)])


@dataclass(frozen=True)
class ShareTrainedToTheEnd(OfRuns):
    """The share of the runs of some cells that train and have not collapsed at their last validation, with
    its exact interval. ``ShareTrained`` looks at the best checkpoint alone.
    """

    cells: Sequence[str]

    def measure(self, runs: Trained) -> Measure:
        return runs.share([one for cell in self.cells for one in runs.trained_to_the_end(cell)])


@dataclass(frozen=True)
class ShareBetter(OfRuns):
    """The share of seeds at which ``a`` has the better test score, with its exact interval. A run that does
    not train to its end is worse than any that does, so that how often and how well a recipe trains are in
    one order and no failed run is in a mean; where neither does, ``a`` is not the better one.
    """

    metric: str
    a: str
    b: str

    def measure(self, runs: Trained) -> Measure:
        of = runs.metric(self.metric)
        sign = 1.0 if of.higher_is_better else -1.0
        first, second = (
            [
                (trained, sign * float(score) if trained else 0.0)
                for trained, score in zip(runs.trained_to_the_end(c), runs.scores(of, c), strict=True)
            ]
            for c in (self.a, self.b)
        )
        return runs.share([x > y for x, y in zip(first, second, strict=True)])


@dataclass(frozen=True)
class Edge(OfRuns):
    """The largest of rising ``rates`` up to which each seed trains to its end, its mean over seeds; ``cells``
    are those of the rates, and 0 is counted for a seed that does not train at the first.
    """

    cells: Sequence[str]
    rates: Sequence[float]

    def measure(self, runs: Trained) -> Measure:
        return runs.mean(runs.edges(self.cells, self.rates))


@dataclass(frozen=True)
class EdgeRatio(OfRuns):
    """The edge of the cells ``a`` over that of the cells ``b``, within seeds. An edge of ``b`` below the grid
    counts as its first rate, which is more; one of ``a`` leaves the ratio open.
    """

    a: Sequence[str]
    b: Sequence[str]
    rates: Sequence[float]
    within_seeds = True

    def measure(self, runs: Trained) -> Measure:
        first, second = runs.edges(self.a, self.rates), runs.edges(self.b, self.rates)
        if min(first) == 0:
            return Measure(0.0, 0.0, math.inf, len(first))
        return runs.mean_ratio(x / max(y, self.rates[0]) for x, y in zip(first, second, strict=True))


@dataclass(frozen=True)
class ShareGap(OfRuns):
    """The share of the runs of the cells ``a`` that train minus that of ``b``, which are paired in order; its
    interval is that of ``comparison.trains.share_gap``.
    """

    a: Sequence[str]
    b: Sequence[str]

    def measure(self, runs: Trained) -> Measure:
        first, second = ([one for c in cells for one in runs.trained(c)] for cells in (self.a, self.b))
        return runs.share_gap(first, second)


@dataclass(frozen=True)
class PairsBetter(OfRuns):
    """The share of pairs (a, b) of cells in which ``a`` has the better test score, of the seeds at which both
    train, with its exact interval; all of 0 to 1 where there are none.
    """

    metric: str
    pairs: Sequence[tuple[str, str]]

    def measure(self, runs: Trained) -> Measure:
        of = runs.metric(self.metric)
        ahead = [
            bool(x > y if of.higher_is_better else x < y)
            for a, b in self.pairs
            for x, y, *both in zip(
                *(runs.scores(of, c) for c in (a, b)), *map(runs.trained, (a, b)), strict=True
            )
            if all(both)
        ]
        return runs.share(ahead) if ahead else Measure(0.5, 0.0, 1.0)


@dataclass(frozen=True)
class StepsRatio(OfRuns):
    """The first step at which ``a`` is as good on dev as ``b`` ever is, over the step at which ``b`` is that
    good; its geometric mean over seeds. A run ``a`` that never gets there counts with its last step, which is
    less than its ratio, so that the interval then has no upper end.
    """

    a: str
    b: str
    metric: str = "nll"
    within_seeds = True

    def measure(self, runs: Trained) -> Measure:
        sign = 1.0 if runs.metric(self.metric).higher_is_better else -1.0
        ratios, arrived = list[float](), True
        for first, second in runs.curves_of(self.metric, self.a, self.b):
            step, best = max(second, key=lambda one: sign * one[1])
            reached = next((s for s, value in first if sign * value >= sign * best), None)
            ratios.append((reached or first[-1][0]) / step)
            arrived = arrived and reached is not None
        found = runs.mean_ratio(ratios)
        return found if arrived else replace(found, high=math.inf)


@dataclass(frozen=True)
class DevAt(OfRuns):
    """The dev score of ``a`` minus that of ``b`` after a share of the training, its mean over seeds."""

    metric: str
    a: str
    b: str
    share: float
    within_seeds = True

    def measure(self, runs: Trained) -> Measure:
        both = runs.curves_of(self.metric, self.a, self.b)
        return runs.mean(_at(first, self.share) - _at(second, self.share) for first, second in both)


@dataclass(frozen=True)
class SpikesDifference(OfRuns):
    """The steps with a spike of the gradient norm, in per cent: ``a`` minus ``b``, within seeds."""

    a: str
    b: str
    within_seeds = of_gradients = True

    def measure(self, runs: Trained) -> Measure:
        return runs.mean(x - y for x, y in zip(runs.spikes(self.a), runs.spikes(self.b), strict=True))


@dataclass(frozen=True)
class GradientRatio(OfRuns):
    """The median gradient norm of ``a`` over that of ``b``, within seeds."""

    a: str
    b: str
    within_seeds = of_gradients = True

    def measure(self, runs: Trained) -> Measure:
        both = zip(runs.median_gradients(self.a), runs.median_gradients(self.b), strict=True)
        return runs.mean_ratio(first / second for first, second in both)


@dataclass(frozen=True)
class DisorderedPairs(OfRuns):
    """The number of pairs of runs that reach at most ``good`` on the metric, of which the one with the better
    dev loss has the worse score, at the validation with its best loss.
    """

    good: float
    metric: str = ""

    def measure(self, runs: Trained) -> Measure:
        of = runs.metric(self.metric)
        ends = []
        for cell in runs.cells:
            for losses, scores in zip(runs.on_dev("nll", cell), runs.on_dev(of.name, cell), strict=True):
                if losses:
                    step, loss = min(losses, key=lambda one: one[1])
                    ends.append((loss, dict(scores).get(step, 0.0)))
        bad = [one for one in ends if one[1] <= self.good]
        return Measure.exact(float(sum(a[0] < b[0] and a[1] < b[1] for a in bad for b in bad)))


@dataclass(frozen=True)
class TrainPerplexityRatio(OfRuns):
    """The label-smoothed perplexity of ``a`` on its training text over that of ``b``, within seeds, at the
    best weights on dev and without dropout.
    """

    a: str
    b: str
    within_seeds = True

    def measure(self, runs: Trained) -> Measure:
        both = zip(runs.training_losses(self.a), runs.training_losses(self.b), strict=True)
        return runs.mean_ratio(math.exp(x - y) for x, y in both)


@dataclass(frozen=True)
class ScoreRatio(OfRuns):
    """The test score of ``a`` over that of ``b``, within seeds."""

    metric: str
    a: str
    b: str
    within_seeds = True

    def measure(self, runs: Trained) -> Measure:
        of = runs.metric(self.metric)
        both = zip(runs.scores(of, self.a), runs.scores(of, self.b), strict=True)
        return runs.mean_ratio(x / y for x, y in both)


@dataclass(frozen=True)
class FoldDifference(OfRuns):
    """The largest difference of two logits of a run and of its plain form in float32, over the largest logit;
    the largest of all seeds.
    """

    cell: str

    def measure(self, runs: Trained) -> Measure:
        return Measure.exact(max(runs.fold_differences(self.cell)))


@dataclass(frozen=True)
class ConstantRatio(OfRuns):
    """C of Theorem 2 at the best weights on dev over C at initialisation, within seeds (Liu et al. 2020,
    Section 4.2, arXiv 2004.08249).
    """

    cell: str

    def measure(self, runs: Trained) -> Measure:
        return runs.mean_ratio(runs.constant_ratios(self.cell))


def _at(curve: Sequence[tuple[int, float]], share: float) -> float:
    """The value at the last step up to a share of the training."""
    last = curve[-1][0]
    return next(value for step, value in reversed(curve) if step <= share * last or step == curve[0][0])

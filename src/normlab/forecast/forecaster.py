"""The forecaster: the probability that a training succeeds, and the learning rate up to which it does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normlab.errors import UserError

Features = Mapping[str, float]
Array = NDArray[np.float64]
LEAF: Final = -1
"""In the place of a feature's index: the node is a leaf."""
MARGIN: Final = 0.5
"""How far a feature may lie outside of what was seen, in deviations of it."""
FEW: Final = 2
"""So many features may lie outside: the trees take them for the nearest that was seen."""
LEAST: Final = 1e-3


class Tree(NamedTuple):
    """A binary tree in columns, one entry a node, the root first."""

    feature: Sequence[int]
    """Index of the feature that is compared, or ``LEAF``."""
    threshold: Sequence[float]
    left: Sequence[int]
    """The next node where the feature is at most the threshold."""
    right: Sequence[int]
    p: Sequence[float]
    """The share of the runs in a node that trained."""

    def leaves(self, x: Array) -> NDArray[np.int64]:
        """Return the leaf of each row of features `[N, F]`."""
        feature, threshold = np.array(self.feature), np.array(self.threshold)
        left, right = np.array(self.left), np.array(self.right)
        at = np.zeros(len(x), dtype=np.int64)
        while (inner := feature[at] != LEAF).any():
            here = at[inner]
            below = x[inner, feature[here]] <= threshold[here]
            at[inner] = np.where(below, left[here], right[here])
        return at


@dataclass(frozen=True)
class Outside:
    """A feature that lies outside of what the forecaster has seen."""

    name: str
    value: float
    low: float
    high: float
    """The smallest and the largest value that were seen."""


@dataclass(frozen=True)
class Forecaster:
    r"""A forest of randomised trees: :math:`P = \frac{1}{T} \sum_t p_t`, where :math:`p_t` is the share of
    runs that trained in the leaf of tree t (Geurts et al. 2006, Machine Learning 63).

    What was not measured counts as its median.
    """

    feature_version: int
    names: Sequence[str]
    """The features, in the order of the trees' indices."""
    median: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    """The smallest and the largest value of each feature."""
    spread: Sequence[float]
    """The standard deviation of each."""
    trees: Sequence[Tree]
    card: Mapping[str, Any] = field(default_factory=dict)
    """What it was fitted on, and how good it is."""

    def matrix(self, rows: Sequence[Features]) -> Array:
        """Return the features of some runs `[N, F]` in the order of the trees."""
        return matrix(rows, self.names, self.median)

    def probabilities(self, rows: Sequence[Features]) -> Array:
        """Return the probabilities `[N]` that trainings succeed."""
        x = self.matrix(rows)
        return np.mean([np.array(tree.p)[tree.leaves(x)] for tree in self.trees], axis=0)

    def probability(self, features: Features) -> float:
        """Return the probability that a training succeeds."""
        return float(self.probabilities([features])[0])

    def outside(self, features: Features) -> list[Outside]:
        """Return the features that lie outside of what was seen, by more than ``MARGIN`` deviations."""
        ends = zip(self.names, self.low, self.high, self.spread, strict=True)
        return [
            Outside(name, features[name], low, high)
            for name, low, high, spread in ends
            if name in features
            and not -MARGIN * spread <= features[name] - low <= high - low + MARGIN * spread
        ]

    def abstains(self, features: Features) -> bool:
        """Whether too many features lie outside of what was seen."""
        return len(self.outside(features)) > FEW

    def nearness(self, features: Features, runs: Sequence[Features]) -> Array:
        """Return the share of trees `[N]` in which each of some runs is in the same leaf as these features:
        the runs that a probability rests on.
        """
        one, many = self.matrix([features]), self.matrix(runs)
        return np.mean([tree.leaves(many) == tree.leaves(one) for tree in self.trees], axis=0)

    def ceiling(self, swept: Mapping[float, Features]) -> float | None:
        """Return the largest learning rate at which a training is as likely to succeed as not, given the
        features at some rates; None where that is so of none of them, or of the largest one. Between two
        rates the logarithm of the odds is taken to be linear in that of the rate.
        """
        rates = sorted(swept)
        p = np.clip(self.probabilities([swept[lr] for lr in rates]), LEAST, 1 - LEAST)
        odds = np.log(p / (1 - p))
        last = max((i for i, logit in enumerate(odds) if logit >= 0), default=len(rates))
        if last >= len(rates) - 1:
            return None
        share = float(odds[last] / (odds[last] - odds[last + 1]))
        return rates[last] * (rates[last + 1] / rates[last]) ** share

    def to_json(self) -> str:
        """Return it as JSON, a line for each column of a tree, to be read again by ``load``."""
        content = asdict(self) | {"trees": [tree._asdict() for tree in self.trees]}
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace(
            '{"feature"', '\n{"feature"'
        )


def load(path: Path, *, feature_version: int) -> Forecaster:
    """Read a forecaster. Raises UserError where it is of another version of the features."""
    content = json.loads(path.read_text(encoding="utf-8"))
    found = content["feature_version"]
    if found != feature_version:
        raise UserError(
            f"{path} is of version {found} of the features, and this normlab measures version "
            f"{feature_version}; fit the forecaster again"
        )
    trees = [Tree(**tree) for tree in content.pop("trees")]
    return Forecaster(**content, trees=trees)


def matrix(rows: Sequence[Features], names: Sequence[str], otherwise: Sequence[float] | None = None) -> Array:
    """Return the features of some runs `[N, F]`, with these values for what was not measured, or NaN."""
    fill = otherwise or [math.nan] * len(names)
    ends = list(zip(names, fill, strict=True))
    return np.array([[row.get(name, value) for name, value in ends] for row in rows], dtype=np.float64)

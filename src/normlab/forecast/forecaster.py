"""The forecaster: the probability that a training succeeds, and the learning rate up to which it does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from normlab.errors import UserError

Features = Mapping[str, float]
Array = NDArray[np.float64]
BY_RATE: Final = ("critical", "sharpness", "update", "largest_update", "way", "lr")
"""Features that are the decimal logarithm of something proportional to the learning rate."""


@dataclass(frozen=True)
class Curve:
    r"""A logistic curve :math:`\sigma(b + \sum_j w_j z_j)` of standardised features."""

    bias: float
    weights: Mapping[str, float]

    def logit(self, z: Features) -> float:
        """Return the logarithm of the odds."""
        return self.bias + sum(weight * z[name] for name, weight in self.weights.items())


@dataclass(frozen=True)
class Forecaster:
    r""":math:`P = \sigma_u \sigma_l`: the probability that the learning rate is not too large, times the one
    that it is not too small for the budget.

    Both are logistic in the same features, standardised; what was not measured counts as their mean.
    """

    feature_version: int
    centre: Mapping[str, float]
    scale: Mapping[str, float]
    upper: Curve
    lower: Curve
    card: Mapping[str, Any] = field(default_factory=dict)
    """What it was fitted on."""

    def standardised(self, features: Features) -> dict[str, float]:
        """Return the features in deviations from their means; 0 for one that is not there."""
        return {
            name: (features[name] - centre) / self.scale[name] if name in features else 0.0
            for name, centre in self.centre.items()
        }

    def probability(self, features: Features) -> float:
        """Return the probability that the training succeeds."""
        z = self.standardised(features)
        return _sigmoid(self.upper.logit(z)) * _sigmoid(self.lower.logit(z))

    def bearable(self, features: Features) -> float:
        """Return the probability that the learning rate is not too large."""
        return _sigmoid(self.upper.logit(self.standardised(features)))

    def ceiling(self, swept: Mapping[float, Features]) -> float | None:
        """Return the learning rate up to which it is as likely bearable as not, given the features at some
        rates; None where that is so of none or of all of them. Between two rates the logarithm of the odds is
        taken to be linear in that of the rate; after the first rate that is too large no other counts.
        """
        rates = sorted(swept)
        odds = [self.upper.logit(self.standardised(swept[lr])) for lr in rates]
        high = next((i for i, logit in enumerate(odds) if logit < 0), 0)
        if not high:
            return None
        share = odds[high - 1] / (odds[high - 1] - odds[high])
        return rates[high - 1] * (rates[high] / rates[high - 1]) ** share

    def to_json(self) -> str:
        """Return it as JSON, to be read again by ``load``."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)


def load(path: Path, *, feature_version: int) -> Forecaster:
    """Read a forecaster. Raises UserError where it is of another version of the features."""
    content = json.loads(path.read_text(encoding="utf-8"))
    found = content["feature_version"]
    if found != feature_version:
        raise UserError(
            f"{path} is of version {found} of the features, and this normlab measures version "
            f"{feature_version}; fit the forecaster again"
        )
    upper, lower = (Curve(**content.pop(name)) for name in ("upper", "lower"))
    return Forecaster(**content, upper=upper, lower=lower)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -500 else 0.0


def matrix(rows: Sequence[Features], names: Sequence[str]) -> Array:
    """Return the features of some runs `[N, F]`, NaN for what was not measured."""
    return np.array([[row.get(name, math.nan) for name in names] for row in rows], dtype=np.float64)

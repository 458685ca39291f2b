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
EVEN: Final = 0.5


@dataclass(frozen=True)
class Curve:
    r"""A logistic curve :math:`\sigma(b + \sum_j w_j z_j)` of standardised features."""

    bias: float
    weights: Mapping[str, float]

    def logit(self, z: Features) -> float:
        """Return the logarithm of the odds."""
        return self.bias + sum(weight * z[name] for name, weight in self.weights.items())

    def slope(self, scale: Features) -> float:
        """Return how much the logit changes when the learning rate is ten times as large."""
        return sum(weight / scale[name] for name, weight in self.weights.items() if name in BY_RATE)


@dataclass(frozen=True)
class Forecaster:
    r""":math:`P = \sigma_u \sigma_l`: the probability that the learning rate is not too large, times the one
    that it is not too small for the budget.

    Both are logistic in the same features, standardised; what was not measured counts as their mean. The
    learning rate enters by features that are proportional to it.
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

    def at_rate(self, features: Features, factor: float) -> dict[str, float]:
        """Return the features at so many times the learning rate."""
        shift = math.log10(factor)
        return {name: x + shift * (name in BY_RATE) for name, x in features.items()}

    def ceiling(self, features: Features) -> float | None:
        """Return the factor of the learning rate at which it is as likely too large as not; None where the
        curve does not fall with the rate.
        """
        slope = self.upper.slope(self.scale)
        return None if slope >= 0 else 10 ** (-self.upper.logit(self.standardised(features)) / slope)

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

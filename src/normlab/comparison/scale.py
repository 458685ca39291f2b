r"""Scales without edges, on which scores of different seeds are averaged and compared.

A score between two ends goes through the logit, one above a least value through the logarithm, one without
ends stays as it is. What is found there is carried back, so that no interval leaves the metric's range. A
score at an end is taken as half a unit of the last digit that its metric shows away from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit, logit

from normlab.config.metric import Metric

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Scale:
    """The scale of a metric, see above."""

    metric: Metric

    def values(self, scores: Array) -> Array:
        """Return scores on the scale."""
        low, high, edge = self.metric.least, self.metric.most, 0.5 * 10.0**-self.metric.digits
        if low is not None and high is not None:
            return logit((np.clip(scores, low + edge, high - edge) - low) / (high - low))
        if low is not None:
            return np.log(np.maximum(scores - low, edge))
        return scores if high is None else -np.log(np.maximum(high - scores, edge))

    def scores(self, values: Array) -> Array:
        """Return values of the scale as scores."""
        low, high = self.metric.least, self.metric.most
        if low is not None and high is not None:
            return low + (high - low) * expit(values)
        if low is not None:
            return low + np.exp(values)
        return values if high is None else high - np.exp(-values)

    def difference(self, centre: Array, delta: Array) -> Array:
        """Return a difference of two values as that of their scores, where ``centre`` is halfway between the
        two.
        """
        return self.scores(centre + delta / 2) - self.scores(centre - delta / 2)

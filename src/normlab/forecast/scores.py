"""How good probabilities are: how they rank, how far they are off, and whether they mean what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Array: TypeAlias = NDArray[np.float64]
Score: TypeAlias = Callable[[Array, Array], float]

BINS: Final = 10
LEAST: Final = 1e-6
"""A probability is kept so far from 0 and 1, where the logarithm of a miss is infinite."""
RESAMPLES: Final = 500


def auroc(p: Array, happened: Array) -> float:
    """Return the probability that what happened had a larger p than what did not, ties counting half; NaN
    where all or none happened. Hanley and McNeil 1982 (Radiology 143).
    """
    positive = happened.astype(bool)
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return float("nan")
    return float((rankdata(p)[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def brier(p: Array, happened: Array) -> float:
    """Return the mean square of p minus what happened. Brier 1950 (Monthly Weather Review 78)."""
    return float(np.mean((p - happened) ** 2))


def log_loss(p: Array, happened: Array) -> float:
    """Return the mean negative log-likelihood, in nats."""
    p = np.clip(p, LEAST, 1 - LEAST)
    return float(-np.mean(happened * np.log(p) + (1 - happened) * np.log(1 - p)))


@dataclass(frozen=True)
class Bin:
    """Forecasts of about the same probability."""

    count: int
    forecast: float
    happened: float


def reliability(p: Array, happened: Array, bins: int = BINS) -> list[Bin]:
    """Return, by equal intervals of p that hold any, their mean p and the share of what happened."""
    place = np.minimum((p * bins).astype(int), bins - 1)
    found = []
    for i in range(bins):
        there = place == i
        if there.any():
            found.append(Bin(int(there.sum()), float(p[there].mean()), float(happened[there].mean())))
    return found


def ece(p: Array, happened: Array, bins: int = BINS) -> float:
    r"""Return the expected calibration error :math:`\sum_b \frac{n_b}{n} |\bar p_b - \bar y_b|` of bins of
    equal width. Naeini et al. 2015 (AAAI 29).
    """
    rows = reliability(p, happened, bins)
    return sum(row.count * abs(row.forecast - row.happened) for row in rows) / len(p)


SCORES: Final[dict[str, Score]] = {"AUROC": auroc, "Brier": brier, "log loss": log_loss, "ECE": ece}


def interval(
    score: Score, p: Array, happened: Array, groups: Sequence[str], *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Return the percentiles of a score over resamples of whole groups, such as all runs of a model, which
    are not independent of each other.
    """
    members = [np.flatnonzero(np.array(groups) == name) for name in dict.fromkeys(groups)]
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(RESAMPLES):
        some = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        found.append(score(p[some], happened[some]))
    low, high = np.nanquantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def risk_coverage(p: Array, happened: Array) -> list[tuple[float, float]]:
    """Return, from the surest forecast on, the share that is answered and the share of these that is wrong,
    where an answer is whether p is above one half. El-Yaniv and Wiener 2010 (JMLR 11).
    """
    order = np.argsort(-np.abs(p - 0.5), kind="stable")
    wrong = (p[order] > 0.5) != happened[order].astype(bool)
    answered = np.arange(1, len(p) + 1)
    return [(float(n / len(p)), float(w / n)) for n, w in zip(answered, np.cumsum(wrong), strict=True)]

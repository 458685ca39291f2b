"""Losses in plain Python: slow and obvious."""

from __future__ import annotations

import math

from numpy import ndarray as Array


def label_smoothed(
    scores: Array, target: list[int], smoothing: float, allowed: list[bool]
) -> tuple[float, float]:
    """Loss and negative log-likelihood summed over the tokens of `[T, V]` scores; target 0 is padding."""
    loss = nll = 0.0
    kinds = [v for v, ok in enumerate(allowed) if ok]
    for row, y in zip(scores, target, strict=True):
        if y == 0:
            continue
        total = math.log(sum(math.exp(row[v]) for v in kinds))
        log_p = {v: row[v] - total for v in kinds}
        nll -= log_p[y]
        loss -= (1 - smoothing) * log_p[y] + smoothing * sum(log_p.values()) / len(kinds)
    return loss, nll

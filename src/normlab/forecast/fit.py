"""Fit a forecaster to runs, by penalised maximum likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from normlab.forecast.forecaster import BY_RATE, Array, Curve, Features, Forecaster, matrix

PENALTY: Final = 3.0
"""Weight of the squared coefficients beside the log-likelihood of all runs."""
LOWER: Final = ("way", "update", "steps", "warmup_share", "sublayers", "loss", "lr", "layers", "width")
"""Features that may say that a budget is too small."""
LEAST: Final = 1e-3


def fit(
    rows: Sequence[Features],
    trained: Sequence[bool],
    names: Sequence[str],
    *,
    penalty: float = PENALTY,
    feature_version: int = 0,
    card: Mapping[str, Any] | None = None,
) -> Forecaster:
    r"""Maximise :math:`\sum_i \ln P(y_i) - \frac{\lambda}{2} (\|w_u\|^2 + \|w_l\|^2)` over both curves of a
    forecaster; biases are free. Features that are proportional to the learning rate can only lower the upper
    curve and raise the lower one.
    """
    x, y = matrix(rows, names), np.array(trained, dtype=np.float64)
    centre = np.nanmean(x, axis=0)
    scale = np.maximum(np.nanstd(x, axis=0), LEAST)
    z = np.where(np.isnan(x), 0.0, (x - centre) / scale)
    low = [i for i, name in enumerate(names) if name in LOWER]
    start = np.zeros(2 + len(names) + len(low))
    start[:2] = 1.0, 3.0
    signs = [(None, 0.0) if name in BY_RATE else (None, None) for name in names]
    signs += [(0.0, None) if names[i] in BY_RATE else (None, None) for i in low]
    bounds = [(None, None)] * 2 + signs
    given = (z, z[:, low], y, penalty)
    found = minimize(_loss, start, args=given, jac=True, method="L-BFGS-B", bounds=bounds)
    split = 2 + len(names)
    upper = Curve(float(found.x[0]), dict(zip(names, map(float, found.x[2:split]), strict=True)))
    lower = Curve(float(found.x[1]), {names[i]: float(w) for i, w in zip(low, found.x[split:], strict=True)})
    return Forecaster(
        feature_version,
        dict(zip(names, map(float, centre), strict=True)),
        dict(zip(names, map(float, scale), strict=True)),
        upper,
        lower,
        card or {},
    )


def _loss(w: Array, zu: Array, zl: Array, y: Array, penalty: float) -> tuple[float, Array]:
    """The penalised negative log-likelihood and its gradient."""
    split = 2 + zu.shape[1]
    u, v = expit(w[0] + zu @ w[2:split]), expit(w[1] + zl @ w[split:])
    p = np.clip(u * v, 1e-12, 1 - 1e-12)
    value = -np.sum(y * np.log(p) + (1 - y) * np.log1p(-p)) + penalty / 2 * np.sum(w[2:] ** 2)
    by_p = (p - y) / (1 - p)  # times dp/p
    du, dv = by_p * (1 - u), by_p * (1 - v)
    gradient = np.concatenate([[du.sum(), dv.sum()], zu.T @ du, zl.T @ dv])
    gradient[2:] += penalty * w[2:]
    return float(value), gradient

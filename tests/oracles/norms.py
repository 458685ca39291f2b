"""Oracles of the norms: slow and obvious forms written from the published equations.

Every function takes one sentence ``x`` of shape ``[T, D]`` and a bundle ``p`` of parameters, and works on
real or complex arrays, so that a complex step can be sent through it.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import erf

Bundle = dict[str, np.ndarray]
Norm = Callable[[np.ndarray, Bundle], np.ndarray]

LAYERNORM_EPS = 1e-5
RMSNORM_EPS = 1e-6
SCALENORM_CLAMP = 1e-5


def layernorm(x: np.ndarray, p: Bundle) -> np.ndarray:
    """gamma * (x - mean) / sqrt(var + 1e-5) + beta, with the population variance of each row.

    Ba et al. 2016 (arXiv 1607.06450).
    """
    rows = []
    for row in x:
        centred = row - row.sum() / row.size
        variance = (centred * centred).sum() / row.size
        rows.append(p["gamma"] * centred / np.sqrt(variance + LAYERNORM_EPS) + p["beta"])
    return np.stack(rows)


def rmsnorm(x: np.ndarray, p: Bundle) -> np.ndarray:
    """g * x / sqrt(mean(x^2) + 1e-6).

    Zhang and Sennrich 2019 (arXiv 1910.07467).
    """
    rows = []
    for row in x:
        rows.append(p["g"] * row / np.sqrt((row * row).sum() / row.size + RMSNORM_EPS))
    return np.stack(rows)


def rmsnorm_zero_centred(x: np.ndarray, p: Bundle) -> np.ndarray:
    """(1 + w) * x / sqrt(mean(x^2) + 1e-6). Gemma Team 2024 (arXiv 2403.08295)."""
    return rmsnorm(x, {"g": 1.0 + p["w"]})


def rmsnorm_gain_free(x: np.ndarray, p: Bundle) -> np.ndarray:
    """x / sqrt(mean(x^2) + 1e-6), as in nanochat."""
    del p
    return rmsnorm(x, {"g": np.ones(x.shape[1])})


def _unit_rows(x: np.ndarray) -> np.ndarray:
    """x / max(||x||, 1e-5) of each row."""
    rows = []
    for row in x:
        length = np.sqrt((row * row).sum())
        if np.real(length) < SCALENORM_CLAMP:
            length = SCALENORM_CLAMP
        rows.append(row / length)
    return np.stack(rows)


def scalenorm(x: np.ndarray, p: Bundle) -> np.ndarray:
    """g * x / max(||x||, 1e-5), one g for all channels.

    Nguyen and Salazar 2019, Section 2.3 (arXiv 1910.05895).
    """
    return p["g"][0] * _unit_rows(x)


def scalenorm_fixed(x: np.ndarray, p: Bundle) -> np.ndarray:
    """sqrt(d) * x / max(||x||, 1e-5), nothing trained; the final norm of a stack is a trained ScaleNorm.

    Nguyen and Salazar 2019, Table 7 (arXiv 1910.05895).
    """
    del p
    return np.sqrt(x.shape[1]) * _unit_rows(x)


def dyt(x: np.ndarray, p: Bundle) -> np.ndarray:
    """gamma * tanh(alpha * x) + beta.

    Zhu et al. 2025 (arXiv 2503.10622).
    """
    return p["gamma"] * np.tanh(p["alpha"][0] * x) + p["beta"]


def derf(x: np.ndarray, p: Bundle) -> np.ndarray:
    """gamma * erf(alpha * x + s) + beta.

    Chen et al. 2025 (arXiv 2512.10938).
    """
    return p["gamma"] * erf(p["alpha"][0] * x + p["s"][0]) + p["beta"]


NORMS: dict[str, Norm] = {
    "layernorm": layernorm,
    "rmsnorm": rmsnorm,
    "rmsnorm_zero_centred": rmsnorm_zero_centred,
    "rmsnorm_gain_free": rmsnorm_gain_free,
    "scalenorm": scalenorm,
    "scalenorm_fixed": scalenorm_fixed,
    "dyt": dyt,
    "derf": derf,
}

STARTS: dict[str, Callable[[int], Bundle]] = {
    "layernorm": lambda dim: {"gamma": np.ones(dim), "beta": np.zeros(dim)},
    "rmsnorm": lambda dim: {"g": np.ones(dim)},
    "rmsnorm_zero_centred": lambda dim: {"w": np.zeros(dim)},
    "rmsnorm_gain_free": lambda dim: {},
    "scalenorm": lambda dim: {"g": np.array([np.sqrt(dim)])},
    "scalenorm_fixed": lambda dim: {},
    "dyt": lambda dim: {"gamma": np.ones(dim), "beta": np.zeros(dim), "alpha": np.array([0.5])},
    "derf": lambda dim: {
        "gamma": np.ones(dim),
        "beta": np.zeros(dim),
        "alpha": np.array([0.5]),
        "s": np.array([0.0]),
    },
}

FINAL: dict[str, str] = {name: name for name in NORMS} | {"scalenorm_fixed": "scalenorm"}

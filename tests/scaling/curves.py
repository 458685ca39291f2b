"""Losses by rate at several sizes, drawn around optima that are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from normlab.scaling.optimum import Losses

Shape = Callable[[np.ndarray], np.ndarray]
OCTAVES = np.arange(-12.0, 13.0)


def skewed(skew: float, height: float = 0.03) -> Shape:
    """A minimum at 0 with the second derivative 2 · height, that rises faster to the right."""

    def at(u: np.ndarray) -> np.ndarray:
        return 2 * height * (np.expm1(skew * u) - skew * u) / skew**2

    return at


def bent(u: np.ndarray) -> np.ndarray:
    """Almost linear to the left, cubic to the right: no member of the family that is fitted."""
    return 0.05 * u**2 * np.where(u < 0, 1 / (1 + 0.25 * np.abs(u)), 1 + 0.5 * u)


def kinked(u: np.ndarray) -> np.ndarray:
    """Two straight lines, steeper to the right."""
    return 0.1 * np.abs(u) * np.where(u < 0, 0.5, 2.0)


def cliff(u: np.ndarray) -> np.ndarray:
    """A quadratic whose rates more than 1.6 octaves too high diverge."""
    return np.where(u > 1.6, np.inf, 0.03 * u**2)


def drifting(first: float, last: float, sizes: int = 4) -> list[Shape]:
    """Minima whose skew changes with the size."""
    return [skewed(float(skew)) for skew in np.linspace(first, last, sizes)]


def draw(
    optima: Sequence[float],
    shape: Shape | Sequence[Shape],
    noise: float,
    *,
    rng: np.random.Generator,
    seeds: int = 2,
    growth: float = 1.0,
) -> dict[int, Losses]:
    """Losses at five octaves about the one that is best with the first seed, as trials take them; the shape
    is that of all sizes, or of each.

    Seeds differ by a constant, and heights by a fifth between sizes. More than half an octave above the
    optimum noise is larger by ``growth``.
    """
    curves, shapes = dict[int, Losses](), [shape] * len(optima) if callable(shape) else shape
    for i, (optimum, own_shape) in enumerate(zip(optima, shapes, strict=True)):
        height = np.exp(0.2 * rng.normal())
        apart, spread = OCTAVES - optimum, noise * np.where(optimum + 0.5 < OCTAVES, growth, 1.0)
        own = [
            height * own_shape(apart) + spread * rng.normal(size=OCTAVES.size) + 0.1 * rng.normal()
            for _ in range(seeds)
        ]
        best = int(np.argmin(own[0]))
        curves[64 * 2**i] = {
            (float(OCTAVES[k]), seed): float(own[seed][k])
            for k in range(best - 2, best + 3)
            for seed in range(seeds)
        }
    return curves

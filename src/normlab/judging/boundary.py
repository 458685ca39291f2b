r"""How large t must be after each seed, so that looking after every seed costs nothing in error.

A one-sided paired t test is made after each seed from the third on. Its critical values are those of an
alpha-spending function (Lan and DeMets 1983): the chance that t exceeds its critical value for the first time
after seed :math:`m`, if there is no difference, is

.. math:: \alpha\,(u_{m-1} - u_m), \qquad u_m = (1 - \rho)^{m - 2}, \quad u_2 = 1,

so that all chances together are at most :math:`\alpha`, however many seeds there are: each look spends the
share :math:`\rho`, ``SPENDS``, of what is left. docs/statistics.md compares it with other rules.

The chances are computed exactly, by recursion from seed to seed (Jennison and Turnbull 1991, "Exact
calculations for sequential t, chi-squared and F tests", Biometrika 78, 133-141). With
:math:`S` the sum of the differences and :math:`R` the root of the sum of their squares, the state is
:math:`r = S / R`, which t is an increasing function of. If there is no difference, r and R are independent,
and the next difference divided by R is Student's t with m degrees of freedom over :math:`\sqrt m`. So r is a
Markov chain whose steps have a known distribution, whatever the spread of the differences.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logit, stdtr, stdtrit

from normlab.judging.statistics import Array

FIRST: Final = 3
"""The number of seeds at which the first test is made: two cannot tell, see docs/statistics.md."""
SPENDS: Final = 0.25
"""The share of what is left of the level that each look spends."""
CELLS: Final = 240
"""Cells into which the range of t below its critical value is divided."""
_LOWEST: Final = -25.0
"""The lower end of that range, as the logit of a share: what lies below has no chance to come back."""


def spent(seeds: int) -> float:
    """The share of the level that may be spent by so many seeds, :math:`1 - u_m`."""
    return 0.0 if seeds < FIRST else 1 - (1 - SPENDS) ** (seeds - FIRST + 1)


class Boundary:
    """The critical values of t at one level, computed seed after seed."""

    def __init__(self, level: float) -> None:
        self.level = level
        self._critical: dict[int, float] = {}
        self._cells = np.array([0.0])
        """The values of r in the middle of the cells, from which a comparison goes on."""
        self._chances = np.array([1.0])
        """The chance of each cell if there is no difference."""

    def critical(self, seeds: int) -> float:
        """The value that t must exceed at so many seeds, if it did not before; infinite before ``FIRST``."""
        if seeds < FIRST:
            return np.inf
        for number in range(FIRST + len(self._critical), seeds + 1):
            self._critical[number] = self._next(number)
        return self._critical[seeds]

    def _next(self, seeds: int) -> float:
        """Go on by one seed, and return the critical value there."""
        chance = self.level * (spent(seeds) - spent(seeds - 1))
        # at the first look no comparison has ended, so that t has its own distribution there
        is_first = seeds == FIRST
        tail = chance if is_first else self._tail_of(chance, seeds)

        # The range of t below its critical value is divided evenly on the scale of the logit of its tail, so
        # that rare values, from which the next look is decided, have cells of their own.
        edges = np.linspace(_LOWEST, -logit(tail), CELLS + 1)
        lower_ends = _r(expit(-edges), seeds)
        lower_ends[0] = -np.sqrt(seeds)  # the least that r can be, so that the cells hold all chances
        chance_above = expit(-edges) if is_first else self._above(lower_ends[:, None], seeds)
        self._chances = chance_above[:-1] - chance_above[1:]
        self._cells = _r(expit(-(edges[:-1] + edges[1:]) / 2), seeds)
        return float(-stdtrit(seeds - 1, tail))

    def _tail_of(self, chance: float, seeds: int) -> float:
        """The share of t above the value that it has the chance to exceed now, and not before."""

        def excess(logit_of_tail: float) -> float:
            return float(self._above(_r(expit(logit_of_tail), seeds), seeds)) - chance

        # on the scale of the logit, tails of every size are smooth
        return float(expit(brentq(excess, -45.0, 0.0, xtol=1e-9)))

    def _above(self, end: Array, seeds: int) -> Array:
        """The chance to go on until now and to have r above ``end`` ``[..., 1]`` at so many seeds."""
        return _chance_above(end, self._cells, seeds - 1) @ self._chances


@cache
def boundary(level: float) -> Boundary:
    """The critical values of t at a one-sided level."""
    return Boundary(level)


def _r(tail: Array, seeds: int) -> Array:
    """The value of r = S / R that so large a share of r lies above, if there is no difference."""
    t = -stdtrit(seeds - 1, tail)
    return np.asarray(t * np.sqrt(seeds) / np.sqrt(seeds - 1 + t**2))


def _chance_above(end: Array, r: Array, seeds: int) -> Array:
    r"""The chance that r is at least ``end`` after one seed more, given r at so many seeds.

    With the next difference over R written as :math:`\tan\psi`, the next r is
    :math:`\sqrt{1 + r^2} \sin(\psi + \arctan r)`: it is at least ``end`` between two values of
    :math:`\psi`.
    """
    ratio = end / np.sqrt(1 + r**2)
    from_here = np.arcsin(np.clip(ratio, -1, 1))
    turned = np.arctan(r)
    low, high = (_tail(psi, seeds) for psi in (from_here - turned, np.pi - from_here - turned))
    return np.where(ratio >= 1, 0.0, np.where(ratio <= -1, 1.0, low - high))


def _tail(psi: Array, seeds: int) -> Array:
    """The chance that the next difference over R is above the tangent of an angle."""
    right = np.pi / 2 - 1e-12
    return stdtr(seeds, -np.sqrt(seeds) * np.tan(np.clip(psi, -right, right)))

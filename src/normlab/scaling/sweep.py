"""The trials of all sizes with one weight decay: best rates, the line through them, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from normlab.errors import UserError
from normlab.scaling import FACTOR
from normlab.scaling.optimum import Fit, Losses, Optimum, Trend, best_of, fit_curves, means_of
from normlab.trials.scale import Scale
from normlab.trials.verdict import Trial

INDEPENDENT: Final = "independent"
CARRIES: Final = "carries"
SHIFTS: Final = "shifts"
UNDECIDED: Final = "cannot say"
LEAST_SIZES: Final = 3
"""If more than two sizes were asked for, nothing is said unless the best rate is known at so many of them."""


@dataclass(frozen=True)
class Decay:
    r"""A factor on the setup's own weight decay :math:`\lambda`.

    An optimizer such as torch's AdamW shrinks weights by :math:`\eta \lambda` per step, which grows with the
    rate :math:`\eta` while that is swept: decay is *coupled*. *Independent* decay keeps :math:`\eta \lambda`
    as it is at today's rate, so that :math:`\lambda` falls as the rate rises. At today's rate both are equal.
    """

    factor: float = 1.0
    independent: bool = False

    @classmethod
    def of(cls, word: str | float) -> Decay:
        """Read a factor, or ``independent`` with or without one. Raises UserError for anything else."""
        kind, _, factor = str(word).rpartition(":")
        if factor == INDEPENDENT:
            kind, factor = INDEPENDENT, "1"
        value = math.nan
        with suppress(ValueError):
            value = float(factor)
        if kind not in ("", INDEPENDENT) or not 0 <= value < math.inf:
            raise UserError(
                f"decays has {word!r}, but must hold factors on the weight decay, such as 0 1 4, or "
                "independent, or independent:4"
            )
        return cls(value, kind == INDEPENDENT)

    def at(self, octave: float) -> float:
        """The factor on the setup's own decay at a rate so many octaves above today's."""
        return self.factor * (2.0**-octave if self.independent else 1.0)

    @property
    def label(self) -> str:
        """Its usual name."""
        if not self.factor:
            return "no weight decay"
        decay = "weight decay" if self.factor == 1 else f"{self.factor:g}x the weight decay"
        return f"{decay}, independent of the rate" if self.independent else decay


class Between(NamedTuple):
    """A number with the ends of its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, octaves: Sequence[float]) -> Between:
        """The number and its ends from octaves."""
        return cls(*(2.0**x for x in octaves))

    @property
    def inverse(self) -> Between:
        """One over the number, with its ends."""
        return Between(1 / self.value, 1 / self.high, 1 / self.low)

    @property
    def factor(self) -> str:
        """The number as what something is multiplied or divided by."""
        return f"a factor of {self.value:.2f} (95%: {self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Sweep:
    """The trials of all sizes with one weight decay."""

    decay: Decay
    trials: Mapping[int, Mapping[tuple[float, int], Trial]]
    """By size, by octave of the rate and seed."""
    scales: Mapping[int, Scale]
    """By size, how its losses are to be read, for every size that was asked for."""
    factor: float = FACTOR

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that were asked for, from the smallest on, whether they have trials or not."""
        return tuple(sorted(self.scales))

    def losses(self, size: int) -> Losses:
        """By octave and seed, in nats per target if targets are known; infinite if a trial diverged."""
        scale = self.scales[size]
        return {key: scale.nats(trial.loss) for key, trial in self.trials.get(size, {}).items()}

    def learns(self, size: int) -> bool:
        """Whether the best rate shows that something was learnt."""
        losses = self.losses(size)
        best = best_of(losses)
        if best is None:
            return False
        at_best = [trial for (octave, _), trial in self.trials[size].items() if octave == best]
        error = max(trial.error() for trial in at_best)
        scale = self.scales[size]
        return scale.learns(means_of(losses)[best], error / scale.weight)

    @cached_property
    def fit(self) -> Fit:
        """The optima of the sizes at which something is learnt, and the line through them."""
        tried = [size for size in self.sizes if self.trials.get(size)]
        learnt = {size: self.losses(size) for size in tried if self.learns(size)}
        return fit_curves(learnt)

    def optimum(self, size: int) -> Optimum:
        """The optimum of a size, or why there is none."""
        if (known := self.fit.optima.get(size)) is not None:
            return known
        if self.trials.get(size):
            return Optimum(size, why="nothing is learnt yet", lack="steps")
        return Optimum(size, why="no rate was tried", lack="trials")

    @property
    def doublings(self) -> float:
        """How often the size doubles from the smallest to the largest whose optimum is known."""
        known = self.known
        return math.log2(known[-1] / known[0]) if known else 0.0

    @property
    def known(self) -> list[int]:
        """The sizes whose optimum has an interval."""
        return [size for size in self.sizes if self.optimum(size).closed]

    @property
    def unknown(self) -> list[int]:
        """The other sizes that were asked for."""
        return [size for size in self.sizes if not self.optimum(size).closed]

    @property
    def spans(self) -> bool:
        """Whether the optima of the smallest and the largest size that were asked for are known."""
        return all(self.optimum(size).closed for size in (self.sizes[0], self.sizes[-1]))

    @property
    def trend(self) -> Trend | None:
        """The line through the optima, if enough of those that were asked for are known to say anything: else
        None, even where the fit has a line.
        """
        enough = min(LEAST_SIZES, len(self.sizes))
        return self.fit.line if len(self.known) >= enough else None

    @property
    def contradicted(self) -> list[int]:
        """Sizes whose optimum has just one known end, and that end lies beyond the line and its interval."""
        if self.trend is None:
            return []
        sizes = list[int]()
        for size in self.unknown:
            optimum = self.optimum(size)
            _, low, high = self.trend.at(size)
            is_above = optimum.low is not None and optimum.low > high
            is_below = optimum.high is not None and optimum.high < low
            if is_above or is_below:
                sizes.append(size)
        return sizes

    @property
    def slope(self) -> Between | None:
        """By what factor the best rate moves with each doubling of the size."""
        return Between.of(self.trend.shift()) if self.trend else None

    @property
    def shift(self) -> Between | None:
        """By what factor the best rate moves over the sizes at which it is known."""
        return Between.of(self.trend.shift(self.doublings)) if self.trend else None

    @property
    def steady(self) -> bool:
        """Whether the shift lies within the factor."""
        shift = self.shift
        return shift is not None and 1 / self.factor <= shift.low and shift.high <= self.factor

    @property
    def verdict(self) -> str:
        """Whether the shift lies within the factor, over all that was asked for; if not, whether there is a
        shift at all. Nothing is said that contradicts a size at which only one end of the optimum is known.
        """
        shift = self.shift
        if shift is None or self.contradicted:
            return UNDECIDED
        if self.steady:
            return CARRIES if self.spans else UNDECIDED
        return UNDECIDED if shift.low <= 1 <= shift.high else SHIFTS

    @property
    def shortage(self) -> float:
        """How many times narrower the interval of the shift, as the noise of trials alone makes it, must be
        to decide; 1 or less if it is narrow enough, and the optima scatter about their line.
        """
        trend = self.trend
        if trend is None:
            return math.inf
        margin = self.doublings * (trend.fixed_factor * trend.slope_error)
        shift = self.doublings * abs(trend.slope)
        # the rate carries if the interval ends within the factor, and shifts if it excludes 0
        allowed = max(math.log2(self.factor) - shift, shift)
        return margin / allowed

"""``normlab.Judge``: a change against its baseline, seed after seed, until it is decided.

Two questions are asked after every seed, as in a comparison: how good is the change when it trains, by the
sequential t test of ``boundary``; and how often does it train, by the seeds at which only one of the two did.
The second has a tenth of the level, the first the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import numpy as np
from scipy.special import ndtri

from normlab.base.io import Amount, Share, Size, to_plain, validated
from normlab.base.metric import Metric
from normlab.base.units import count
from normlab.errors import UserError
from normlab.judging.answers import digits_for
from normlab.judging.boundary import FIRST, boundary
from normlab.judging.difference import Interval
from normlab.judging.judgement import DISCARD, KEEP, UNDECIDED
from normlab.judging.statistics import LEVEL, POWER, Array

OF_TRAINING: Final = 0.1
"""The share of the level that is for how often the two train."""
MOST_SEEDS: Final = 12
"""The most seeds of each of the two, by default."""
FARTHEST: Final = 40
"""More seeds than this are never suggested."""


@dataclass(frozen=True)
class Decision:
    """What is known of a change after some seeds."""

    verdict: str
    """``keep``, ``discard`` or ``undecided``."""
    seeds: int
    """The number of seeds that both have been run with."""
    common: int
    """The number of seeds at which both trained."""
    gain: Interval | None
    """By how much the change is better, positive whichever direction is better. Each end alone holds after
    every seed at once: the lower one at the level of the judge, the upper one at 5%. None without a common
    seed, and without ends below three.
    """
    only_baseline: int
    """The number of seeds at which only the baseline trained."""
    only_candidate: int
    """The number of seeds at which only the change trained."""
    more_seeds: int | None
    """If it is undecided: how many more seeds would decide it, going by what was seen, in four of five cases;
    None if that is not known, or more than ``FARTHEST``.
    """
    hopeless: bool
    """If it is undecided: whether no gain that is likely, given what was seen, would be decided within the
    seeds that are allowed.
    """
    sentence: str
    """The same in words."""

    @property
    def decided(self) -> bool:
        return self.verdict != UNDECIDED

    def to_dict(self) -> dict[str, Any]:
        return to_plain(self)


class Judge:
    """Judge a change seed by seed; looking after every seed costs nothing in error.

    A change whose gain is no larger than ``margin`` is kept with a chance of at most ``level``, however often
    it is looked at; one whose gain is larger is discarded with a chance of at most 5%. Sources: Lan and
    DeMets 1983 for spending the level, Jennison and Turnbull 1991 for t.

    Args:
        margin: The smallest gain that matters.
        higher_is_better: Whether a higher score is better; a loss is lower.
        level: The chance of a wrong keep.
        max_seeds: The seeds of each at most; more than these make it undecided.

    >>> judge = normlab.Judge(margin=0.01)
    >>> for seed, (baseline, candidate) in enumerate([(3.31, 3.21), (3.29, 3.18), (3.30, 3.20)]):
    ...     decision = judge.add(seed, baseline, candidate)
    >>> decision.verdict
    'keep'
    """

    @validated
    def __init__(
        self,
        *,
        margin: Amount = 0.0,
        higher_is_better: bool = False,
        level: Share = LEVEL,
        max_seeds: Size = MOST_SEEDS,
    ) -> None:
        if not level:
            raise UserError("level is 0, at which nothing is ever kept; give a chance such as 0.05")
        self.margin, self.level, self.max_seeds = margin, level, max_seeds
        self.sign = 1.0 if higher_is_better else -1.0
        self.pairs: dict[str, tuple[float, float]] = {}
        """By seed, the scores of the baseline and of the change, NaN where one did not train."""
        self.decision = self._decide()

    def add(self, seed: int | str, baseline: float | None, candidate: float | None) -> Decision:
        """Add the scores of both at one seed and decide; None, or NaN, is a run that diverged or failed.

        Raises UserError if the seed was added before, or if it was decided already.
        """
        if str(seed) in self.pairs:
            raise UserError(f"seed {seed} was added before; each seed counts once")
        if self.decision.decided:
            raise UserError(f"it is decided: {self.decision.verdict}; a new judge begins anew")
        self.pairs[str(seed)] = (_finite(baseline), _finite(candidate))
        self.decision = self._decide()
        return self.decision

    @property
    def metric(self) -> Metric:
        """The score, shown with as many decimals as the noise of the gains leaves meaningful."""
        gains, scores = self._gains, np.array(list(self.pairs.values())).ravel()
        noise = float(gains.std(ddof=1)) if len(gains) > 1 else None
        digits = digits_for(noise, scores[np.isfinite(scores)].tolist())
        return Metric("score", "score", higher_is_better=self.sign > 0, digits=digits)

    @property
    def _gains(self) -> Array:
        """By how much the change is better, at each seed at which both trained."""
        gains = np.array([self.sign * (candidate - baseline) for baseline, candidate in self.pairs.values()])
        return gains[np.isfinite(gains)]

    def _decide(self) -> Decision:
        pairs = np.array(list(self.pairs.values())).reshape(-1, 2)
        trained = np.isfinite(pairs)
        gains = self._gains
        only_baseline = int((trained[:, 0] & ~trained[:, 1]).sum())
        only_candidate = int((trained[:, 1] & ~trained[:, 0]).sum())
        gain = self._gain(gains)
        more, hopeless = None, False
        trains_as_often = only_baseline <= only_candidate
        decided = self._by_training(only_baseline, only_candidate) or self._by_gain(
            gains, gain, trains_as_often=trains_as_often
        )
        if decided is not None:
            verdict, sentence = decided
        elif self._is_better(gain):
            # more common seeds cannot decide it: only those at which one alone trains can
            verdict, sentence = UNDECIDED, self._open_in_training(gain, only_baseline, only_candidate)
        else:
            more = self._more_seeds(gains)
            hopeless = self._is_hopeless(gains)
            verdict, sentence = UNDECIDED, self._open(gain, len(pairs), more)
        return Decision(
            verdict=verdict,
            seeds=len(pairs),
            common=len(gains),
            gain=gain,
            only_baseline=only_baseline,
            only_candidate=only_candidate,
            more_seeds=more,
            hopeless=hopeless,
            sentence=sentence,
        )

    # -------------------------------------------------------------------------------- how often it trains
    def _by_training(self, only_baseline: int, only_candidate: int) -> tuple[str, str] | None:
        """Decide by seeds at which the same one alone trained; None if that is open.

        If both train equally often, each such seed is the toss of a coin: the first k all fall on one side
        with a chance of two to the power of -k, and looking at them one by one changes nothing.
        """
        if only_candidate >= streak(self.level) and not only_baseline:
            return KEEP, f"it trained at {only_candidate} seeds at which the baseline did not"
        if only_baseline >= streak(LEVEL) and not only_candidate:
            return DISCARD, f"it did not train at {only_baseline} seeds at which the baseline did"
        return None

    # ---------------------------------------------------------------------------- how good it is if it does
    def _gain(self, gains: Array) -> Interval | None:
        if not len(gains):
            return None
        mean, error = float(gains.mean()), _error(gains)
        if not error or len(gains) < FIRST:
            return Interval(mean)
        low, high = (critical(level, len(gains)) * error for level in (self.level, LEVEL))
        return Interval(mean, mean - low, mean + high)

    def _is_better(self, gain: Interval | None) -> TypeGuard[Interval]:
        """Whether the whole interval of the gain lies above the margin."""
        return gain is not None and gain.low is not None and gain.low > self.margin

    def _by_gain(
        self, gains: Array, gain: Interval | None, *, trains_as_often: bool
    ) -> tuple[str, str] | None:
        """Decide by where the interval of the gain lies; None if that is open."""
        if len(gains) >= FIRST and not gains.any():
            return DISCARD, f"it changes nothing: both have the same score at {len(gains)} seeds"
        if gain is None or gain.low is None or gain.high is None:
            return None
        if self._is_better(gain) and trains_as_often:
            return KEEP, f"better by at least {self.metric.amount(gain.low)} ({self._shown(gain)})"
        if gain.high < self.margin and self.margin:
            return DISCARD, f"not better by {self.metric.amount(self.margin)} ({self._shown(gain)})"
        if gain.high < self.margin:
            return DISCARD, f"worse by at least {self.metric.amount(gain.high)} ({self._shown(gain)})"
        return None

    # ----------------------------------------------------------------------------------- if it is undecided
    def _more_seeds(self, gains: Array) -> int | None:
        """How many more seeds would decide a gain like the one seen, with the spread seen."""
        error = _error(gains)
        if not error:
            return None
        above = float(gains.mean()) - self.margin
        effect = abs(above) / (error * math.sqrt(len(gains)))
        level = self.level if above > 0 else LEVEL
        for seeds in range(max(FIRST, len(gains) + 1), FARTHEST + 1):
            if effect * math.sqrt(seeds) >= critical(level, seeds) + ndtri(POWER):
                return seeds - len(gains)
        return None

    def _is_hopeless(self, gains: Array) -> bool:
        """Whether even a gain one standard error above, or below, the one seen would remain undecided."""
        error = _error(gains)
        if len(gains) < FIRST or not error:
            return False
        above = float(gains.mean()) - self.margin
        spread = error * math.sqrt(len(gains))
        return all(
            (side * above + error) / spread * math.sqrt(self.max_seeds) < critical(level, self.max_seeds)
            for side, level in ((1, self.level), (-1, LEVEL))
        )

    def _open(self, gain: Interval | None, seeds: int, more: int | None) -> str:
        cannot = f"{count(seeds, 'seed')} cannot tell"
        if gain is None:
            return f"{cannot}: no seed trained with both"
        if more is not None:
            return f"{cannot} ({self._shown(gain)}); {more} more would do"
        enough = f"more than {FARTHEST}" if gain.low is not None else f"at least {FIRST}"
        return f"{cannot} ({self._shown(gain)}); it takes {enough} seeds"

    def _open_in_training(self, gain: Interval, only_baseline: int, only_candidate: int) -> str:
        better = f"better where both train ({self._shown(gain)})"
        failed = f"it did not train at {count(only_baseline, 'seed')} at which the baseline did"
        if only_candidate:
            failed += f" ({only_candidate} the other way round)"
        return f"{better}, but {failed}: how often it trains is open"

    def _shown(self, gain: Interval) -> str:
        signed = self.metric.signed
        if gain.low is None or gain.high is None:
            return f"gain {signed(gain.value)}"
        return f"gain {signed(gain.value)}, {signed(gain.low)} to {signed(gain.high)}"


def critical(level: float, seeds: int) -> float:
    """The value that t must exceed after so many common seeds for a change to be kept at a level."""
    return boundary((1 - OF_TRAINING) * level).critical(seeds)


def streak(level: float) -> int:
    """The number of seeds at which only one trained, always the same, that decides at a level."""
    return math.ceil(-math.log2(OF_TRAINING * level))


def _error(gains: Array) -> float:
    """The standard error of the mean; 0 if it is not known, or if all gains are equal."""
    return float(gains.std(ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0


def _finite(score: float | None) -> float:
    try:
        number = math.nan if score is None else float(score)
    except (TypeError, ValueError):
        raise UserError(
            f"a score is {score!r:.60}, but must be a number, or None for a run that failed"
        ) from None
    return number if math.isfinite(number) else math.nan

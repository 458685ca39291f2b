"""Which rate to try next, and when to end a trial early because it diverged or is far behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

LAST: Final = 8
"""How many of the last losses are averaged to judge a trial at a step."""
ABOVE_START_NATS: Final = 0.5
"""A trial this far above its start diverges."""
BEHIND: Final = 0.1
"""A trial may be behind the best one by this share of the best one's fall."""
USABLE: Final = 0.05
"""A usable rate may be worse than the best by this share of what the best one learns."""
SURE: Final = 2.0
"""A rate counts as worse only if it is this many standard errors worse than that."""
FARTHEST: Final = 12
"""Other rates are tried within this many octaves of the first."""
Scores = Mapping[Any, float]
"""The losses of trials by their rate, or by their octave: the rate is 2^octave times the first one."""
NONE: Final[Scores] = {}


def _level(losses: Sequence[float]) -> float:
    """The mean of the last losses."""
    return fmean(losses[-LAST:])


def hopeless(losses: Sequence[float], steps: int, best: Sequence[float], nats: float) -> str:
    """Why a trial of n steps need not go on, such as "loss not finite at step 3"; empty if it must.

    It ends at a loss that is not finite; from n/4 on, if the mean of its last eight losses is 0.5 nats above
    its first loss; from n/2 on, if that mean is behind the best trial's at the same step by more than a tenth
    of what the best has gained. ``best`` is empty if none has learnt anything yet: the first one on a plateau
    ends no other. ``nats`` is one nat per target in the unit of the losses.
    """
    now = len(losses)
    if not math.isfinite(losses[-1]):
        return f"loss not finite at step {now}"
    if now >= max(steps / 4, LAST) and _level(losses) > losses[0] + ABOVE_START_NATS * nats:
        return f"loss above its start at step {now}"
    if now >= max(steps / 2, LAST) and len(best) >= now:
        leader = _level(best[:now])
        if _level(losses) - leader > BEHIND * max(losses[0] - leader, 0.0) > 0:
            return f"loss behind the best at step {now}"
    return ""


def next_octave(scores: Scores, reference: float, errors: Scores = NONE) -> int | None:
    """The octave to try next, None if the scan is done.

    The scan goes from the first rate in steps of two octaves towards the lower loss, until both sides of the
    best are worse; then to its neighbours; then up, until the first unusable rate is next to a usable one.
    """
    if not scores:
        return 0
    best = best_of(scores)
    if math.isinf(scores[best]):  # all failed
        return best - 2 if best > -FARTHEST else None
    for gap in (2, 1):
        for side in (1, -1):
            tried = any(best + side * octaves in scores for octaves in range(1, gap + 1))
            if not tried and abs(best) < FARTHEST:
                return best + side * gap
    top = highest_usable(scores, reference, errors)
    above = [octave for octave in scores if octave > top]
    if not above:
        return top + 2 if top < FARTHEST else None
    unusable = min(above)
    return None if unusable == top + 1 else (top + unusable) // 2


def best_of(scores: Scores) -> Any:
    """The rate with the lowest loss: among equals the highest, or the lowest if all failed."""
    lowest = min(scores.values())
    rates = [rate for rate in scores if scores[rate] == lowest]
    return min(rates) if math.isinf(lowest) else max(rates)


def is_usable(scores: Scores, rate: Any, reference: float, errors: Scores = NONE) -> bool:
    """Whether a rate is at most 5% of what the best has learnt worse than the best, as far as can be seen:
    ``errors`` are the standard errors of the losses' differences from the best.
    """
    best = scores[best_of(scores)]
    return scores[rate] - SURE * errors.get(rate, 0.0) <= best + USABLE * max(reference - best, 0.0)


def highest_usable(scores: Scores, reference: float, errors: Scores = NONE) -> Any:
    """The largest rate that is usable, as are all that were tried between it and the best."""
    top = best_of(scores)
    for rate in sorted(rate for rate in scores if rate > top):
        if not is_usable(scores, rate, reference, errors):
            break
        top = rate
    return top

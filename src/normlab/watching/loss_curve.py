"""The curve of a loss: where it began, how high it rose and where it ended, judged by medians."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Final

from normlab.config.outcome import Outcome

RECENT: Final = 5
"""Losses whose median stands for one: one bad batch is no rise."""

LAST: Final = 16
"""The losses at the end of which each must be above the start; half of all where there are fewer than twice
as many."""

ENDED_ABOVE: Final = 0.05
"""A loss is above its start from this share of it on."""

SPIKE_ABOVE: Final = 0.2
"""A loss has risen when its running median is above the start by this share and by ``NOISE`` deviations."""

NOISE: Final = 4.0
"""Deviations of single losses, estimated at the end by the median difference of neighbours."""

AT_ONCE: Final = 2 * RECENT
"""A loss has also risen when one of its first so many is above the start by twice ``SPIKE_ABOVE`` and twice
``NOISE``: a training that diverges at once may be back before a median has seen it."""

BELOW: Final = 2.0
"""After a rise a loss has come back when it is so many deviations and ``ENDED_ABOVE`` below its start."""

SIGMA: Final = 1.0 / (0.6744897501960817 * math.sqrt(2))
"""The deviation of a normal variable by the median size of the differences of two draws."""


@dataclass
class LossCurve:
    """The losses of a training, of which the first and the last ones are kept.

    The start is the median of the first ``RECENT``, or of those before the loss is twice as high as the
    first one: a training that diverges at once began at its first loss.
    """

    count: int = 0
    top: float = -math.inf
    """The largest median of ``RECENT`` losses."""
    early: float = -math.inf
    """The largest of the first ``AT_ONCE`` losses that are above the first one."""
    _first: list[float] = field(default_factory=list)
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))

    def add(self, loss: float) -> None:
        """Take note of a finite loss."""
        self.count += 1
        if len(self._first) < RECENT:
            self._first.append(loss)
        if self.count <= AT_ONCE and loss > self._first[0]:
            self.early = max(self.early, loss)
        self._last.append(loss)
        if self.count >= RECENT:
            self.top = max(self.top, statistics.median(list(self._last)[-RECENT:]))

    @property
    def start(self) -> float:
        """The loss at the start."""
        first = self._first[0]
        near = takewhile(lambda loss: loss <= first + abs(first), self._first)
        return statistics.median(near)

    @property
    def end(self) -> float:
        """The loss at the end."""
        return statistics.median(self._ended)

    @property
    def noise(self) -> float:
        """The deviation of a single loss, by the differences of neighbours at the end."""
        steps = [abs(b - a) for a, b in pairwise(self._ended)]
        return SIGMA * statistics.median(steps) if steps else math.inf

    @property
    def rose(self) -> bool:
        """Whether the loss has been above its start by more than the noise of single batches."""
        limit = max(SPIKE_ABOVE * abs(self.start), NOISE * self.noise)
        return self.top > self.start + limit or self.early > self.start + 2 * limit

    @property
    def highest(self) -> float:
        """The height of a rise."""
        return max(self.top, self.early)

    @property
    def diverged(self) -> bool:
        """Whether the last losses are all above the start, or have risen and did not come back below it."""
        if self.count < 2 * RECENT:
            return False
        margin = ENDED_ABOVE * abs(self.start)
        back = self.end < self.start - max(margin, BELOW * self.noise)
        return min(self._ended) > self.start + margin or (self.rose and not back)

    @property
    def returned(self) -> bool:
        """Whether the loss has risen and come back below its start."""
        return self.count >= 2 * RECENT and self.rose and not self.diverged

    @property
    def fell(self) -> bool:
        """Whether a loss at the end is more often below one at the start than not; True of too few losses."""
        pairs = [last < first for first in self._first for last in self._ended]
        return self.count < 2 * RECENT or 2 * sum(pairs) > len(pairs)

    @property
    def words(self) -> str:
        """How the loss went, in a few words."""
        if not self.rose:
            return f"the loss began at {self.start:.4g} and ended at {self.end:.4g}"
        return f"the loss rose from {self.start:.4g} to {self.highest:.4g} and ended at {self.end:.4g}"

    def outcome(self, step: int) -> Outcome | None:
        """Return the outcome of a training that diverged, at its last step."""
        return Outcome("diverged", step, self.words) if self.diverged else None

    @property
    def _ended(self) -> list[float]:
        return list(self._last)[-max(1, min(LAST, self.count // 2)) :]

"""The loss of a step, and a training's loss curve: where it began, how high it rose and where it ended."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, Final

import torch
from torch import Tensor


class Losses:
    """Collects the losses of the micro-batches of a step, on the device.

    Those that a loop gives take precedence over those in the model's output. If the model is told over how
    many tokens of all micro-batches to average (``num_items_in_batch``, by Hugging Face's trainer), its
    losses are shares that add up to the step's loss; else the step's loss is their mean.
    """

    def __init__(self) -> None:
        self._given: list[Tensor] = []
        self._seen: list[Tensor] = []
        self._shares = False

    def __bool__(self) -> bool:
        return bool(self._given or self._seen)

    def give(self, loss: Tensor | float) -> None:
        self._given.append(torch.as_tensor(loss).detach().mean())

    def see(self, output: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Record the loss in the model's output, if there is one; return it unless it is a share.

        It is called ``loss``, as in Hugging Face's outputs, or it is the only tensor without dimensions, as
        in nanoGPT's ``(logits, loss)``; it must have a gradient.
        """
        loss = _loss_in(output)
        if loss is None or not loss.requires_grad:
            return None
        self._shares = kwargs.get("num_items_in_batch") is not None
        self._seen.append(loss.detach().mean())
        return None if self._shares else loss

    def of_step(self) -> Tensor | None:
        """Return the loss of the step, or None if none was seen."""
        if self._given:
            return torch.stack(self._given).mean()
        if not self._seen:
            return None
        seen = torch.stack(self._seen)
        return seen.sum() if self._shares else seen.mean()

    def clear(self) -> None:
        self._given.clear()
        self._seen.clear()


def _loss_in(output: Any) -> Tensor | None:
    """Return the loss in a model's output, if it has one; see ``Losses.see``."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    values = output if isinstance(output, (tuple, list)) else [output]
    numbers = [x for x in values if isinstance(x, Tensor) and x.ndim == 0]
    return numbers[0] if len(numbers) == 1 else None


RECENT: Final = 5
"""How many losses a median is taken over, so that one bad batch is not a rise."""
LAST: Final = 16
"""The losses at the end that must all be above the start; half of all if there are fewer than twice as many.
"""
ENDED_ABOVE: Final = 0.05
"""A loss is above its start if it exceeds the start by this share."""
SPIKE_ABOVE: Final = 0.2
"""A loss has risen when its running median is above the start by this share and by ``NOISE`` deviations."""
NOISE: Final = 4.0
"""Deviations of single losses, estimated at the end by the median difference of neighbours."""
AT_ONCE: Final = 2 * RECENT
"""A loss has also risen when one of its first this many is above the start by twice ``SPIKE_ABOVE`` and twice
``NOISE``: a training that diverges at once may be back before a median shows it."""
BELOW: Final = 2.0
"""After a rise, a loss has come back when it is this many deviations and ``ENDED_ABOVE`` below its start."""
SIGMA: Final = 1.0 / (statistics.NormalDist().inv_cdf(0.75) * math.sqrt(2))
"""The deviation of a normal variable, per median absolute difference of two draws."""


@dataclass
class LossCurve:
    """The losses of a training, of which only the first and the last ones are kept.

    The start is the median of the first ``RECENT``, or of those before the loss is twice as high as the first
    one: a training that diverges at once began at its first loss.
    """

    count: int = 0
    top: float = -math.inf
    """The largest median of ``RECENT`` losses."""
    early: float = -math.inf
    """The largest of the first ``AT_ONCE`` losses that are above the first one."""
    _first: list[float] = field(default_factory=list)
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))

    def add(self, loss: float) -> None:
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
        first = self._first[0]
        before_rise = takewhile(lambda loss: loss <= first + abs(first), self._first)
        return statistics.median(before_rise)

    @property
    def end(self) -> float:
        return statistics.median(self._ended)

    @property
    def noise(self) -> float:
        """The deviation of a single loss, from the differences of neighbours at the end."""
        steps = [abs(b - a) for a, b in pairwise(self._ended)]
        return SIGMA * statistics.median(steps) if steps else math.inf

    @property
    def rose(self) -> bool:
        """Whether the loss has been above its start by more than the noise of single batches."""
        limit = max(SPIKE_ABOVE * abs(self.start), NOISE * self.noise)
        return self.top > self.start + limit or self.early > self.start + 2 * limit

    @property
    def diverged(self) -> bool:
        """Whether the last losses are all above the start, or the loss rose and did not return below it."""
        if self.count < 2 * RECENT:
            return False
        margin = ENDED_ABOVE * abs(self.start)
        if min(self._ended) > self.start + margin:
            return True
        came_back = self.end < self.start - max(margin, BELOW * self.noise)
        return self.rose and not came_back

    @property
    def returned(self) -> bool:
        """Whether the loss has risen and come back below its start."""
        return self.count >= 2 * RECENT and self.rose and not self.diverged

    @property
    def fell(self) -> bool:
        """Whether losses at the end are mostly below those at the start; True if there are too few losses."""
        if self.count < 2 * RECENT:
            return True
        is_below = [last < first for first in self._first for last in self._ended]
        return 2 * sum(is_below) > len(is_below)

    @property
    def words(self) -> str:
        """How the loss went, for a sentence."""
        if not self.rose:
            return f"the loss began at {self.start:.4g} and ended at {self.end:.4g}"
        highest = max(self.top, self.early)
        return f"the loss rose from {self.start:.4g} to {highest:.4g} and ended at {self.end:.4g}"

    @property
    def _ended(self) -> list[float]:
        """The losses at the end."""
        return list(self._last)[-max(1, min(LAST, self.count // 2)) :]

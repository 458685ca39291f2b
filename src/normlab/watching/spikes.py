"""Spikes: when the losses or norms of a training's last steps are too high as a whole."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from normlab.watching.fault import FEW, LEFT
from normlab.watching.flight import Trigger
from normlab.watching.losses import RECENT, SPIKE_ABOVE
from normlab.watching.meter import StepRecord

SPIKE_NATS: Final = 0.5
"""A loss has spiked when the median of ``RECENT`` steps is above every kept step before them, of which there
must be as many, and this far above their median. One bad batch is not a spike."""

Limit = Callable[[Sequence[float]], float]
"""Return the largest value that is not a spike, given those before: at least the largest of these."""
Limits = Mapping[str, Limit | None]


def _loss_in_nats(before: Sequence[float]) -> float:
    return max(max(before), statistics.median(before) + SPIKE_NATS)


def _loss_in_any_unit(before: Sequence[float]) -> float:
    usual = statistics.median(before)
    return max(max(before), usual + SPIKE_ABOVE * abs(usual))


def _gradient_norm(before: Sequence[float]) -> float:
    return max(max(before), LEFT * (1 + FEW / len(before)) * statistics.median(before))


NATS: Final[Limits] = {"loss": _loss_in_nats, "gradient norm": None}
ANY_UNIT: Final[Limits] = {"loss": _loss_in_any_unit, "gradient norm": _gradient_norm, "update norm": None}
"""What must be finite, with the limit above which it is a spike, if any."""


@dataclass(frozen=True)
class Spike:
    """A spike that training may yet recover from."""

    trigger: Trigger
    quantity: str
    limit: float
    """The value below which it has recovered."""
    records: tuple[StepRecord, ...]
    """The steps that were kept when it was seen."""


def find_spike(
    records: Sequence[StepRecord], numbers: Mapping[int, Mapping[str, float]], limits: Limits
) -> Spike | None:
    """Find the first spike among the kept steps: ``RECENT`` of them, whose median is above the limit.

    Args:
        records: The kept steps.
        numbers: What is known of each step, by name.
        limits: By name, the limit above which a number is a spike, if any.
    """
    for quantity, limit_of in limits.items():
        if limit_of is None:
            continue
        known = [r.step for r in records if quantity in numbers.get(r.step, {})]
        values = [numbers[step][quantity] for step in known]
        for at in range(RECENT, len(values) - RECENT + 1):
            limit, now = limit_of(values[:at]), statistics.median(values[at : at + RECENT])
            if now > limit:
                first = next(i for i in range(at, len(values)) if values[i] > limit)
                begin, end, usual = known[first], known[at + RECENT - 1], statistics.median(values[:at])
                words = f"the {quantity} went from {usual:.3g} to {now:.3g}, from step {begin} on"
                return Spike(Trigger("spike", begin, end, words), quantity, limit, tuple(records))
    return None

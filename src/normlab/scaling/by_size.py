"""The trials of a model at several sizes, with what follows from them in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normlab.scaling.sweep import SHIFTS, Between, Sweep
from normlab.scaling.wording import moves
from normlab.trials.verdict import INTERRUPTED


@dataclass(frozen=True, repr=False)
class TrialsBySize:
    """Trials at several sizes, and what they were made for.

    ``sweeps`` holds them by weight decay; the first one gives the answer. Rates are in octaves from the
    setup's own rate at their size: a trial multiplies all rates of its setup.
    """

    title: str
    axis: str
    sizes: tuple[int, ...]
    """The sizes that were asked for."""
    target: int
    steps: int
    seeds: int
    rates: Mapping[int, float]
    """By size, the largest rate that the setup has today."""
    step_s: Mapping[int, float]
    parameters: Mapping[int, int]
    sweeps: tuple[Sweep, ...]
    coordinates: Mapping[str, Any] = field(default_factory=dict)
    """The coordinate check, as plain values."""
    plan: str = ""
    ended_by: str = ""
    """Why the trials ended before all were done; empty if all were."""
    seconds: float = 0.0
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def first(self) -> Sweep:
        """The sweep with the first weight decay."""
        return self.sweeps[0]

    @property
    def verdict(self) -> str:
        """*carries*, *shifts* or *cannot say*."""
        return self.first.verdict

    @property
    def current_rate(self) -> float:
        """The setup's own rate at its smallest size."""
        return self.rates[self.sizes[0]]

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the trials."""
        return self.ended_by == INTERRUPTED

    @property
    def scales_itself(self) -> bool:
        """Whether the setup gives each size a rate of its own."""
        return len(set(self.rates.values())) > 1

    @property
    def reason(self) -> str:
        """What the coordinate check finds at fault; empty if it finds nothing."""
        return str(self.coordinates.get("sentence", "")) if self.coordinates.get("fault") else ""

    @property
    def explained(self) -> bool:
        """Whether what the coordinate check finds would move the best rate in the direction seen."""
        slope, fault = self.first.slope, self.coordinates.get("fault")
        if self.verdict != SHIFTS or slope is None or not fault:
            return False
        seen = 1 if slope.value > 1 else -1
        return moves(fault) == seen

    def best_at(self, sweep: Sweep, size: int) -> Between | None:
        """The best rate at a size, by the line through the optima, in multiples of the setup's own there.

        None if there is no line, or if an optimum with only one known end cannot lie on it.
        """
        if sweep.trend is None or sweep.contradicted:
            return None
        return Between.of(sweep.trend.at(size))

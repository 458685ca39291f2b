"""How long passes and steps take, and how much memory they hold."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Final

from normlab.trace.budget import Cost
from normlab.trace.passes import Passes
from normlab.trace.tensors import numbers_in

SHARE_OF_WHOLE_BATCH: Final = 1 / 10
"""The share of the budget that passes of the whole batch may take, where a part stands for it."""


class Estimates:
    """Estimates what something will take before it runs, from one measured pass."""

    def __init__(self, passes: Passes, budget_s: float) -> None:
        self._passes, self._budget_s = passes, budget_s

    @cached_property
    def pass_s(self) -> float:
        """Seconds that one exact forward pass takes, on a part of the batch if it is large. The shorter of
        two: the first one may be cold.
        """
        exact, times = self._passes.exact, [time.monotonic()]
        for _ in range(2):
            with suppress(Exception):  # a property says what the model raises
                _ = exact.again().loss
            times.append(time.monotonic())
        return min(after - before for before, after in pairwise(times))

    @property
    def step_s(self) -> float:
        """Seconds that a whole step may take, on a copy of the model: its backward passes take twice as long
        as its forward passes, which take as long for each number of the batch as an exact one.
        """
        share = numbers_in(self._passes.step_batch) / numbers_in(self._passes.unchanged.batch)
        return self._passes.copies.seconds + 3 * self.pass_s * share

    def seconds_of(self, cost: Cost) -> float:
        """Return about how many seconds it takes to run so many passes and steps."""
        seconds = cost.passes * self.pass_s
        if cost.steps:
            seconds += cost.steps * self.step_s
        return seconds

    def bytes_of(self, cost: Cost, *, gradient: bool) -> float:
        """Return how many bytes of weights, gradients and states so many passes and steps hold at a time,
        beside the model, the weights that are kept to be put back, and the exact model.

        What is on an accelerator is not counted: torch raises where it does not fit, which leaves out only
        that property.
        """
        parameters = [p for p in self._passes.model.parameters() if p.device.type == "cpu"]
        total = 0
        if gradient:
            # three sets in float64: of the loss, and of two sizes of one of its terms or of weights that move
            total += 3 * 8 * sum(p.numel() for p in parameters)
        if cost.steps:
            # a copy, its gradients and two states
            total += 4 * sum(p.nbytes for p in parameters)
        return total

    @cached_property
    def reaches_whole_batch(self) -> bool:
        """Whether passes of the whole batch, forward and backward, take at most a tenth of the budget."""
        if not self._passes.tests_a_part:
            return True
        share = numbers_in(self._passes.batch) / numbers_in(self._passes.unchanged.batch)
        return 4 * self.pass_s * share <= SHARE_OF_WHOLE_BATCH * self._budget_s

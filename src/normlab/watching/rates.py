"""Properties of a training's learning rates, over the steps that it takes."""

from __future__ import annotations

from collections.abc import Mapping

from normlab.checks.property import Violation


class RateHistory:
    """The rates of the steps taken so far, and those from an earlier part of the training."""

    def __init__(self, earlier: Mapping[int, float]) -> None:
        self._earlier = sorted(earlier.items())
        self._first: list[float] = []
        """The rates of the first two steps."""
        self.steps = 0
        self.idle: list[int] = []
        """Steps at a rate of 0 in which no weight moved."""

    def add(self, step: int, lr: float, moved: float) -> Violation | None:
        """Add a step, with its rate and the norm of its update; return what is wrong, if anything."""
        self.steps += 1
        if len(self._first) < 2:
            self._first.append(lr)
        if lr == moved == 0:
            self.idle.append(step)
            if self.idle[-2:] == [step - 1, step]:
                return Violation(
                    "schedule",
                    "",
                    f"the learning rate is 0 from step {step - 1} on, and no weight moves",
                    "step the scheduler once for each step of the optimizer",
                )
        return self._begins_anew() if self.steps == 2 else None

    def _begins_anew(self) -> Violation | None:
        """Check that a resumed training does not return to the rate of step 0 after another one."""
        if not self._earlier:
            return None
        (begin, first), (end, last) = self._earlier[0], self._earlier[-1]
        returns = self._first[0] == first != last
        stays_at_zero = first == self._first[1] == 0
        if begin != 0 or not returns or stays_at_zero:
            return None
        return Violation(
            "schedule",
            "",
            f"the rate begins anew at {first:.4g}, that of step 0, and was {last:.4g} in step {end}",
            "load the scheduler's state_dict with that of the optimizer",
        )

"""The coordinate check of a family, within its share of a budget; the trials' journal keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from normlab.config.units import duration
from normlab.errors import UserError
from normlab.scaling import FIRST_SEED
from normlab.scaling.coordinates import LEAST_SEEDS, Check
from normlab.scaling.family import SetupFamily
from normlab.trace.setup import Setup
from normlab.trials.journal import Journal

STEPS: Final = 10
SEEDS: Final = 3
SHARE: Final = 0.1
"""The check may take at most this share of the budget."""


def check_of(family: SetupFamily, seed: int = FIRST_SEED) -> Check:
    """The check that ``transfer`` makes of a family, with nothing measured yet."""
    seeds = range(seed, seed + SEEDS)
    return Check(family.build, family.sizes, family.axis, seeds, STEPS, family.parametrisation)


@dataclass
class BudgetCheck:
    """A check that ends in time; what the budget does not hold, or what raises, is left out with a reason."""

    family: SetupFamily
    seed: int
    budget_s: float
    journal: Journal
    answer: dict[str, Any] = field(default_factory=dict, init=False)
    """What it shows, as plain values, or why it was ``left_out``; empty until that is known."""
    seconds: float = field(default=0.0, init=False)
    """How long it will take."""

    @cached_property
    def check(self) -> Check:
        """What is measured."""
        check = check_of(self.family, self.seed)
        check.build = self._built
        return check

    def _built(self, size: int, seed: int) -> Setup:
        self.journal.mark()  # before each unit, during which the process may be killed
        return self.family.build(size, seed)

    def plan(self) -> None:
        """Use the check that is kept for these sizes, or find out for how many seeds the budget lasts."""
        for row in self.journal.rows:
            answer = row.get("answer", {})
            if row.get("check") == "coordinates" and [*answer.get("sizes", ())] == [*self.family.sizes]:
                self.answer = dict(answer)
        if self.answer:
            return
        until = self._until()
        self._try(lambda: self.check.estimate(until))
        if self.answer:
            return
        seed_s, left = self.check.seed_s, until - time.monotonic()
        if not 0 < LEAST_SEEDS * seed_s <= left:
            self._leave_out(LEAST_SEEDS * seed_s)
            return
        self.check.seeds = self.check.seeds[: int(left / seed_s)]
        self.seconds = seed_s * len(self.check.seeds)

    def run(self) -> None:
        """Measure what was planned, and keep the answer."""
        if self.answer:
            return
        start, until = self.journal.seconds, self._until()
        self._try(lambda: self.check.run(until))
        if len(self.check.done) >= LEAST_SEEDS:
            self._try(lambda: self.answer.update(self.check.answer().to_dict()))
        elif not self.answer:
            self._leave_out(LEAST_SEEDS * self.check.seed_s)
        if "left_out" not in self.answer:
            seconds = self.journal.seconds - start
            self.journal.append({"check": "coordinates", "answer": self.answer, "seconds": seconds})

    def _until(self) -> float:
        """When a check that begins now must end, on the monotonic clock."""
        return time.monotonic() + min(SHARE * self.budget_s, self.budget_s - self.journal.seconds)

    def _try(self, part: Callable[[], None]) -> None:
        """Run a part of the check; if it fails, which does not matter to the trials, keep the reason."""
        try:
            part()
        except UserError as error:
            self.answer = {"left_out": str(error)}
        except Exception as error:  # any model may raise anything
            self.answer = {"left_out": f"it raised {type(error).__name__}: {error}"}

    def _leave_out(self, need: float) -> None:
        """Say what time it needs, and what budget that takes; ``need`` is 0 if no time was left for it."""
        why, more = "no time is left for it", ""
        if need:
            whole = duration(max(need / SHARE, self.journal.seconds + need))
            why = f"{LEAST_SEEDS} seeds take {duration(need)} or more"
            more = f"; a budget of {whole} would hold it"
        self.answer = {"left_out": f"{why}, and a tenth of the budget is the most{more}"}

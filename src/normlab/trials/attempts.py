"""The trials of one variant: measure its own first steps, then train at a rate until a deadline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

from normlab.base.io import from_plain
from normlab.base.units import duration, short_rate
from normlab.errors import UserError
from normlab.setups.setup import Setup, positive, shown
from normlab.trace.restore import restored, same_random_state
from normlab.trials import STEPS
from normlab.trials.change import Variant
from normlab.trials.course import Course, read_course
from normlab.trials.journal import Journal
from normlab.trials.scale import Scale, read_scale
from normlab.trials.search import LAST, hopeless
from normlab.trials.training import Training, first_steps, train
from normlab.trials.verdict import Trial

LEAST_STEPS: Final = 2 * LAST
SHOWN: Final = 16
"""Within how many batches the first steps of the optimizer must come."""
MEASURING: Final = 0.02
"""The share of the budget after which measuring ends."""
LATE: Final = "late"
Progress = Callable[[str, int, int], None]
"""``progress(line, done, of)``, called after each step: how many trials are done, of about how many."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What was asked for."""

    steps: int = STEPS
    budget_s: float = 600.0
    """Infinite for no limit: then nothing depends on the speed of the machine."""
    rates: Sequence[float] = ()
    seed: int = 0
    folder: str | Path | None = None
    progress: Progress | None = None
    announce: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if not is_number or self.steps < LEAST_STEPS:
            raise UserError(
                f"steps is {shown(self.steps)}, but must be a whole number, at least {LEAST_STEPS}: the "
                f"mean of {LAST} losses counts"
            )
        if self.budget_s != math.inf and not positive(self.budget_s):
            raise UserError(
                f"budget_s is {shown(self.budget_s)}, but must be a number of seconds above 0, or math.inf "
                "for no limit"
            )
        for rate in self.rates:
            if not positive(rate):
                raise UserError(f"rates has {shown(rate)}, but must hold numbers above 0, as in 1e-4 1e-3")


def batches_of(setup: Setup, seed: int) -> Callable[[int], list[Any]]:
    """Return a function that gives the first so many batches of a training."""

    @lru_cache(maxsize=2)  # those of the steps now, and of the last when trials grow longer
    def first(number: int) -> list[Any]:
        with restored(setup), same_random_state(seed):
            return list(islice(setup.stream(), number))

    return first


@dataclass(frozen=True)
class _FirstSteps:
    """What the first steps of a setup showed: its rates, how to read its losses, and the time of a step."""

    course: Course
    scale: Scale
    seconds: list[float]
    """The time of a step: as measured first, then in each trial."""
    took: float
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else a report should say of them."""

    @property
    def step_s(self) -> float:
        """The expected time of a step."""
        return median(self.seconds)


def kept_trial(journal: Journal, name: str, rate: float, steps: int) -> Trial | None:
    """The trial at a rate that the journal holds for the variant of this name, if there is one."""
    row = journal.row(trial=name, rate=rate, steps=steps)
    if row is None:
        return None
    return Trial(rate, steps, tuple(map(float, row["losses"])), row["stopped"], row["seconds"])


@dataclass
class Attempts:
    """Trials of one variant, each done only once: those in the journal are read from there.

    They end ``deadline`` seconds after the journal's clock began.
    """

    variant: Variant
    plan: Plan
    batches: Callable[[int], list[Any]]
    journal: Journal
    deadline: float
    measured_by: Attempts | None = None
    """Attempts whose first steps count for these, too: such as those of the same model with another seed."""

    @cached_property
    def measured(self) -> _FirstSteps:
        """Rates, targets and the time of a step. Raises UserError if no step trains the copy."""
        if self.measured_by is not None:
            return self.measured_by.measured
        row = self.journal.row(measured=self.variant.change)
        if row is None:
            row = self._measure()
            self.journal.append(row)
        return _FirstSteps(
            course=from_plain(Course, row["course"]),
            scale=from_plain(Scale, row["scale"]),
            seconds=[float(row["step_s"])],
            took=float(row["seconds"]),
            facts=row.get("facts", {}),
        )

    def _measure(self) -> dict[str, Any]:
        """Take the first steps, and return what they show as a row of the journal."""
        setup, steps, warmup = self.variant.setup, self.plan.steps, self.variant.warmup_steps
        start, limit = self.journal.seconds, MEASURING * self.plan.budget_s
        batches, options = self.batches(steps), self.variant.options
        seen = first_steps(setup, batches[:SHOWN], seed=self.plan.seed, groups=options, limit_s=limit)
        course = read_course(setup, seen)
        if warmup is not None:
            course = replace(course, warmup=warmup / (setup.declare.steps or steps), longest=warmup)
        scale = read_scale(setup, batches, limit, seen.losses[0])
        return {
            "measured": self.variant.change,
            "course": asdict(course),
            "scale": asdict(scale),
            "facts": dict(seen.not_copied),
            "step_s": median(seen.seconds[1:] or seen.seconds),  # the first one also warms up the machine
            "seconds": self.journal.seconds - start,
        }

    def trial(
        self, rate: float, steps: int, leads: Sequence[float] = (), tell: Tell | None = None
    ) -> Trial | str:
        """The trial at a rate, or why the budget does not hold it. It ends early if it is ``hopeless``
        compared with the losses of the leading one; ``tell`` is called with a line after each step.
        """
        name = self.variant.change
        kept = kept_trial(self.journal, name, rate, steps)
        if kept is not None:
            return kept
        ended = self.journal.row(ended_by=name, budget_s=self.plan.budget_s)
        if ended is not None:
            return str(ended["why"])
        start, need = self.journal.seconds, steps * self.measured.step_s
        seen = None
        if start + need <= self.deadline:
            seen = self._trained(rate, steps, leads, tell)
        if seen is None or seen.stopped == LATE:
            why = f"the budget does not hold {steps} steps at {short_rate(rate)}, about {duration(need)}"
            self.journal.append({"ended_by": name, "budget_s": self.plan.budget_s, "why": why})
            return why
        trial = Trial(rate, steps, tuple(seen.losses), seen.stopped, self.journal.seconds - start)
        self.journal.append({"trial": name, **asdict(trial)})
        self.measured.seconds.append(trial.seconds / max(len(seen.losses), 1))
        return trial

    def _trained(self, rate: float, steps: int, leads: Sequence[float], tell: Tell | None) -> Training:
        """A training to its end, or until it is hopeless or the budget is spent."""
        weight = self.measured.scale.weight

        def enough(seen: Training) -> str:
            now = len(seen.losses)
            self.journal.mark()
            if tell is not None:
                tell(f"{short_rate(rate)}, step {now} of {steps}: loss {seen.losses[-1]:.3f}")
            if self.journal.seconds > self.deadline and now < steps:
                return LATE
            return hopeless(seen.losses, steps, leads, weight)

        setup, options = self.variant.setup, self.variant.options
        rate_of = self.measured.course.at(rate, steps)
        return train(setup, self.batches(steps), rate_of, seed=self.plan.seed, groups=options, enough=enough)

"""The trials of one setup: measure its own first steps, then try rates until a deadline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

from normlab.config.units import count, duration, short_rate
from normlab.errors import UserError
from normlab.trace.setup import Setup, positive, shown
from normlab.trace.tensors import refusal, unwrap
from normlab.trace.untouched import same_random_state, untouched
from normlab.trials import STEPS
from normlab.trials.change import Variant
from normlab.trials.journal import Journal
from normlab.trials.scale import Scale, read_scale
from normlab.trials.search import FARTHEST, LAST, hopeless, next_octave
from normlab.trials.training import Course, Enough, RateOf, Training, read_course, train
from normlab.trials.trials import Trial, Trials

LEAST_STEPS: Final = 2 * LAST
OWN_STEPS: Final = 4
"""Steps of the optimizer at its own rates before the trials: they show the time of a step and a warm-up."""
SHOWN: Final = 16
"""Batches in which these must come."""
MEASURING: Final = 0.02
"""The share of the budget after which measuring ends."""
LATE: Final = "late"
LONGER: Final = 16
"""How many times the steps of the first trials the longest may have, where nothing is learnt before."""
DIGITS: Final = 3
"""Of losses that are compared: where rates differ by less, they move nothing, and higher ones are tried."""
Progress = Callable[[str, int, int], None]
"""``progress(line, done, of)``, called after each step with the trials that are done, and about how many."""


@dataclass(frozen=True)
class Plan:
    """What was asked for."""

    steps: int = STEPS
    budget_s: float = 600.0
    rates: Sequence[float] = ()
    seed: int = 0
    folder: str | Path | None = None
    progress: Progress | None = None
    announce: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if not whole or self.steps < LEAST_STEPS:
            raise UserError(
                f"steps is {shown(self.steps)}, and must be a whole number of {LEAST_STEPS} at least: the "
                f"mean of {LAST} losses counts"
            )
        if not positive(self.budget_s):
            raise UserError(f"budget_s is {shown(self.budget_s)}, and must be a number of seconds above 0")
        if wrong := [rate for rate in self.rates if not positive(rate)]:
            raise UserError(f"rates has {shown(wrong[0])}, and must hold numbers above 0, as in 1e-4 1e-3")


def batches_of(setup: Setup, seed: int) -> Callable[[int], list[Any]]:
    """A function of a number to so many batches of a training, always from its start."""

    @lru_cache(maxsize=2)  # of trials that grow, the last ones
    def first(number: int) -> list[Any]:
        with untouched(setup), same_random_state(seed):
            return list(islice(setup.stream(), number))

    return first


@dataclass
class Scan:
    """The trials of one variant, which end ``deadline`` seconds after the journal's clock began."""

    variant: Variant
    plan: Plan
    batches: Callable[[int], list[Any]]
    journal: Journal
    deadline: float
    about: int = 0
    """How many trials are expected."""
    course: Course = field(init=False)
    scale: Scale = field(init=False)
    seconds: list[float] = field(init=False)
    """Of a step, when it was measured and in each trial."""
    tried: list[Trial] = field(default_factory=list, init=False)

    def measure(self) -> float:
        """Read rates, targets and the time of a step, once; return the seconds that this took."""
        name, setup, steps = self.variant.change, self.variant.setup, self.plan.steps
        if (row := self.journal.row(measured=name)) is None:
            start, seen = self.journal.seconds, self._own_steps()
            course = read_course(setup, seen)
            if (warmup := self.variant.warmup_steps) is not None:
                course = replace(course, warmup=warmup / (setup.declare.steps or steps), longest=warmup)
            limit = MEASURING * self.plan.budget_s
            scale = read_scale(setup, self.batches(steps), limit, seen.losses[0])
            row = dict[str, Any](measured=name, course=asdict(course), scale=asdict(scale))
            row["step_s"] = median(seen.seconds[1:] or seen.seconds)
            row["seconds"] = self.journal.seconds - start
            self.journal.append(row)
        self.course, self.scale = Course(**row["course"]), Scale(**row["scale"])
        self.seconds = [float(row["step_s"])]
        return float(row["seconds"])

    def _own_steps(self) -> Training:
        """The first steps at the setup's own rates. Raises UserError where they do not train the copy."""
        setup, limit = self.variant.setup, MEASURING * self.plan.budget_s

        def enough(seen: Training) -> str:
            late = sum(seen.seconds) > limit and len(seen.rates) > 1
            return "seen" if late or len(seen.rates) >= OWN_STEPS else ""

        try:
            seen = self._train(self.batches(self.plan.steps)[:SHOWN], None, enough)
        except UserError:
            raise
        except Exception as error:
            who = "step" if setup.step is not None else "loss" if setup.loss is not None else "the model"
            raise UserError(refusal(who, setup.batch, error)) from error
        if not seen.ran:
            raise UserError(
                "loss, or step, runs another model than it is given: call the one that it receives"
            )
        if not seen.rates:
            raise UserError(
                f"step() of the optimizer is not called in {count(len(seen.losses), 'step')}: call that of "
                "the optimizer that step(model, batch, optimizer, scheduler) receives"
            )
        return seen

    def run(self, steps: int) -> Trials:
        """Try the rates of the plan, or scan from the setup's own.

        While nothing is learnt, go on at twice the steps: with the rates that still fall, or, where each is
        on a plateau, with the lowest, which may leave it as higher ones do not.
        """
        queue, first = [*self.plan.rates] or [self.course.rate], steps
        longest = min(LONGER * steps, self.variant.setup.declare.steps or LONGER * steps)
        while True:
            answer = self.answer(steps, self._round(steps, queue, longer=steps > first))
            whole = [t for t in answer.rates if not t.stopped]
            queue = [t.rate for t in sorted(whole, key=lambda t: t.loss) if t.falls]
            queue = queue or [t.rate for t in whole[:1]]
            steps *= 2
            if answer.cut or answer.learns or answer.unmoved or not queue or steps > longest:
                return answer

    def _round(self, steps: int, queue: list[float], *, longer: bool) -> str:
        """Try the rates of a queue, then those that a scan adds; return what ended it early."""
        while queue or (queue := self._next(steps, longer=longer)):
            rate, queue = queue[0], queue[1:]
            trial = self._kept(rate, steps) or self._new(rate, steps)
            if isinstance(trial, str):
                return trial
            self.tried.append(trial)
        return ""

    def _next(self, steps: int, *, longer: bool) -> list[float]:
        """The rate that a scan tries next; none where it is done, or where going on would show nothing."""
        answer, first = self.answer(steps), self.course.rate
        if self.plan.rates or (longer and not answer.learns):
            return []
        octaves = {t.rate: round(math.log2(t.rate / first)) for t in answer.rates}
        scores = {octaves[rate]: round(loss, DIGITS) for rate, loss in answer.losses.items()}
        errors = {octaves[rate]: error for rate, error in answer.errors.items()}
        octave = next_octave(scores, self.scale.reference, errors)
        stuck = not (answer.learns or answer.unmoved or answer.rates[0].falls)
        if octave is None and stuck and min(scores) > -FARTHEST:
            octave = min(scores) - 2  # all are on a plateau: one that is still on its way there may leave it
        return [] if octave is None else [first * 2.0**octave]

    def _kept(self, rate: float, steps: int) -> Trial | str | None:
        """A trial of an earlier call, or why that had none."""
        name = self.variant.change
        if (row := self.journal.row(trial=name, rate=rate, steps=steps)) is not None:
            return Trial(rate, steps, tuple(map(float, row["losses"])), row["stopped"], row["seconds"])
        return (self.journal.row(cut=name, budget_s=self.plan.budget_s) or {}).get("why")

    def _new(self, rate: float, steps: int) -> Trial | str:
        """Do a trial, or say why the budget does not hold it."""
        name, start, need = self.variant.change, self.journal.seconds, steps * median(self.seconds)
        seen = self._trained(rate, steps) if start + need <= self.deadline else None
        if seen is None or seen.stopped == LATE:
            why = f"the budget does not hold {steps} steps at {short_rate(rate)}, about {duration(need)}"
            self.journal.append({"cut": name, "budget_s": self.plan.budget_s, "why": why})
            return why
        trial = Trial(rate, steps, tuple(seen.losses), seen.stopped, self.journal.seconds - start)
        self.journal.append({"trial": name, **asdict(trial)})
        self.seconds.append(trial.seconds / max(len(seen.losses), 1))
        return trial

    def _trained(self, rate: float, steps: int) -> Training:
        """A training to its end, or until it is hopeless, or the budget ends."""
        answer, progress = self.answer(steps), self.plan.progress
        leads = answer.best if answer.learns and answer.steps == steps else None

        def enough(seen: Training) -> str:
            now = len(seen.losses)
            if progress is not None:
                line = f"{short_rate(rate)}, step {now} of {steps}: loss {seen.losses[-1]:.3f}"
                progress(line, len(self.tried), max(self.about, len(self.tried) + 1))
            if self.journal.seconds > self.deadline and now < steps:
                return LATE
            return hopeless(seen.losses, steps, leads.losses if leads else (), self.scale.weight)

        return self._train(self.batches(steps), self.course.at(rate, steps), enough)

    def _train(self, batches: Sequence[Any], rate_of: RateOf | None, enough: Enough) -> Training:
        setup, options = self.variant.setup, self.variant.options
        return train(setup, batches, rate_of, seed=self.plan.seed, groups=options, enough=enough)

    def answer(self, steps: int, cut: str = "") -> Trials:
        """What the trials of so many steps say; of the longest, where there are none of these."""
        if self.tried and not any(t.steps == steps for t in self.tried):
            steps = self.tried[-1].steps
        scale, model = self.scale, self.variant.setup.model
        facts = {
            "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
            "step": f"{median(self.seconds):.2g} s",
            "warm-up": f"{self.course.warmup:.0%} of a trial" if self.course.warmup else "none",
        }
        if scale.unigram is not None:
            facts["targets"] = f"{scale.targets:,}, of entropy {scale.unigram:.3f} nats"
        return Trials(
            model=type(unwrap(model)).__name__,
            steps=steps,
            today=self.course.rate,
            scale=scale,
            tried=tuple(self.tried),
            warmup=self.course.warmup,
            cut=cut,
            change=self.variant.change,
            seconds=self.journal.seconds,
            facts=facts,
        )

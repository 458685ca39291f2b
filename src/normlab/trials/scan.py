"""The trials of one setup: measure its own first steps, then try rates until a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from statistics import median
from typing import Any, Final

from normlab.errors import UserError
from normlab.spec.units import count, duration, short_rate
from normlab.trace.setup import Setup
from normlab.trace.tensors import refusal, unwrap
from normlab.trace.untouched import same_random_state, untouched
from normlab.trials.change import Variant
from normlab.trials.journal import Journal
from normlab.trials.scale import Scale, read_scale
from normlab.trials.search import FARTHEST, hopeless, next_octave
from normlab.trials.training import Course, Enough, RateOf, Training, read_course, train
from normlab.trials.trials import Trial, Trials

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


@dataclass
class Batches:
    """The batches of a training from its start; those of a shorter one are the first of them."""

    setup: Setup
    seed: int
    read: list[Any] = field(default_factory=list)

    def first(self, number: int) -> list[Any]:
        """So many, read from the start each time that more are asked for."""
        if len(self.read) < number:
            with untouched(self.setup), same_random_state(self.seed):
                self.read = list(islice(self.setup.stream(), number))
        return self.read[:number]


@dataclass
class Clock:
    """Seconds that trials have taken, with those of earlier calls that were stopped."""

    spent: float
    start: float = field(default_factory=time.monotonic)

    @property
    def now(self) -> float:
        """Seconds since the beginning of the first call, without the time between calls."""
        return self.spent + time.monotonic() - self.start


@dataclass
class Scan:
    """The trials of one variant, which end ``deadline`` seconds after the clock began."""

    variant: Variant
    batches: Batches
    journal: Journal
    clock: Clock
    deadline: float
    budget_s: float
    progress: Progress | None = None
    tried: list[Trial] = field(default_factory=list)
    about: int = 0
    """How many trials are expected."""

    def measure(self, steps: int) -> float:
        """Read rates, targets and the time of a step, once; return the seconds that this took."""
        name = self.variant.change
        if (row := self.journal.row(measured=name)) is None:
            start = self.clock.now
            seen = self._own_steps(steps)
            setup, batches = self.variant.setup, self.batches.first(steps)
            course = read_course(setup, seen)
            if (warmup := self.variant.warmup_steps) is not None:
                course = replace(course, warmup=warmup / (setup.declare.steps or steps), longest=warmup)
            scale = read_scale(setup, batches, MEASURING * self.budget_s, seen.losses[0])
            row = dict[str, Any](measured=name, course=asdict(course), scale=asdict(scale))
            row["step_s"] = median(seen.seconds[1:] or seen.seconds)
            row["seconds"] = self.clock.now - start
            self.journal.append(row)
        self.course = Course(**row["course"] | {"peaks": tuple(row["course"]["peaks"])})
        self.scale = Scale(**row["scale"])
        self.seconds = [float(row["step_s"])]
        return float(row["seconds"])

    def _own_steps(self, steps: int) -> Training:
        """The first steps at the setup's own rates. Raises UserError where they do not train the copy."""
        setup, limit = self.variant.setup, MEASURING * self.budget_s

        def enough(seen: Training) -> str:
            late = sum(seen.seconds) > limit and len(seen.rates) > 1
            return "seen" if late or len(seen.rates) >= OWN_STEPS else ""

        try:
            seen = self._train(self.batches.first(steps)[:SHOWN], None, enough)
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

    def run(self, steps: int, rates: Sequence[float]) -> Trials:
        """Try these rates, or scan from the setup's own.

        While nothing is learnt, go on at twice the steps: with the rates that still fall, or, where each is
        on a plateau, with the lowest, which may leave it as higher ones do not.
        """
        queue, answer = [*rates] or [self.course.rate], self.answer(steps)
        longest = min(LONGER * steps, self.variant.setup.declare.steps or LONGER * steps)
        longer = False
        while queue and not answer.cut and (steps <= longest or not longer):
            cut = self._round(steps, queue, scan=not rates, longer=longer)
            answer = self.answer(steps, cut)
            whole = [t for t in answer.rates if not t.stopped]
            ranked = sorted((t for t in whole if t.falls), key=lambda t: t.loss) or whole[:1]
            queue = [t.rate for t in ranked if not (answer.learns or answer.unmoved)]
            steps, longer = 2 * steps, True
        return answer

    def _round(self, steps: int, queue: list[float], *, scan: bool, longer: bool) -> str:
        """Try the rates of a queue, then those that a scan adds; return what ended it early."""
        done = list[Trial]()
        while queue or (scan and (queue := self._next(steps, done, longer=longer))):
            rate, queue = queue[0], queue[1:]
            leader = min(done, key=lambda t: t.loss, default=None)
            trial = self._kept(rate, steps) or self._new(rate, steps, leader)
            if isinstance(trial, str):
                return trial
            done.append(trial)
            self.tried.append(trial)
        return ""

    def _next(self, steps: int, done: Sequence[Trial], *, longer: bool) -> list[float]:
        """The rate that a scan tries next; none where it is done, or where going on would show nothing."""
        answer, first = self.answer(steps), self.course.rate
        if longer and not answer.learns:
            return []
        at = {t.rate: round(math.log2(t.rate / first)) for t in done}
        scores = {at[rate]: round(answer.losses[rate], DIGITS) for rate in at}
        errors = {at[rate]: answer.errors[rate] for rate in at if answer.errors}
        octave = next_octave(scores, self.scale.reference, errors)
        stuck = not (answer.learns or answer.unmoved or answer.rates[0].falls) if done else False
        if octave is None and stuck and min(scores) > -FARTHEST:
            octave = min(scores) - 2  # all are on a plateau: one that is still on its way there may leave it
        return [] if octave is None else [first * 2.0**octave]

    def _kept(self, rate: float, steps: int) -> Trial | str | None:
        """A trial of an earlier call, or why that had none."""
        name = self.variant.change
        if (row := self.journal.row(trial=name, rate=rate, steps=steps)) is not None:
            return Trial(rate, steps, tuple(map(float, row["losses"])), row["stopped"], row["seconds"])
        row = self.journal.row(cut=name, budget_s=self.budget_s)
        return None if row is None else str(row["why"])

    def _new(self, rate: float, steps: int, leader: Trial | None) -> Trial | str:
        """Do a trial, or say why the budget does not hold it."""
        name, start, need = self.variant.change, self.clock.now, steps * median(self.seconds)
        seen = self._trained(rate, steps, leader) if start + need <= self.deadline else None
        if seen is None or seen.stopped == LATE:
            why = f"the budget does not hold {steps} steps at {short_rate(rate)}, about {duration(need)}"
            self.journal.append({"cut": name, "budget_s": self.budget_s, "why": why})
            return why
        trial = Trial(rate, steps, tuple(seen.losses), seen.stopped, self.clock.now - start)
        self.journal.append({"trial": name, **asdict(trial)})
        self.seconds.append(trial.seconds / max(len(seen.losses), 1))
        return trial

    def _trained(self, rate: float, steps: int, leader: Trial | None) -> Training:
        """A training to its end, or until it is hopeless, or the budget ends."""
        ahead = leader is not None and not leader.stopped and self.answer(steps).learns
        best = leader.losses if leader is not None and ahead else ()

        def enough(seen: Training) -> str:
            now = len(seen.losses)
            if self.progress is not None:
                line = f"{short_rate(rate)}, step {now} of {steps}: loss {seen.losses[-1]:.3f}"
                self.progress(line, len(self.tried), max(self.about, len(self.tried) + 1))
            if self.clock.now > self.deadline and now < steps:
                return LATE
            return hopeless(seen.losses, steps, best, self.scale.weight)

        return self._train(self.batches.first(steps), self.course.at(rate, steps), enough)

    def _train(self, batches: Sequence[Any], rate_of: RateOf | None, enough: Enough) -> Training:
        setup, options = self.variant.setup, self.variant.options
        return train(setup, batches, rate_of, seed=self.batches.seed, groups=options, enough=enough)

    def answer(self, steps: int, cut: str = "") -> Trials:
        """What the trials of so many steps say; of the longest, where there are none of these."""
        if self.tried and not any(t.steps == steps for t in self.tried):
            steps = self.tried[-1].steps
        scale, setup = self.scale, self.variant.setup
        facts = {
            "parameters": f"{sum(p.numel() for p in setup.model.parameters()):,}",
            "step": f"{median(self.seconds):.2g} s",
            "warm-up": f"{self.course.warmup:.0%} of a trial" if self.course.warmup else "none",
        }
        if scale.unigram is not None:
            facts["targets"] = f"{scale.targets:,}, of entropy {scale.unigram:.3f} nats"
        return Trials(
            model=type(unwrap(setup.model)).__name__,
            steps=steps,
            today=self.course.rate,
            scale=scale,
            tried=tuple(self.tried),
            warmup=self.course.warmup,
            cut=cut,
            change=self.variant.change,
            seconds=self.clock.now,
            facts=facts,
        )

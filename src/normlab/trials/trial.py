"""``trial``: train copies of a setup at several rates, for a short while, and say which of them train."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

from torch import nn

from normlab.checks.check import WORDS, Progress
from normlab.errors import UserError
from normlab.spec.units import count, duration
from normlab.trace.setup import Loss, Setup, refuse_unknown, shown
from normlab.trace.tensors import unwrap
from normlab.trace.untouched import same_globals, same_random_state, untouched
from normlab.trials.change import Variant, variants
from normlab.trials.journal import Journal, fingerprint
from normlab.trials.scale import Scale, read_scale
from normlab.trials.search import LAST, hopeless, next_octave
from normlab.trials.training import Course, Training, read_course, train
from normlab.trials.trials import Trial, Trials, short

OWN_STEPS: Final = 4
"""Steps of the optimizer at its own rates before the trials: they show the time of a step and a warm-up."""
SHOWN: Final = 16
"""Batches in which these must come."""
FEWEST: Final = 3
"""Trials below which nothing is compared; where the budget does not hold them, they have fewer steps."""
WHOLE: Final = 8
"""Trials that a scan takes, with both sides and the upper edge."""
LEAST_STEPS: Final = 2 * LAST
READING: Final = 0.02
"""The share of the budget in which targets are read."""
OPTIONS: Final = ("seed", "folder", "progress", "announce")


def trial(
    model: nn.Module | Setup,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    steps: int = 100,
    budget_s: float = 600.0,
    rates: Sequence[float] | None = None,
    change: str | Sequence[str] | Mapping[str, Setup] = (),
    **rest: Any,
) -> Trials:
    """Train copies of a setup at several learning rates, ``steps`` steps each, and say which of them train.

    ``model`` and ``batch``, or one ``Setup``; ``rest`` are the setup's other fields (optimizer, scheduler,
    step, make, lr, declare), and ``seed`` of the trials' random states, ``folder`` in which they are kept,
    ``progress(name, done, of)``, and ``announce(sentence)``, called with the plan before the first trial.

    Every trial begins at the same weights, and sees the same batches and random numbers; ``Course`` says
    which rates its groups have. The scan begins at the setup's own rate; ``rates`` replaces it. ``change``
    repeats it with one thing changed. Where nothing is learnt in so few steps, trials at the rates that still
    fall are twice as long, until the budget ends. Ctrl-C ends the scan, and gives the answer so far. With a
    ``folder`` the same call goes on where it was stopped. Nothing of the setup changes.

    Raises UserError for a setup that cannot be trained, and for a folder that holds another one's trials.
    """
    for word in rest:
        refuse_unknown(word, (*WORDS, *OPTIONS), "trial")
    options = {name: rest.pop(name) for name in OPTIONS if name in rest}
    if isinstance(model, Setup) and (batch is not None or loss is not None or rest):
        raise UserError("give a Setup alone, or a model with its batch; dataclasses.replace changes a Setup")
    setup = model if isinstance(model, Setup) else Setup(model, batch, loss, **rest)
    plan = Plan(steps, budget_s, tuple(rates or ()), **options)
    if setup.optimizer is None:
        raise UserError("no optimizer was handed over: pass optimizer=, as in torch.optim.AdamW(…, lr=1e-3)")
    with same_globals():
        return _walk(variants(setup, change, steps), plan)


@dataclass(frozen=True)
class Plan:
    """What was asked for."""

    steps: int = 100
    budget_s: float = 600.0
    rates: tuple[float, ...] = ()
    seed: int = 0
    folder: str | Path | None = None
    progress: Progress | None = None
    announce: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        least = f"a whole number of {LEAST_STEPS} at least"
        whole = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if not whole or self.steps < LEAST_STEPS:
            raise UserError(
                f"steps is {shown(self.steps)}, and must be {least}: the mean of {LAST} losses counts"
            )
        if not _number(self.budget_s):
            raise UserError(f"budget_s is {shown(self.budget_s)}, and must be a number of seconds above 0")
        if wrong := [rate for rate in self.rates if not _number(rate)]:
            raise UserError(f"rates has {shown(wrong[0])}, and must hold numbers above 0, as in 1e-4 1e-3")


def _number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < math.inf


def _walk(every: Sequence[Variant], plan: Plan) -> Trials:
    """Measure, plan, scan and answer, for the setup and for each change of it on the same batches."""
    batches = first_batches(every[0].setup, plan.steps, plan.seed)
    asked = {"steps": plan.steps, "seed": plan.seed, "rates": plan.rates, "change": [v.change for v in every]}
    folder = None if plan.folder is None else Path(plan.folder)
    digests = fingerprint(every[0].setup, batches, **asked) if folder else {}
    journal = Journal(folder, digests)
    clock = Clock(spent=sum(row.get("seconds", 0.0) for row in journal.rows))
    answers = []
    for i, variant in enumerate(every):
        scan = Scan(variant, plan, journal, clock, plan.budget_s * (i + 1) / len(every), batches)
        answers.append(scan.run())
        if answers[-1].cut == INTERRUPTED:
            break
    return replace(answers[0], beside=tuple(answers[1:]), seconds=clock.now)


def first_batches(setup: Setup, steps: int, seed: int) -> list[Any]:
    """The batches of a training from its start; those of a shorter one are the first of these."""
    with untouched(setup), same_random_state(seed):
        return list(islice(setup.stream(), steps))


@dataclass
class Clock:
    """Seconds that trials have taken, with those of earlier calls that were stopped."""

    spent: float
    start: float = field(default_factory=time.monotonic)

    @property
    def now(self) -> float:
        return self.spent + time.monotonic() - self.start


INTERRUPTED: Final = "it was interrupted"


@dataclass
class Scan:
    """The trials of one variant until a deadline."""

    variant: Variant
    plan: Plan
    journal: Journal
    clock: Clock
    deadline: float
    batches: list[Any]
    tried: list[Trial] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of a step, in the trials so far."""

    def run(self) -> Trials:
        """Measure, plan, scan, and go on at twice the steps while nothing is learnt."""
        measured = self._measured()
        self.course = Course(tuple(measured["peaks"]), measured["warmup"])
        self.scale = Scale(**measured["scale"])
        self.seconds.append(measured["step_s"])
        steps, plan = measured["steps"], measured["plan"]
        if self.plan.announce is not None:
            self.plan.announce(f"With {self.variant.change}: {plan}" if self.variant.change else plan)
        cut = "" if steps >= LEAST_STEPS else plan
        queue = [*self.plan.rates] or [self.course.rate]
        answer = self._answer(steps, plan, cut)
        try:
            while not cut and queue:
                cut = self._scan(steps, queue)
                answer = self._answer(steps, plan, cut)
                queue = [] if answer.learns else [t.rate for t in sorted(answer.rates, key=_loss) if t.falls]
                steps *= 2
        except KeyboardInterrupt:
            if not self.tried:
                raise
            answer = self._answer(self.tried[-1].steps, plan, INTERRUPTED)
        return answer

    # ------------------------------------------------------------------------------------------ before it
    def _measured(self) -> dict[str, Any]:
        """Rates, scale, time of a step and the plan that follows, once; they are kept with the trials."""
        if (row := self.journal.row(measured=self.variant.change)) is not None:
            return row
        start, setup = self.clock.now, self.variant.setup
        seen = self._own_steps()
        course = read_course(setup, seen)
        if (warmup := self.variant.warmup_steps) is not None:
            course = replace(course, warmup=warmup / (setup.declare.steps or self.plan.steps))
        step_s = median(seen.seconds[1:] or seen.seconds)
        scale = read_scale(setup, self.batches, READING * self.plan.budget_s)
        steps, plan = self._planned(step_s)
        row = {
            "measured": self.variant.change,
            **{"peaks": course.peaks, "warmup": course.warmup, "scale": asdict(scale)},
            **{"step_s": step_s, "steps": steps, "plan": plan, "seconds": self.clock.now - start},
        }
        self.journal.append(row)
        return row

    def _own_steps(self) -> Training:
        """The first steps at the setup's own rates. Raises UserError where they do not train the copy."""
        setup, limit = self.variant.setup, self.plan.budget_s / 20

        def enough(seen: Training) -> str:
            return "seen" * (
                len(seen.rates) >= OWN_STEPS or (sum(seen.seconds) > limit and len(seen.rates) > 1)
            )

        try:
            seen = self._train(self.batches[:SHOWN], None, enough)
        except UserError:
            raise
        except Exception as error:
            who = "step" if setup.step is not None else "loss" if setup.loss is not None else "the model"
            raise UserError(f"{who} raised {type(error).__name__} on the first batch: {error}") from error
        if not seen.ran:
            raise UserError(
                "loss, or step, runs another model than it is given; call the model that it receives"
            )
        if not seen.rates:
            raise UserError(
                f"step() of the optimizer is never called in {count(len(seen.losses), 'batch')}: call that of "
                "the optimizer that step(model, batch, optimizer, scheduler) receives"
            )
        return seen

    def _planned(self, step_s: float) -> tuple[int, str]:
        """The steps of a trial, and what the budget holds and can tell."""
        left = max(self.deadline - self.clock.now, 0.0)
        asked, planned = self.plan.steps, self.variant.setup.declare.steps
        steps = asked if FEWEST * asked * step_s <= left else int(left / step_s / FEWEST)
        whole = duration(WHOLE * asked * step_s + self.clock.now)
        if steps < LEAST_STEPS:
            need = duration(FEWEST * asked * step_s)
            return steps, (
                f"a step takes {duration(step_s)}, so that {FEWEST} trials of {asked} steps take {need}: too "
                f"short to tell anything; a budget of {whole} would give a range"
            )
        trials = int(left / (steps * step_s))
        text = f"{duration(left)} hold {trials} trials of {steps} steps, {duration(steps * step_s)} each"
        if planned:
            text += f", {trials * steps / planned:.1%} of the {planned:,} steps that are planned"
        if steps < asked:
            return steps, f"{text}: not enough for a range at {asked} steps; {whole} would be"
        if trials < WHOLE:
            return steps, f"{text}: rates can be compared, perhaps not their range; {whole} would be enough"
        return steps, f"{text}: enough for a range"

    # --------------------------------------------------------------------------------------------- the scan
    def _scan(self, steps: int, queue: list[float]) -> str:
        """Try rates of a queue, then those that ``next_octave`` names; return why that ended early."""
        first, done = self.course.rate, list[Trial]()
        while True:
            if not queue:
                answer = self._answer(steps, "", "")
                if self.plan.rates or answer.nothing_moves or (steps > self.plan.steps and not answer.learns):
                    return ""
                scores = {round(math.log2(t.rate / first)): self.scale.nats(t.loss) for t in done}
                if (octave := next_octave(scores, self.scale.reference)) is None:
                    return ""
                queue = [first * 2.0**octave]
            rate, queue = queue[0], queue[1:]
            found = self._try(rate, steps, min(done, key=_loss, default=None))
            if isinstance(found, str):
                return found
            done.append(found)
            self.tried.append(found)

    def _try(self, rate: float, steps: int, leader: Trial | None) -> Trial | str:
        """One trial, or why there is none. Those that are kept are not done again."""
        key = {"trial": self.variant.change, "rate": rate, "steps": steps}
        if (row := self.journal.row(**key)) is not None:
            return Trial(rate, steps, tuple(map(float, row["losses"])), row["stopped"], row["seconds"])
        limit = {"cut": self.variant.change, "budget_s": self.plan.budget_s}
        if (row := self.journal.row(**limit)) is not None:
            return str(row["why"])
        need, start = steps * median(self.seconds), self.clock.now
        why = f"the budget has no {duration(need)} left for {short(rate)} in {steps} steps"
        seen = None if start + need > self.deadline else self._trained(rate, steps, leader)
        if seen is None:
            self.journal.append({**limit, "why": why})
            return why
        took = self.clock.now - start
        self.journal.append({**key, "losses": seen.losses, "stopped": seen.stopped, "seconds": took})
        self.seconds.append(took / max(len(seen.losses), 1))
        return Trial(rate, steps, tuple(seen.losses), seen.stopped, took)

    def _trained(self, rate: float, steps: int, leader: Trial | None) -> Training | None:
        """A training to its end, or until it is hopeless; None where the budget ends before."""
        if len(self.batches) < steps:
            self.batches += first_batches(self.variant.setup, steps, self.plan.seed)[len(self.batches) :]
        best = leader.losses if leader is not None and not leader.stopped else ()

        def enough(seen: Training) -> str:
            if self.plan.progress is not None:
                line = f"{short(rate)}, step {len(seen.losses)} of {steps}: loss {seen.losses[-1]:.3f}"
                trials = max(WHOLE, len(self.tried) + 1)
                self.plan.progress(line, len(self.tried), trials)
            late = self.clock.now > self.deadline and len(seen.losses) < steps
            return LATE if late else hopeless(seen.losses, steps, best, self.scale.weight)

        seen = self._train(self.batches[:steps], self.course.at(rate, steps), enough)
        return None if seen.stopped == LATE else seen

    def _train(self, batches: Sequence[Any], rate_of: Any, enough: Callable[[Training], str]) -> Training:
        setup, options = self.variant.setup, self.variant.options
        return train(setup, batches, rate_of, seed=self.plan.seed, groups=options, enough=enough)

    def _answer(self, steps: int, plan: str, cut: str) -> Trials:
        setup, scale = self.variant.setup, self.scale
        if not any(t.steps == steps for t in self.tried) and self.tried:
            steps = self.tried[-1].steps
        share = f"{self.course.warmup:.0%} of a trial" if self.course.warmup else "none"
        facts = {
            "parameters": f"{sum(p.numel() for p in setup.model.parameters()):,}",
            "step": duration(median(self.seconds)),
            "warm-up": share,
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
            plan=plan,
            cut=cut,
            change=self.variant.change,
            seconds=self.clock.now,
            facts=facts,
        )


LATE: Final = "late"


def _loss(one: Trial) -> float:
    return one.loss

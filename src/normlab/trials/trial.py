"""``trial``: train copies of a setup at several rates, for a short while, and say which of them train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from normlab.base.locks import reserved
from normlab.base.units import duration
from normlab.errors import UserError
from normlab.setups.given import setup_of
from normlab.setups.setup import Loss
from normlab.trace.facts import Unknown
from normlab.trace.restore import same_globals
from normlab.trace.tensors import unwrap
from normlab.trials import STEPS
from normlab.trials.attempts import LEAST_STEPS, Attempts, Plan, batches_of
from normlab.trials.change import Changes, Variant, variants
from normlab.trials.fingerprint import fingerprint
from normlab.trials.journal import Journal
from normlab.trials.search import FARTHEST, next_octave
from normlab.trials.verdict import INTERRUPTED, Trial, Trials

FEWEST: Final = 3
"""With fewer trials, nothing is compared; if the budget does not hold this many, trials get fewer steps."""
WHOLE: Final = 8
"""How many trials a scan takes, with both sides of the best rate and the upper edge."""
LONGER: Final = 16
"""If nothing is learnt before, trials may have up to this many times the steps of the first ones."""
DIGITS: Final = 3
"""Losses are compared to this many decimals. Of rates that tie, the highest counts as the best, so a scan of
rates at which nothing moves goes on to higher ones.
"""
OPTIONS: Final = ("seed", "folder", "progress", "announce")
"""Arguments of ``trial`` itself, not of the setup."""


def trial(
    model: Any,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    steps: int = STEPS,
    budget_s: float = 600.0,
    rates: Sequence[float] | None = None,
    change: Changes = (),
    **rest: Any,
) -> Trials:
    """Train copies of a setup at several learning rates, ``steps`` steps each, and say which of them train.

    Give ``model`` and ``batch``, one ``Setup``, or a trainer, as for ``check``. ``rest`` are the setup's
    other fields (optimizer, scheduler, step, make, lr, declare), and ``seed`` for the trials' random states,
    ``folder`` to keep them in, ``progress(name, done, of)``, and ``announce(sentence)``, called with the plan
    before the first trial.

    Every trial begins at the same weights, and sees the same batches and random numbers; ``Course`` says
    which rates its groups have. The scan begins at the setup's own rate; ``rates`` replaces the scan.
    ``change`` repeats it with one change. If nothing is learnt in so few steps, trials at the rates whose
    loss still falls get twice as long, until the budget is spent; with ``budget_s=math.inf`` the same call
    gives the same answer on a machine of any speed. Ctrl-C ends the scan and gives the answer so far. With a
    ``folder`` the same call continues where it stopped. The setup itself does not change.

    Raises UserError for a setup that cannot be trained, for a folder that holds another one's trials, and for
    one that another process is at work in.

    >>> trials = normlab.trial(model, batch, loss=loss, optimizer=optimizer, rates=(1e-3, 1e-2), steps=16)
    >>> [round(trial.rate, 4) for trial in trials.rates], trials.page("trial.html").name
    ([0.001, 0.01], 'trial.html')
    """
    setup = setup_of("trial", model, batch, loss, rest, OPTIONS, batches=steps)
    setup.require("loss", "gradient", "batch")
    options = {name: value for name, value in rest.items() if name in OPTIONS}
    plan = Plan(steps, budget_s, tuple(rates or ()), **options)
    if setup.optimizer is None:
        raise UserError("there is no optimizer: pass optimizer=, as in torch.optim.AdamW(…, lr=1e-3)")
    try:
        with reserved(plan.folder), same_globals():
            return _walk(variants(setup, change, steps), plan)
    except Unknown as reason:  # something cannot be copied
        raise UserError(str(reason)) from reason


def _walk(tried: Sequence[Variant], plan: Plan) -> Trials:
    """Plan, scan and answer, for the setup and for each change of it, on the same batches."""
    setup = tried[0].setup
    batches, marks = batches_of(setup, plan.seed), dict[str, str]()
    if plan.folder is not None:
        changes = [variant.change for variant in tried]
        marks = fingerprint(
            setup, batches(plan.steps), steps=plan.steps, seed=plan.seed, rates=plan.rates, change=changes
        )
    journal, share = Journal(plan.folder, marks), plan.budget_s / len(tried)
    scans = list[_Scan]()
    for number, variant in enumerate(tried, start=1):
        scans.append(_Scan(Attempts(variant, plan, batches, journal, deadline=share * number)))
    steps, sentence = _planned(scans[0])
    if plan.announce is not None:
        plan.announce(f"for each of {len(scans)} setups, {sentence}" if len(scans) > 1 else sentence)
    if steps < LEAST_STEPS:
        return replace(scans[0].answer(steps, sentence), plan=sentence)
    answers = _answers(scans, steps)
    return replace(answers[0], plan=sentence, variants=tuple(answers[1:]), seconds=journal.seconds)


def _answers(scans: Sequence[_Scan], steps: int) -> list[Trials]:
    """Return the answer of each scan, or those so far after Ctrl-C, which the last of them then says."""
    answers = list[Trials]()
    for scan in scans:
        try:
            answers.append(scan.run(steps))
        except KeyboardInterrupt:
            if scan.tried:
                answers.append(scan.answer(steps, INTERRUPTED))
            elif answers:
                answers[-1] = replace(answers[-1], ended_by=INTERRUPTED)
            else:
                raise
            break
    return answers


def _planned(scan: _Scan) -> tuple[int, str]:
    """The steps of a trial, and the sentence about what the first scan's time holds and can tell."""
    plan, measured, share = scan.attempts.plan, scan.attempts.measured, scan.attempts.deadline
    wanted, step_s = plan.steps, measured.seconds[0]
    if math.isinf(plan.budget_s):
        scan.about = len(plan.rates) or WHOLE
        expected = duration(scan.about * wanted * step_s)
        return wanted, f"no limit in time: about {scan.about} trials of {wanted} steps, {expected}"
    left = share - measured.took
    enough = duration((measured.took + WHOLE * wanted * step_s) * plan.budget_s / share)
    steps = wanted
    if FEWEST * wanted * step_s > left:
        steps = max(int(left / step_s / FEWEST), 0)
    if steps < LEAST_STEPS:
        need = duration(FEWEST * wanted * step_s)
        return steps, (
            f"too short to tell: {FEWEST} trials of {wanted} steps take {need}, at {step_s:.2g} s a step, "
            f"but {duration(max(left, 0.0))} are left; a budget of {enough} would give a range"
        )
    trials = int(left / (steps * step_s))
    scan.about = min(WHOLE, trials)
    text = f"{duration(left)} allows {trials} trials of {steps} steps, {duration(steps * step_s)} each"
    planned = scan.attempts.variant.setup.declare.steps
    if planned:
        part = trials * steps / planned
        times = f"{part:.1%} of" if part < 1 else f"{part:.1f} times"
        text += f", {times} the {planned:,} steps that are planned"
    if steps < wanted:
        return steps, f"{text}: too few for {wanted} steps each, for which a range takes {enough}"
    if trials < WHOLE:
        return steps, f"{text}: rates can be compared, perhaps not their range; {enough} would do for that"
    return steps, f"{text}: enough for a range"


@dataclass
class _Scan:
    """The trials of one variant, from its own rate on."""

    attempts: Attempts
    about: int = 0
    """How many trials are expected."""
    tried: list[Trial] = field(default_factory=list, init=False)

    def run(self, steps: int) -> Trials:
        """Try the rates of the plan, or scan from the setup's own.

        While nothing is learnt, continue with twice the steps: at the rates whose loss still falls or, if all
        are on a plateau, at the lowest, which may leave it although higher ones do not.
        """
        first, planned = steps, self.attempts.variant.setup.declare.steps
        rates = [*self.attempts.plan.rates] or [self.attempts.measured.course.rate]
        longest = min(LONGER * steps, planned or LONGER * steps)
        while True:
            ended_by = self._round(steps, rates, longer=steps > first)
            answer = self.answer(steps, ended_by)
            rates = self._worth_longer(answer)
            steps *= 2
            is_final = answer.ended_by or answer.learns or answer.unmoved
            if is_final or not rates or steps > longest:
                return answer

    def _worth_longer(self, answer: Trials) -> list[float]:
        """The rates whose loss still falls, the best first, or else the lowest; none if all ended early."""
        whole = answer.whole
        falling = [t.rate for t in sorted(whole, key=lambda t: t.loss) if t.falls]
        return falling or [t.rate for t in whole[:1]]

    def _round(self, steps: int, rates: list[float], *, longer: bool) -> str:
        """Try these rates, then those that a scan adds; return what ended it early."""
        for rate in rates:
            ended_by = self._try(rate, steps)
            if ended_by:
                return ended_by
        while (rate := self._next(steps, longer=longer)) is not None:
            ended_by = self._try(rate, steps)
            if ended_by:
                return ended_by
        return ""

    def _try(self, rate: float, steps: int) -> str:
        """Try a rate; return why the budget does not hold the trial, or nothing."""
        answer = self.answer(steps)
        leader = answer.best if answer.learns and answer.steps == steps else None
        trial = self.attempts.trial(rate, steps, leader.losses if leader else (), self._tell)
        if isinstance(trial, str):
            return trial
        self.tried.append(trial)
        return ""

    def _tell(self, line: str) -> None:
        if (progress := self.attempts.plan.progress) is not None:
            progress(line, len(self.tried), max(self.about, len(self.tried) + 1))

    def _next(self, steps: int, *, longer: bool) -> float | None:
        """The rate that a scan tries next; None if it is done, or if going on would show nothing."""
        answer, first = self.answer(steps), self.attempts.measured.course.rate
        if self.attempts.plan.rates or (longer and not answer.learns):
            return None
        octaves = {t.rate: round(math.log2(t.rate / first)) for t in answer.rates}
        scores = {octaves[rate]: round(loss, DIGITS) for rate, loss in answer.losses.items()}
        errors = {octaves[rate]: error for rate, error in answer.errors.items()}
        octave = next_octave(scores, answer.scale.reference, errors)
        stuck = not (answer.learns or answer.unmoved or answer.rates[0].falls)
        if octave is None and stuck and min(scores) > -FARTHEST:
            octave = min(scores) - 2  # all are on a plateau, which a rate still on its way there may leave
        return None if octave is None else first * 2.0**octave

    def answer(self, steps: int, ended_by: str = "") -> Trials:
        """What the trials of so many steps say or, if there are none of these, the longest ones."""
        if self.tried and not any(t.steps == steps for t in self.tried):
            steps = self.tried[-1].steps
        attempts, measured = self.attempts, self.attempts.measured
        scale, course, model = measured.scale, measured.course, attempts.variant.setup.model
        facts = {
            "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
            "step": f"{measured.step_s:.2g} s",
            "warm-up": course.rising,
        }
        if scale.unigram is not None:
            facts["targets"] = f"{scale.targets:,}, of entropy {scale.unigram:.3f} nats"
        facts |= measured.facts
        return Trials(
            model=type(unwrap(model)).__name__,
            steps=steps,
            current_rate=course.rate,
            scale=scale,
            tried=tuple(self.tried),
            warmup=course.warmup,
            ended_by=ended_by,
            change=attempts.variant.change,
            seconds=attempts.journal.seconds,
            facts=facts,
        )

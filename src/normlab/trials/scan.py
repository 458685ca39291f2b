"""The scan of one setup: try rates until it is clear which of them train, or until a deadline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from normlab.trace.tensors import unwrap
from normlab.trials.attempts import Attempts
from normlab.trials.search import FARTHEST, next_octave
from normlab.trials.trials import Trial, Trials

LONGER: Final = 16
"""If nothing is learnt before, trials may have up to so many times the steps of the first ones."""
DIGITS: Final = 3
"""Losses are compared to so many digits: if rates differ by less, nothing moves; then try higher ones."""


@dataclass
class Scan:
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
        queue = [*self.attempts.plan.rates] or [self.attempts.measured.course.rate]
        longest = min(LONGER * steps, planned or LONGER * steps)
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
            answer = self.answer(steps)
            leads = answer.best if answer.learns and answer.steps == steps else None
            trial = self.attempts.trial(rate, steps, leads.losses if leads else (), self._tell)
            if isinstance(trial, str):
                return trial
            self.tried.append(trial)
        return ""

    def _tell(self, line: str) -> None:
        if (progress := self.attempts.plan.progress) is not None:
            progress(line, len(self.tried), max(self.about, len(self.tried) + 1))

    def _next(self, steps: int, *, longer: bool) -> list[float]:
        """The rate that a scan tries next; none if it is done, or if going on would show nothing."""
        answer, first = self.answer(steps), self.attempts.measured.course.rate
        if self.attempts.plan.rates or (longer and not answer.learns):
            return []
        octaves = {t.rate: round(math.log2(t.rate / first)) for t in answer.rates}
        scores = {octaves[rate]: round(loss, DIGITS) for rate, loss in answer.losses.items()}
        errors = {octaves[rate]: error for rate, error in answer.errors.items()}
        octave = next_octave(scores, answer.scale.reference, errors)
        stuck = not (answer.learns or answer.unmoved or answer.rates[0].falls)
        if octave is None and stuck and min(scores) > -FARTHEST:
            octave = min(scores) - 2  # all are on a plateau, which a rate still on its way there may leave
        return [] if octave is None else [first * 2.0**octave]

    def answer(self, steps: int, cut: str = "") -> Trials:
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
        return Trials(
            model=type(unwrap(model)).__name__,
            steps=steps,
            today=course.rate,
            scale=scale,
            tried=tuple(self.tried),
            warmup=course.warmup,
            cut=cut,
            change=attempts.variant.change,
            seconds=attempts.journal.seconds,
            facts=facts,
        )

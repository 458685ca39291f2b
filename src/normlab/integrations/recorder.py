"""The flight recorder of a foreign training: its last steps, and which parameter went wrong first in them.

These steps cannot be done again, so that the verdict rests on what every step leaves behind: the loss where
it is seen, and the norm of the gradient and of the update of every parameter.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from normlab.integrations.course import SPIKE_ABOVE, Course
from normlab.training.callbacks.blame import BEFORE, FEW, LEFT, Observed, Verdict
from normlab.training.callbacks.flight import RECENT, RING, Trigger

FETCH: Final = 16
"""The number of steps after which they are fetched from the device, in one transfer."""


class Stepped(NamedTuple):
    """The numbers of a step on the device: the norms of gradients and updates of the named parameters."""

    step: int
    lr: float
    loss: Tensor | None
    names: tuple[str, ...]
    gradients: Tensor
    updates: Tensor


@dataclass(frozen=True)
class Spike:
    """A spike that training may yet recover from, and the kept steps when it was seen."""

    trigger: Trigger
    what: str
    limit: float
    ring: tuple[Observed, ...]


class Recorder:
    """Keeps the last steps of a training, and reports by ``say`` when they went wrong.

    ``reports`` has what was found. There is one report of what ends a training; a spike that training
    recovers from is a note with its step.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.ring: deque[Observed] = deque(maxlen=RING)
        self._sizes: deque[tuple[int, dict[str, float]]] = deque(maxlen=RING)
        self.reports: list[dict[str, Any]] = []
        self.failed = False
        """Whether there is a report of what ended the training, after which no step is kept."""
        self._waiting: list[Stepped] = []
        self._first: list[Observed] = []
        self.course = Course()
        """The losses that were given and are finite."""
        self._spiked: Spike | None = None
        self._recovered = False

    def add(self, step: Stepped) -> None:
        """Keep a step; nothing waits for the device but one step in ``FETCH``."""
        if not self.failed:
            self._waiting.append(step)
            if len(self._waiting) >= FETCH:
                self.fetch()

    def fetch(self) -> None:
        """Fetch the pending steps and look at them."""
        for seen in self._fetched():
            self.ring.append(seen)
            norm = _value(seen, "gradient norm")
            self._sizes.append((seen.step, {"loss": seen.loss, "gradient norm": norm}))
            if math.isfinite(seen.loss):
                self.course.add(seen.loss)
            if len(self._first) < RING:
                self._first.append(seen)
            if not self.failed:
                self._look(seen)

    def _fetched(self) -> Iterator[Observed]:
        waiting, self._waiting = self._waiting, list[Stepped]()
        if not waiting:
            return
        device = waiting[-1].gradients.device
        loss = [torch.zeros(1) if s.loss is None else s.loss.reshape(1) for s in waiting]
        parts = [x.to(device).float() for s, x0 in zip(waiting, loss, strict=True) for x in (x0, *s[-2:])]
        numbers = iter(torch.cat(parts).tolist())
        for step in waiting:
            loss_of = next(numbers)
            gradients, updates = ({name: next(numbers) for name in step.names} for _ in range(2))
            seen = math.nan if step.loss is None else loss_of
            yield Observed(step.step, step.lr, seen, (), gradients, updates)
            if step.loss is not None and not math.isfinite(seen):
                self._report(
                    Trigger("not finite", step.step, step.step, f"the loss is {seen} in step {step.step}")
                )

    def close(self) -> None:
        """Look at the last steps and write the report of a training that ended above its start."""
        self.fetch()
        if self.failed or not self.ring:
            return
        course, last = self.course, self.ring[-1].step
        if course.diverged:
            high = f", rose to {course.highest:.4g}" if course.rose else ""
            words = f"the loss began at {course.start:.4g}{high} and ended at {course.end:.4g}"
            kept = {seen.step: seen for seen in (*self._first, *self.ring)}
            self._report(Trigger("diverged", last, last, words), tuple(kept.values()))
            return
        if self._spiked is not None:
            self._report(self._spiked.trigger, self._spiked.ring)
        elif course.returned and not self._recovered:
            words = (
                f"the loss rose from {course.start:.4g} to {course.highest:.4g} and ended at {course.end:.4g}"
            )
            self._note(Trigger("recovered", last, last, words))

    def _look(self, seen: Observed) -> None:
        for what, values in (("gradient", seen.gradients), ("update", seen.updates)):
            if broken := [name for name, value in values.items() if not math.isfinite(value)]:
                words = f"the {what} of {broken[-1]} is not finite in step {seen.step}"
                self._report(Trigger("not finite", seen.step, seen.step, words))
                return
        if self._spiked is None:
            self._spiked = next(filter(None, map(self._spike, ("loss", "gradient norm"))), None)
        else:
            self._recover(self._spiked)

    def _spike(self, what: str) -> Spike | None:
        """Find the last steps too high as a whole: a single batch is no spike."""
        known = [(step, one[what]) for step, one in self._sizes if math.isfinite(one[what])]
        before, recent = [v for _, v in known[:-RECENT]], known[-RECENT:]
        if len(before) < RECENT:
            return None
        usual, now = statistics.median(before), statistics.median(v for _, v in recent)
        above = usual + SPIKE_ABOVE * abs(usual) if what == "loss" else LEFT * (1 + FEW / len(before)) * usual
        limit = max(max(before), above)
        if now <= limit:
            return None
        first = next(step for step, value in recent if value > limit)
        words = f"the {what} went from {usual:.3g} to {now:.3g}, from step {first} on"
        return Spike(Trigger("spike", first, recent[-1][0], words), what, limit, tuple(self.ring))

    def _recover(self, spike: Spike) -> None:
        """Make a note of a spike that is over."""
        later = [one[spike.what] for step, one in self._sizes if step > spike.trigger.until][-RECENT:]
        if len(later) == RECENT and (now := statistics.median(later)) <= spike.limit:
            self._spiked = None
            by = f"by step {self.ring[-1].step} it was {now:.3g}"
            words = f"{spike.trigger.words}, and training recovered: {by}"
            self._recovered |= spike.what == "loss"
            self._note(Trigger("recovered", spike.trigger.step, spike.trigger.until, words))

    def _note(self, trigger: Trigger) -> None:
        self._write(trigger, Verdict(trigger.words, "none", step=trigger.step), ())

    def _report(self, trigger: Trigger, ring: Sequence[Observed] = ()) -> None:
        if self.failed:
            return
        self.failed = trigger.kind != "recovered"
        verdict = blame_parameter([seen for seen in ring or self.ring if seen.step <= trigger.until])
        self._write(trigger, verdict, ring or tuple(self.ring))
        self._say("; ".join((f"flight recorder: {trigger.words}; {verdict.sentence}", *verdict.evidence)))

    def _write(self, trigger: Trigger, verdict: Verdict, ring: Sequence[Observed]) -> None:
        steps = [
            {
                "step": seen.step,
                "lr": seen.lr,
                "loss": seen.loss,
                "grad_norm_l2": _value(seen, "gradient norm"),
            }
            for seen in ring
        ]
        self.reports.append(
            {
                "step": self.ring[-1].step if self.ring else trigger.step,
                "trigger": asdict(trigger),
                "verdict": asdict(verdict),
                "replay": None,
                "ring": {"steps": steps},
            }
        )


def blame_parameter(steps: Sequence[Observed]) -> Verdict:
    """Blame the parameter whose gradient or update is not finite first, of several in one step the one
    nearest to the loss; else the one whose gradient or update first left its range; else nobody.
    """
    for seen in steps:
        for what, values in (("gradient", seen.gradients), ("update", seen.updates)):
            broken = [name for name, value in values.items() if not math.isfinite(value)]
            if broken:
                return _not_finite(steps, seen, what, broken, len(values))
    grown = next((found for at in range(1, len(steps)) if (found := _grown(steps, at))), None)
    if grown is None:
        return Verdict(
            "no gradient and no update of a parameter left its range in the last steps: check the learning "
            "rate, the data and the labels",
            "none",
            evidence=_course(steps),
        )
    at, factor, what, name, value, median = grown
    return Verdict(
        f"the {what} of {name} left its range first, in step {steps[at].step}: {factor:.3g} times its median "
        "of the steps before",
        "range",
        name.rpartition(".")[0],
        steps[at].step,
        (f"its {what} has the L2 norm {value:.3g}, median before {median:.3g}", *_course(steps)),
    )


def _not_finite(
    steps: Sequence[Observed], seen: Observed, what: str, broken: Sequence[str], count: int
) -> Verdict:
    name, before = broken[-1], [one for one in steps if one.step < seen.step]
    last = [f"in the step before its L2 norm was {_of(before[-1], what)[name]:.3g}"] if before else []
    largest = max(before[-1].gradients.items(), key=lambda one: one[1]) if before else None
    beside = (
        [f"the largest gradient in that step was that of {largest[0]}, {largest[1]:.3g}"] if largest else []
    )
    return Verdict(
        f"the {what} of {name} is not finite in step {seen.step}, nearest to the loss of {len(broken)} of "
        f"{count} parameters for which that is so",
        what,
        name.rpartition(".")[0],
        seen.step,
        (*last, *beside, *_course(steps)),
    )


Grown = tuple[int, float, str, str, float, float]


def _grown(steps: Sequence[Observed], at: int) -> Grown | None:
    """Return the gradient or update of this step farthest above its median before, if it left its range."""
    earlier = steps[max(0, at - BEFORE) : at]
    found: list[Grown] = []
    for what in ("gradient", "update"):
        for name, value in _of(steps[at], what).items():
            known = [v for one in earlier if (v := _of(one, what).get(name))]
            if known and value > LEFT * (1 + FEW / len(known)) * (median := statistics.median(known)):
                found.append((at, value / median, what, name, value, median))
    return max(found, key=lambda one: one[1], default=None)


def _course(steps: Sequence[Observed]) -> tuple[str, ...]:
    """Say how the loss, the gradient norm and the learning rate went."""
    if not steps:
        return ()
    first, last = steps[0], steps[-1]
    known = [seen for seen in steps if not math.isnan(seen.loss)]
    losses = [f"{seen.loss:.4g} in step {seen.step}" for seen in known]
    loss = [f"loss: {losses[0]}, {losses[-1]}"] if losses else []
    norms = [f"{_value(seen, 'gradient norm'):.3g} in step {seen.step}" for seen in (first, last)]
    return (*loss, f"gradient norm: {', '.join(norms)}", f"learning rate: {last.lr:.3g}")


def _of(seen: Observed, what: str) -> dict[str, float]:
    return dict(seen.gradients if what == "gradient" else seen.updates)


def _value(seen: Observed, what: str) -> float:
    return seen.loss if what == "loss" else math.hypot(*seen.gradients.values())

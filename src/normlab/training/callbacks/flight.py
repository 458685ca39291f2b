"""The flight recorder: the last steps of a run, and, when it goes wrong, which module did so first.

For that the steps from the last checkpoint on are done again with every module watched: a replay, which the
recorder asks for. Every random draw is derived from (seed, purpose, step, micro-batch), so that the steps
come out as they did.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from normlab.errors import UserError
from normlab.spec.outcome import Outcome
from normlab.store.folder import RunFolder
from normlab.training.callbacks.blame import Verdict
from normlab.training.meter import StepRecord

RING: Final = 32
"""The number of last steps that are kept."""

RECENT: Final = 5
SPIKE_NATS: Final = 0.5
"""A loss has spiked when the middle one of ``RECENT`` steps is above every kept step before them, of which
there are as many, and so much above their middle one: a single batch is no spike."""


@dataclass(frozen=True)
class Trigger:
    """The reason for a report, the first step that was bad, and the last one to look at."""

    kind: str
    """``not finite``, ``spike``, ``recovered``, ``diverged`` or ``asked``."""
    step: int
    until: int
    words: str


@dataclass(frozen=True)
class Spike:
    """A spike that training may yet recover from."""

    trigger: Trigger
    limit: float
    """The loss below which it has."""
    records: tuple[StepRecord, ...]
    """The kept steps when it was seen."""


@dataclass(frozen=True)
class Replay:
    """The result of doing steps again."""

    verdict: Verdict
    start: int = 0
    checkpoint: bool = False
    """Whether it began at a checkpoint, or at the first step."""
    agrees: bool | None = None
    """Whether every loss came out as it had been, where they are known."""
    records: tuple[StepRecord, ...] = ()
    """The last steps that were done again, ``RING`` at most."""


AskReplay = Callable[[int, Mapping[int, float]], Replay]
"""Given the step to replay up to and the losses by step, as far as they are known, the replay."""


def report_of(
    step: int, trigger: Trigger, found: Replay | Verdict, names: Sequence[str], records: Sequence[StepRecord]
) -> dict[str, Any]:
    """An entry of ``flight.json``, made in a step by a replay or without one; ``names`` are those of the
    parameters.
    """
    replay = None
    if isinstance(found, Replay):
        replay = {"from_step": found.start, "checkpoint": found.checkpoint, "agrees": found.agrees}
    return {
        "step": step,
        "trigger": trigger,
        "verdict": found.verdict if isinstance(found, Replay) else found,
        "replay": replay,
        "ring": {"parameters": list(names), "steps": [_plain(record) for record in records]},
    }


def _plain(record: StepRecord) -> dict[str, Any]:
    loss, nll, norm = record.values.tolist()
    row = {"step": record.step, "lr": record.lr, "loss": loss, "nll": nll, "grad_norm_l2": norm}
    norms = {"gradients": record.gradients, "updates": record.updates}
    return row | {name: [float(f"{v:.4g}") for v in x.tolist()] for name, x in norms.items()}


class Recorder:
    """Keeps the last steps of a training, and writes a report when they went wrong.

    One report for a spike and one for what ends a run: the replay costs as much as the steps since the last
    checkpoint. A spike is given until the next checkpoint, behind which no replay can show how it began, or
    until the end of the run: one that training recovers from by then is a note, and nothing is replayed.
    """

    def __init__(
        self, folder: RunFolder, names: Sequence[str], device: torch.device, ask_replay: AskReplay
    ) -> None:
        self._folder, self._names, self._device, self._ask = folder, tuple(names), device, ask_replay
        self.ring: deque[StepRecord] = deque(maxlen=RING)
        self.losses: dict[int, tuple[float, float]] = {}
        """Loss and gradient norm of the steps since the last checkpoint, as far as they were fetched."""
        self._saved = 0
        self._spiked: Spike | None = None

    def state_dict(self) -> dict[str, Tensor]:
        """The last steps, as tensors; empty before the first one."""
        if not self.ring:
            return {}
        steps, rates, *tensors = zip(*self.ring, strict=True)
        losses = torch.tensor([(s, *v) for s, v in self.losses.items()], dtype=torch.float64)
        numbers = {"step": torch.tensor(steps), "lr": torch.tensor(rates, dtype=torch.float64)}
        named = zip(StepRecord._fields[2:], map(torch.stack, tensors), strict=True)
        return {**numbers, **dict(named), "losses": losses.reshape(-1, 3)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state_dict()``. Raises UserError for that of another model."""
        self.ring.clear()
        self.losses.clear()
        if not state:
            return
        self._check(state)
        steps, rates, losses = (state[name].tolist() for name in ("step", "lr", "losses"))
        tensors = zip(*(state[name].to(self._device) for name in StepRecord._fields[2:]), strict=True)
        self.ring.extend(StepRecord(s, lr, *x) for s, lr, x in zip(steps, rates, tensors, strict=True))
        self.losses |= {int(step): (loss, norm) for step, loss, norm in losses}
        self._saved = steps[-1]

    def _check(self, state: Mapping[str, Tensor]) -> None:
        shapes = {name: list(tensor.shape) for name, tensor in state.items()}
        found = ", ".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))
        steps, losses = shapes.get("step", []), shapes.pop("losses", [])
        norms = {name: [*steps, len(self._names)] for name in StepRecord._fields[3:]}
        wanted = {"step": steps, "lr": steps, "values": [*steps, 3], **norms}
        if len(steps) != 1 or shapes != wanted or losses[1:] != [3]:
            raise UserError(f"the recorder's last steps are of another run ({found})")

    def add(self, record: StepRecord) -> None:
        """Add a step; nothing waits for the device."""
        self.ring.append(record)

    def fetched(self, last: int, values: Sequence[Sequence[float]]) -> None:
        """Take note of loss, negative log-likelihood and gradient norm of the steps up to the last one."""
        first = last - len(values) + 1
        self.losses |= {first + i: (v[0], v[2]) for i, v in enumerate(values)}

    def saved(self, step: int) -> None:
        """Take note of a checkpoint: no replay begins before it any more."""
        self._saved = step

    def look(self, step: int, outcome: Outcome | None) -> None:
        """Write a report if something went wrong since the last look, or came right."""
        self._spiked = self._spiked or self._spike()
        trigger, recent = self._trigger(outcome), {record.step for record in self.ring}
        self.losses = {s: v for s, v in self.losses.items() if s > self._saved or s in recent}
        if trigger is not None:
            self._spiked = None
            self._once(step, trigger)
        elif self._spiked is not None:
            self._recover(step, self._spiked)
            if outcome is not None:
                self.settle(step)

    def settle(self, step: int) -> None:
        """Write the report on a spike that training has not recovered from."""
        spike, self._spiked = self._spiked, None
        if spike is not None:
            self._once(step, spike.trigger, spike.records)

    def _recover(self, step: int, spike: Spike) -> None:
        """Write a note if the loss is below the limit again."""
        losses = [loss for at, (loss, _) in self.losses.items() if at > spike.trigger.until][-RECENT:]
        if len(losses) < RECENT or (now := statistics.median(losses)) > spike.limit:
            return
        self._spiked = None
        if "recovered" not in self._reported:
            self._reported.add("recovered")
            words = f"{spike.trigger.words}, and training recovered: by step {step} it was {now:.2f}"
            trigger = replace(spike.trigger, kind="recovered", words=words)
            verdict = Verdict(words, "none", step=trigger.step)
            self._folder.add_flight(report_of(step, trigger, verdict, self._names, spike.records))

    def _once(self, step: int, trigger: Trigger, records: Sequence[StepRecord] = ()) -> None:
        if _covering(trigger.kind) not in self._reported:
            self._reported.add(_covering(trigger.kind))
            self.report(step, trigger, records)

    def report(self, step: int, trigger: Trigger, records: Sequence[StepRecord] = ()) -> None:
        """Ask for a replay up to the bad step, and add the findings to the run's ``flight.json``.

        ``records`` are the last steps unless others are given.
        """
        try:
            replay = self._ask(trigger.until, {s: loss for s, (loss, _) in self.losses.items()})
        except Exception as error:  # a training must not end because its recorder failed
            replay = Replay(Verdict(f"the replay failed: {type(error).__name__}: {error}", "none"))
        self._folder.add_flight(report_of(step, trigger, replay, self._names, records or tuple(self.ring)))

    @cached_property
    def _reported(self) -> set[str]:
        """The kinds of triggers that the run has a report of."""
        return {_covering(report.get("trigger", {}).get("kind", "")) for report in self._folder.flights()}

    def _trigger(self, outcome: Outcome | None) -> Trigger | None:
        for step, (loss, norm) in self.losses.items():
            for name, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    return Trigger("not finite", step, step, f"the {name} is {value} in step {step}")
        if outcome is not None and outcome.state == "diverged":
            found = self._spiked.trigger if self._spiked else Trigger("", outcome.step, outcome.step, "")
            return replace(found, kind="diverged", words=outcome.evidence)
        return None

    def _spike(self) -> Spike | None:
        """Find the first kept step of those whose losses are too high as a whole."""
        steps = [record.step for record in self.ring if record.step in self.losses]
        losses = [self.losses[step][0] for step in steps]
        for at in range(RECENT, len(steps) - RECENT + 1):
            before, now = losses[:at], statistics.median(losses[at : at + RECENT])
            usual = statistics.median(before)
            limit = max(max(before), usual + SPIKE_NATS)
            if now > limit:
                first, last = next(i for i in range(at, len(steps)) if losses[i] > limit), at + RECENT - 1
                words = f"the loss went from {usual:.2f} to {now:.2f}, from step {steps[first]} on"
                return Spike(Trigger("spike", steps[first], steps[last], words), limit, tuple(self.ring))
        return None


def _covering(kind: str) -> str:
    """The kind of trigger whose report covers this kind: one for all that end a run."""
    return "diverged" if kind == "not finite" else kind

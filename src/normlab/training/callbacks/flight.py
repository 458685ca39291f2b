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
    """``not finite``, ``spike``, ``diverged`` or ``asked``."""
    step: int
    until: int
    words: str


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
    step: int, trigger: Trigger, replay: Replay, names: Sequence[str], records: Sequence[StepRecord]
) -> dict[str, Any]:
    """An entry of ``flight.json``, made in a step; ``names`` are those of the parameters."""
    return {
        "step": step,
        "trigger": trigger,
        "verdict": replay.verdict,
        "replay": {"from_step": replay.start, "checkpoint": replay.checkpoint, "agrees": replay.agrees},
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
    checkpoint.
    """

    def __init__(
        self, folder: RunFolder, names: Sequence[str], device: torch.device, ask_replay: AskReplay
    ) -> None:
        self._folder, self._names, self._device, self._ask = folder, tuple(names), device, ask_replay
        self.ring: deque[StepRecord] = deque(maxlen=RING)
        self.losses: dict[int, tuple[float, float]] = {}
        """Loss and gradient norm of the steps since the last checkpoint, as far as they were fetched."""
        self._saved = 0

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
        """Write a report if something went wrong since the last look."""
        trigger, recent = self._trigger(outcome), {record.step for record in self.ring}
        self.losses = {s: v for s, v in self.losses.items() if s > self._saved or s in recent}
        if trigger is not None and _covering(trigger.kind) not in self._reported:
            self._reported.add(_covering(trigger.kind))
            self.report(step, trigger)

    def report(self, step: int, trigger: Trigger) -> None:
        """Ask for a replay up to the bad step, and add the findings to the run's ``flight.json``."""
        try:
            replay = self._ask(trigger.until, {s: loss for s, (loss, _) in self.losses.items()})
        except Exception as error:  # a training must not end because its recorder failed
            replay = Replay(Verdict(f"the replay failed: {type(error).__name__}: {error}", "none"))
        self._folder.add_flight(report_of(step, trigger, replay, self._names, tuple(self.ring)))

    @cached_property
    def _reported(self) -> set[str]:
        """The kinds of triggers that the run has a report of."""
        return {_covering(report.get("trigger", {}).get("kind", "")) for report in self._folder.flights()}

    def _trigger(self, outcome: Outcome | None) -> Trigger | None:
        for step, (loss, norm) in self.losses.items():
            for name, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    return Trigger("not finite", step, step, f"the {name} is {value} in step {step}")
        spike = self._spike()
        if outcome is not None and outcome.state == "diverged":
            found = spike or Trigger("", outcome.step, outcome.step, "")
            return replace(found, kind="diverged", words=outcome.evidence)
        return spike

    def _spike(self) -> Trigger | None:
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
                return Trigger("spike", steps[first], steps[last], words)
        return None


def _covering(kind: str) -> str:
    """The kind of trigger whose report covers this kind: one for all that end a run."""
    return "diverged" if kind == "not finite" else kind

"""The flight recorder: the last steps of a training, and a report when it goes wrong.

If steps can be repeated, as in a normlab run, a replay with every module watched shows which module went
wrong first; else the norms of every parameter's gradient and update show which parameter did.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from normlab.base.metric import Outcome
from normlab.errors import UserError
from normlab.watching.fault import Fault, fault
from normlab.watching.flight import Replay, Replayed, Reports, Trigger, report_of
from normlab.watching.losses import RECENT, LossCurve
from normlab.watching.meter import StepRecord
from normlab.watching.spikes import ANY_UNIT, Limits, Spike, find_spike

RING: Final = 32
"""The number of last steps that are kept."""


class Recorder:
    """Keeps the last steps of a training, and writes a report when they went wrong.

    There is one report for a spike and one for what ends a training, since a replay costs as much as the
    steps since the last checkpoint. A spike has until the next checkpoint, after which no replay can show how
    it began, or until the end: if training recovers by then, there is only a note, and nothing is replayed.
    """

    def __init__(self, reports: Reports, *, limits: Limits = ANY_UNIT, replay: Replay | None = None) -> None:
        self._reports, self._limits, self._replay = reports, limits, replay
        self.ring: deque[StepRecord] = deque(maxlen=RING)
        self.curve = LossCurve()
        """The finite losses."""
        self.numbers: dict[int, dict[str, float]] = {}
        """Loss and norms of the kept steps and, for a replay, of those since the last checkpoint."""
        self._first: list[StepRecord] = []
        self._waiting: list[StepRecord] = []
        """The steps whose numbers are still on the device."""
        self._saved = 0
        """The step of the last checkpoint."""
        self._spike: Spike | None = None
        """A spike that may yet recover."""

    def state_dict(self) -> dict[str, Tensor]:
        """The last steps, as tensors; empty before the first one."""
        if not self.ring:
            return {}
        self.fetch()
        rows = [
            (step, numbers.get("loss", math.nan), numbers["gradient norm"])
            for step, numbers in self.numbers.items()
        ]
        return {
            "step": torch.tensor([r.step for r in self.ring]),
            "lr": torch.tensor([r.lr for r in self.ring], dtype=torch.float64),
            **{name: torch.stack([getattr(r, name) for r in self.ring]) for name in _TENSORS},
            "losses": torch.tensor(rows, dtype=torch.float64).reshape(-1, 3),
        }

    def load_state_dict(
        self, state: Mapping[str, Tensor], names: Sequence[str], device: torch.device
    ) -> None:
        """Continue from ``state_dict()``, with parameters of these names. Raises UserError for others."""
        self.ring.clear()
        self.numbers.clear()
        self._waiting.clear()
        if not state:
            return
        _require_steps(state, len(names))
        steps, rates = state["step"].tolist(), state["lr"].tolist()
        values, gradients, updates = (state[name].to(device) for name in _TENSORS)
        for i, (step, lr) in enumerate(zip(steps, rates, strict=True)):
            loss, nll, norm = values[i]
            record = StepRecord(step, lr, loss, tuple(names), gradients[i], updates[i], nll=nll, norm=norm)
            self.ring.append(record)
        for step, loss, norm in state["losses"].tolist():
            self.numbers[int(step)] = {"loss": loss, "gradient norm": norm}
        self._saved = steps[-1]

    def add(self, record: StepRecord) -> None:
        """Add a step; nothing waits for the device."""
        self.ring.append(record)
        self._waiting.append(record)
        if len(self._first) < RING:
            self._first.append(record)

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def fetch(self) -> list[StepRecord]:
        """Fetch the numbers of the pending steps from the device, and return these steps."""
        if not self._waiting:
            return []
        device = self._waiting[-1].gradients.device
        rows = [torch.stack([*r.values, torch.linalg.vector_norm(r.updates)]) for r in self._waiting]
        values = torch.stack([row.to(device) for row in rows]).tolist()  # the only transfer
        for record, (loss, _, norm, moved) in zip(self._waiting, values, strict=True):
            numbers = {} if record.loss is None else {"loss": loss}
            self.numbers[record.step] = {**numbers, "gradient norm": norm, "update norm": moved}
            if record.loss is not None and math.isfinite(loss):
                self.curve.add(loss)
        fetched, self._waiting = self._waiting, list[StepRecord]()
        return fetched

    def saved(self, step: int) -> None:
        """Record a checkpoint: no replay begins before it any more."""
        self._saved = step

    def check_steps(self, step: int, outcome: Outcome | None = None) -> None:
        """Write a report if something went wrong, or recovered, since the last call."""
        self.fetch()
        if self._spike is None:
            self._spike = find_spike(self.ring, self.numbers, self._limits)
        trigger = self._trigger(outcome)
        self._forget_numbers(step)
        if trigger is not None:
            self._spike = None
            self._once(step, trigger)
        elif self._spike is not None:
            self._recover(step, self._spike)
            if outcome is not None:
                self.report_spike(step)

    def _forget_numbers(self, step: int) -> None:
        """Forget the numbers of steps that are no longer kept and that no replay will repeat."""
        recent = {record.step for record in self.ring}
        saved = self._saved if self._replay is not None else step
        self.numbers = {s: numbers for s, numbers in self.numbers.items() if s > saved or s in recent}

    def report_spike(self, step: int) -> None:
        """Write the report on a spike that training has not recovered from."""
        spike, self._spike = self._spike, None
        if spike is not None:
            self._once(step, spike.trigger, spike.records)

    def close(self) -> None:
        """Look at the last steps of a training whose outcome only its losses show."""
        if not self.ring:
            return
        last = self.ring[-1].step
        self.check_steps(last)
        diverged = Outcome("diverged", last, self.curve.words) if self.curve.diverged else None
        self.check_steps(last, diverged)
        self.report_spike(last)
        if self.curve.returned and self._reported.isdisjoint(("diverged", "spike")):
            self._note(last, Trigger("recovered", last, last, self.curve.words))

    def report(self, step: int, trigger: Trigger, records: Sequence[StepRecord] = ()) -> None:
        """Add a report with what went wrong first, found by a replay up to the bad step if possible.

        ``records`` are by default the last steps.
        """
        records = records or tuple(self.ring)
        self._reports.add_flight(report_of(step, trigger, self._examine(trigger, records), records))

    def _examine(self, trigger: Trigger, records: Sequence[StepRecord]) -> Replayed | Fault:
        """Find what went wrong first, by a replay or in the records."""
        if self._replay is None:
            first = self._first if trigger.kind == "diverged" else ()
            known = {record.step: record for record in (*first, *records) if record.step <= trigger.until}
            return fault(tuple(known.values()))
        losses = {step: numbers["loss"] for step, numbers in self.numbers.items() if "loss" in numbers}
        try:
            return self._replay(trigger.until, losses)
        except Exception as error:  # a training must not end because its recorder failed
            return Replayed(Fault(f"the replay failed: {type(error).__name__}: {error}", "none"))

    def _recover(self, step: int, spike: Spike) -> None:
        """Write a note if the loss or the norm is below the limit again."""
        later = [numbers[spike.quantity] for at, numbers in self.numbers.items() if at > spike.trigger.until]
        if len(later) < RECENT:
            return
        now = statistics.median(later[-RECENT:])
        if now > spike.limit:
            return
        self._spike = None
        words = f"{spike.trigger.words}, and training recovered: by step {step} it was {now:.3g}"
        self._note(step, replace(spike.trigger, kind="recovered", words=words), spike.records)

    def _note(self, step: int, trigger: Trigger, records: Sequence[StepRecord] = ()) -> None:
        """Add a note on a recovery, the first time."""
        if "recovered" not in self._reported:
            self._reported.add("recovered")
            nothing = Fault(trigger.words, "none", step=trigger.step)
            self._reports.add_flight(report_of(step, trigger, nothing, records))

    def _once(self, step: int, trigger: Trigger, records: Sequence[StepRecord] = ()) -> None:
        """Write a report, unless one covers this kind of trigger."""
        if _covering(trigger.kind) not in self._reported:
            self._reported.add(_covering(trigger.kind))
            self.report(step, trigger, records)

    @cached_property
    def _reported(self) -> set[str]:
        """Return the kinds of triggers that the training has reports of."""
        return {_covering(report.get("trigger", {}).get("kind", "")) for report in self._reports.flights()}

    def _trigger(self, outcome: Outcome | None) -> Trigger | None:
        """Return what ends the training: a number that is not finite, or a divergence, from its spike on."""
        for step, numbers in self.numbers.items():
            for quantity in self._limits:
                value = numbers.get(quantity, 0.0)
                if not math.isfinite(value):
                    return Trigger("not finite", step, step, f"the {quantity} is {value} in step {step}")
        if outcome is None or outcome.state != "diverged":
            return None
        if self._spike is not None:
            return replace(self._spike.trigger, kind="diverged", words=outcome.evidence)
        return Trigger("diverged", outcome.step, outcome.step, outcome.evidence)


_TENSORS: Final = ("values", "gradients", "updates")
"""The fields of a step that a state holds as tensors on the device."""


def _require_steps(state: Mapping[str, Tensor], parameters: int) -> None:
    """Raise UserError unless a state has the shapes of steps of so many parameters."""
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    steps, losses = shapes.get("step", []), [*shapes.get("losses", [])[:1], 3]
    norms = {name: [*steps, parameters] for name in _TENSORS[1:]}
    wanted = {"step": steps, "lr": steps, "values": [*steps, 3], "losses": losses, **norms}
    if len(steps) != 1 or shapes != wanted:
        got = ", ".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))
        raise UserError(f"the recorder's last steps are of another run ({got})")


def _covering(kind: str) -> str:
    """Return the kind of trigger whose report covers this kind: one for all that end a training."""
    return "diverged" if kind == "not finite" else kind

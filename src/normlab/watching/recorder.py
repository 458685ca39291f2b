"""The flight recorder: the last steps of a training, and a report when it goes wrong.

If steps can be repeated, as in a normlab run, a replay with every module watched shows which module went
wrong first; else the norms of every parameter's gradient and update show which parameter did.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from normlab.base.metric import Outcome
from normlab.errors import UserError
from normlab.watching.fault import FEW, LEFT, Fault, fault
from normlab.watching.losses import RECENT, SPIKE_ABOVE, LossCurve
from normlab.watching.meter import StepRecord

RING: Final = 32
"""The number of last steps that are kept."""
SPIKE_NATS: Final = 0.5
"""A loss has spiked when the median of ``RECENT`` steps is above every kept step before them, of which there
must be as many, and this far above their median. One bad batch is not a spike."""

Limit = Callable[[Sequence[float]], float]
"""Return the largest value that is not a spike, given those before."""


def _above(margin: Callable[[float, int], float]) -> Limit:
    """Return a limit: the largest value before or, if higher, ``margin`` of the median and their number."""
    return lambda before: max(max(before), margin(statistics.median(before), len(before)))


NATS: Final = {"loss": _above(lambda usual, _: usual + SPIKE_NATS), "gradient norm": None}
ANY_UNIT: Final = {
    "loss": _above(lambda usual, _: usual + SPIKE_ABOVE * abs(usual)),
    "gradient norm": _above(lambda usual, n: LEFT * (1 + FEW / n) * usual),
    "update norm": None,
}
"""What must be finite, with the limit above which it is a spike, if any."""


@dataclass(frozen=True)
class Trigger:
    """The reason for a report, the first bad step, and the last step to look at."""

    kind: str
    """``not finite``, ``spike``, ``recovered``, ``diverged``, ``asked``, or a property of the loop."""
    step: int
    until: int
    words: str


@dataclass(frozen=True)
class _Spike:
    """A spike that training may yet recover from."""

    trigger: Trigger
    what: str
    limit: float
    """The value below which it has recovered."""
    records: tuple[StepRecord, ...]
    """The steps that were kept when it was seen."""


@dataclass(frozen=True)
class Replayed:
    """The result of doing steps again."""

    fault: Fault
    start: int = 0
    checkpoint: bool = False
    """Whether it began at a checkpoint, or at the first step."""
    agrees: bool | None = None
    """Whether every loss came out the same as before; None if none is known."""
    records: tuple[StepRecord, ...] = ()
    """The last steps that were repeated, at most ``RING``."""


Replay = Callable[[int, Mapping[int, float]], Replayed]
"""Repeat the steps, given the last one to replay and the losses by step, as far as they are known."""


class Reports(Protocol):
    """Keeps the reports of a training, like a run's folder."""

    def flights(self) -> Sequence[Mapping[str, Any]]: ...

    def add_flight(self, report: Mapping[str, Any]) -> None: ...


def report_of(
    step: int, trigger: Trigger, answer: Replayed | Fault, records: Sequence[StepRecord]
) -> dict[str, Any]:
    """Return an entry of ``flight.json``, made in a step, with or without a replay."""
    replay = None
    if isinstance(answer, Replayed):
        replay = {"from_step": answer.start, "checkpoint": answer.checkpoint, "agrees": answer.agrees}
        answer = answer.fault
    names = records[-1].names if records else ()
    return {
        "step": step,
        "trigger": asdict(trigger),
        "verdict": asdict(answer),
        "replay": replay,
        "ring": {"parameters": list(names), "steps": [_row(record, names) for record in records]},
    }


def _row(record: StepRecord, names: Sequence[str]) -> dict[str, Any]:
    loss, nll, norm = record.values.tolist()
    row = {"step": record.step, "lr": record.lr, "loss": loss, "nll": nll, "grad_norm_l2": norm}
    kept = {"gradients": record.gradients, "updates": record.updates} if record.names == names else {}
    return row | {name: [float(f"{v:.4g}") for v in x.tolist()] for name, x in kept.items()}


class Recorder:
    """Keeps the last steps of a training, and writes a report when they went wrong.

    There is one report for a spike and one for what ends a training, since a replay costs as much as the
    steps since the last checkpoint. A spike has until the next checkpoint, after which no replay can show how
    it began, or until the end: if training recovers by then, there is only a note, and nothing is replayed.
    """

    def __init__(
        self, reports: Reports, *, limits: Mapping[str, Limit | None] = ANY_UNIT, replay: Replay | None = None
    ) -> None:
        self._reports, self._limits, self._replay = reports, limits, replay
        self.ring: deque[StepRecord] = deque(maxlen=RING)
        self.curve = LossCurve()
        """The finite losses."""
        self.numbers: dict[int, dict[str, float]] = {}
        """Loss and norms of the kept steps and, for a replay, of those since the last checkpoint."""
        self._first: list[StepRecord] = []
        self._waiting: list[StepRecord] = []
        self._saved = 0
        self._spiked: _Spike | None = None

    def state_dict(self) -> dict[str, Tensor]:
        """The last steps, as tensors; empty before the first one."""
        if not self.ring:
            return {}
        self.fetch()
        rows = [(s, n.get("loss", math.nan), n["gradient norm"]) for s, n in self.numbers.items()]
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
        steps, rates, losses = (state[name].tolist() for name in ("step", "lr", "losses"))
        tensors = zip(*(state[name].to(device) for name in _TENSORS), strict=True)
        for step, lr, ((loss, nll, norm), *norms) in zip(steps, rates, tensors, strict=True):
            self.ring.append(StepRecord(step, lr, loss, tuple(names), *norms, nll=nll, norm=norm))
        self.numbers |= {int(step): {"loss": loss, "gradient norm": norm} for step, loss, norm in losses}
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
        values = torch.stack([row.to(device) for row in rows]).tolist()
        for record, (loss, _, norm, moved) in zip(self._waiting, values, strict=True):
            known = {} if record.loss is None else {"loss": loss}
            self.numbers[record.step] = {**known, "gradient norm": norm, "update norm": moved}
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
        self._spiked = self._spiked or self._spike()
        trigger, recent = self._trigger(outcome), {record.step for record in self.ring}
        saved = self._saved if self._replay is not None else step
        self.numbers = {s: n for s, n in self.numbers.items() if s > saved or s in recent}
        if trigger is not None:
            self._spiked = None
            self._once(step, trigger)
        elif self._spiked is not None:
            self._recover(step, self._spiked)
            if outcome is not None:
                self.report_spike(step)

    def report_spike(self, step: int) -> None:
        """Write the report on a spike that training has not recovered from."""
        spike, self._spiked = self._spiked, None
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
        if self._replay is None:
            first = self._first if trigger.kind == "diverged" else ()
            kept = {record.step: record for record in (*first, *records) if record.step <= trigger.until}
            return fault(tuple(kept.values()))
        try:
            return self._replay(trigger.until, {s: n["loss"] for s, n in self.numbers.items() if "loss" in n})
        except Exception as error:  # a training must not end because its recorder failed
            return Replayed(Fault(f"the replay failed: {type(error).__name__}: {error}", "none"))

    def _recover(self, step: int, spike: _Spike) -> None:
        """Write a note if the loss or the norm is below the limit again."""
        later = [n[spike.what] for at, n in self.numbers.items() if at > spike.trigger.until][-RECENT:]
        if len(later) < RECENT or (now := statistics.median(later)) > spike.limit:
            return
        self._spiked = None
        words = f"{spike.trigger.words}, and training recovered: by step {step} it was {now:.3g}"
        self._note(step, replace(spike.trigger, kind="recovered", words=words), spike.records)

    def _note(self, step: int, trigger: Trigger, records: Sequence[StepRecord] = ()) -> None:
        if "recovered" not in self._reported:
            self._reported.add("recovered")
            nothing = Fault(trigger.words, "none", step=trigger.step)
            self._reports.add_flight(report_of(step, trigger, nothing, records))

    def _once(self, step: int, trigger: Trigger, records: Sequence[StepRecord] = ()) -> None:
        if _covering(trigger.kind) not in self._reported:
            self._reported.add(_covering(trigger.kind))
            self.report(step, trigger, records)

    @cached_property
    def _reported(self) -> set[str]:
        """Return the kinds of triggers that the training has reports of."""
        return {_covering(report.get("trigger", {}).get("kind", "")) for report in self._reports.flights()}

    def _trigger(self, outcome: Outcome | None) -> Trigger | None:
        for step, numbers in self.numbers.items():
            for what in self._limits:
                if not math.isfinite(value := numbers.get(what, 0.0)):
                    return Trigger("not finite", step, step, f"the {what} is {value} in step {step}")
        if outcome is not None and outcome.state == "diverged":
            trigger = self._spiked.trigger if self._spiked else Trigger("", outcome.step, outcome.step, "")
            return replace(trigger, kind="diverged", words=outcome.evidence)
        return None

    def _spike(self) -> _Spike | None:
        """Find the first kept step of those whose losses or norms are too high as a whole."""
        for what, limit_of in self._limits.items():
            kept = [self.numbers[r.step] | {"step": r.step} for r in self.ring if r.step in self.numbers]
            known = [(int(n["step"]), n[what]) for n in kept if what in n]
            steps, values = [s for s, _ in known], [v for _, v in known]
            if limit_of is None:
                continue
            for at in range(RECENT, len(values) - RECENT + 1):
                now, limit = statistics.median(values[at : at + RECENT]), limit_of(values[:at])
                if now > limit:
                    first = next(i for i in range(at, len(values)) if values[i] > limit)
                    last, usual = steps[at + RECENT - 1], statistics.median(values[:at])
                    words = f"the {what} went from {usual:.3g} to {now:.3g}, from step {steps[first]} on"
                    return _Spike(Trigger("spike", steps[first], last, words), what, limit, tuple(self.ring))
        return None


_TENSORS: Final = ("values", "gradients", "updates")


def _require_steps(state: Mapping[str, Tensor], parameters: int) -> None:
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

"""What a report of the flight recorder says, and who keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from normlab.watching.fault import Fault
from normlab.watching.meter import StepRecord


@dataclass(frozen=True)
class Trigger:
    """The reason for a report, the first bad step, and the last step to look at."""

    kind: str
    """``not finite``, ``spike``, ``recovered``, ``diverged``, ``asked``, or a property of the loop."""
    step: int
    until: int
    words: str


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
    """Return a step, with the norms of every parameter if these are its parameters."""
    loss, nll, norm = record.values.tolist()
    row = {"step": record.step, "lr": record.lr, "loss": loss, "nll": nll, "grad_norm_l2": norm}
    if record.names != names:
        return row
    return row | {"gradients": _short(record.gradients), "updates": _short(record.updates)}


def _short(values: Tensor) -> list[float]:
    """Return numbers with four digits, so that a report of many parameters stays small."""
    return [float(f"{value:.4g}") for value in values.tolist()]

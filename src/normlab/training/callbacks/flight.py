"""The flight recorder: the last steps of a run, and, when it goes wrong, which module did so first.

The steps from the last checkpoint on are done again with every module watched. Every random draw is derived
from (seed, purpose, step, micro-batch), so that they come out as they did.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from normlab.diagnosis.probing.observe import Record
from normlab.store.sealed import SealError
from normlab.training.callbacks.blame import EVERYTHING, Observed, Verdict, blame
from normlab.training.callbacks.probing import NOTHING, Preset, Probing
from normlab.training.checkpoint import has_checkpoint, load_checkpoint
from normlab.training.progress import saved_of

if TYPE_CHECKING:
    from normlab.training.trainer import Loop

RING: Final = 32
"""Steps that are always kept."""

WATCHED: Final = 64
"""Steps before the bad one in which a replay watches every module; those before are done again unwatched."""

WATCHING: Final = Preset(EVERYTHING, kinds=False)

RECENT: Final = 5
SPIKE_NATS: Final = 0.5
"""A loss has spiked when the middle one of ``RECENT`` steps is above every kept step before them, of which
there are as many, and so much above their middle one: a single batch is no spike."""


class Kept(NamedTuple):
    """One step: its learning rate, `[3]` loss, likelihood and gradient norm, and `[P]` norms by parameter."""

    step: int
    lr: float
    values: Tensor
    gradients: Tensor
    updates: Tensor


@dataclass(frozen=True)
class Trigger:
    """Why a report is written, the first step that was bad, and the last one that is to be looked at."""

    kind: str
    """``not finite``, ``spike``, ``diverged`` or ``asked``."""
    step: int
    until: int
    words: str


def require_memory(tensors: Mapping[str, Tensor], parameters: int, checkpoint: Path) -> None:
    """Raise SealError for what ``Recorder.tensors`` cannot have given in a run of so many parameters."""
    if not tensors:
        return
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    steps, losses = shapes.get("step", []), shapes.pop("losses", [])
    norms = {name: [*steps, parameters] for name in Kept._fields[3:]}
    wanted = {"step": steps, "lr": steps, "values": [*steps, 3], **norms}
    if len(steps) != 1 or shapes != wanted or losses[1:] != [3]:
        found = ", ".join(f"{name} {shape}" for name, shape in sorted({**shapes, "losses": losses}.items()))
        raise SealError(checkpoint, f"the last steps that {checkpoint} keeps are none of this run ({found})")


class Recorder:
    """Keeps the last steps of a loop, and writes a report when they went wrong.

    One report for a spike and one for what ends a run: the replay costs as much as the steps since the last
    checkpoint.
    """

    def __init__(self, loop: Loop, steps: int = RING) -> None:
        self._loop = loop
        self.ring: deque[Kept] = deque(maxlen=steps)
        self.losses: dict[int, tuple[float, float]] = {}
        """Loss and gradient norm of the steps since the last checkpoint, as far as they were fetched."""
        told = [report.get("trigger", {}).get("kind", "") for report in loop.folder.flights()]
        self._said = {settled for kind in told for settled in _settles(kind)}

    def tensors(self) -> dict[str, Tensor]:
        """What it remembers, for a checkpoint."""
        if not self.ring:
            return {}
        steps, rates, *kept = zip(*self.ring, strict=True)
        losses = torch.tensor([(s, *v) for s, v in self.losses.items()], dtype=torch.float64)
        numbers = {"step": torch.tensor(steps), "lr": torch.tensor(rates, dtype=torch.float64)}
        named = zip(Kept._fields[2:], map(torch.stack, kept), strict=True)
        return {**numbers, **dict(named), "losses": losses.reshape(-1, 3)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Remember what ``tensors`` gave to a checkpoint."""
        if not tensors:
            return
        steps, rates, losses = (tensors[name].tolist() for name in ("step", "lr", "losses"))
        kept = zip(*(tensors[name].to(self._loop.device) for name in Kept._fields[2:]), strict=True)
        self.ring.extend(Kept(s, lr, *x) for s, lr, x in zip(steps, rates, kept, strict=True))
        self.losses = {int(step): (loss, norm) for step, loss, norm in losses}

    def keep(self, step: int, pending: tuple[float, Tensor], gradients: Tensor, updates: Tensor) -> None:
        """Add a step; nothing waits for the device."""
        self.ring.append(Kept(step, *pending, gradients, updates))

    def see(self, last: int, values: Sequence[Sequence[float]]) -> None:
        """The fetched values of the steps up to the last one."""
        first = last - len(values) + 1
        self.losses |= {first + i: (v[0], v[2]) for i, v in enumerate(values)}

    def look(self) -> None:
        """Write a report if something went wrong since the last look."""
        trigger = self._trigger()
        self.losses = {s: v for s, v in self.losses.items() if s in self._loop.rates or s in self._recent()}
        if trigger is not None and trigger.kind not in self._said:
            self._said |= _settles(trigger.kind)
            self.report(trigger)

    def report(
        self,
        trigger: Trigger,
        *,
        watched: int = WATCHED,
        most: int | None = None,
        history: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """Replay up to the bad step, the last ``watched`` steps of it with every module watched, and add what
        is found to the run's ``flight.json``. At most ``most`` steps are done again, the interval of the
        checkpoints if that is not given. ``history`` is the run's metrics, where the loop did not make them
        itself: what was validated then is not validated again, and losses are compared with theirs.
        """
        held = self._held()
        try:
            replay = _replayed(self._loop, trigger.until, watched, most, history)
        except Exception as error:  # a training must not end because its recorder failed
            replay = Replay(Verdict(f"the replay failed: {type(error).__name__}: {error}", "none"))
        content = {
            "step": self._loop.progress.step,
            "trigger": trigger,
            "verdict": replay.verdict,
            "replay": {"from_step": replay.start, "checkpoint": replay.checkpoint, "agrees": replay.agrees},
            "ring": held,
        }
        self._loop.ranks.on_main(self._loop.folder.add_flight, content)
        return content

    def _recent(self) -> set[int]:
        return {kept.step for kept in self.ring}

    def _trigger(self) -> Trigger | None:
        for step, (loss, norm) in self.losses.items():
            for name, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    return Trigger("not finite", step, step, f"the {name} is {value} in step {step}")
        spike, outcome = self._spike(), self._loop.outcome
        if outcome is not None and outcome.state == "diverged":
            found = spike or Trigger("", outcome.step, outcome.step, "")
            return replace(found, kind="diverged", words=outcome.evidence)
        return spike

    def _spike(self) -> Trigger | None:
        """The first kept step of those that are too high as a whole."""
        steps = [kept.step for kept in self.ring if kept.step in self.losses]
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

    def _held(self) -> dict[str, Any]:
        """The ring as plain numbers."""
        rows: list[dict[str, Any]] = []
        for kept in self.ring:
            loss, nll, norm = kept.values.tolist()
            row = {"step": kept.step, "lr": kept.lr, "loss": loss, "nll": nll, "grad_norm_l2": norm}
            norms = {"gradients": kept.gradients, "updates": kept.updates}
            rows.append(row | {name: [float(f"{v:.4g}") for v in x.tolist()] for name, x in norms.items()})
        return {"parameters": list(self._loop.meter.names), "steps": rows}


def _settles(kind: str) -> set[str]:
    """The kinds of triggers that a report of this kind is the one report of."""
    ends = {"diverged", "not finite"}
    return ends if kind in ends else {kind}


@dataclass(frozen=True)
class Replay:
    """What came of doing steps again."""

    verdict: Verdict
    start: int = 0
    checkpoint: bool = False
    """Whether it began at a checkpoint, or at the first step."""
    agrees: bool | None = None
    """Whether every loss came out as it had been, where they are known."""


def _replayed(
    loop: Loop, stop: int, watched: int, most: int | None, history: Sequence[Mapping[str, Any]]
) -> Replay:
    if loop.ranks.count > 1:
        sentence = "steps of several ranks are not done again while training; ask normlab.training.replay"
        return Replay(Verdict(sentence, "none"))
    most = most or loop.config.machine.checkpoint_every_steps
    recorded = {step: loss for step, (loss, _) in loop.recorder.losses.items()}
    with _set_back(loop, stop) as checkpoint:
        start = loop.progress.step
        if broken := _not_finite(loop):
            sentence = f"the checkpoint of step {start} already holds the fault: {broken} is not finite"
            return Replay(Verdict(sentence, "weight", broken.rpartition(".")[0], start), start, checkpoint)
        if stop - start > most:
            sentence = (
                f"step {stop} lies before the last checkpoint and {stop - start} steps after the start: too "
                "far to do again while training; ask normlab.training.replay"
            )
            return Replay(Verdict(sentence, "none"), start, checkpoint)
        validated = {int(row["step"]): row for row in history if row["kind"] == "dev"}
        steps = list(_again(loop, stop, watched, validated))
    compared = [*_each(steps, recorded), *_means(steps, history)]
    other = next((one for one in compared if not _same(one.now, one.then)), None)
    if other is not None:
        return Replay(_another(other), start, checkpoint, agrees=False)
    return Replay(blame(steps[-watched:]), start, checkpoint, agrees=True if compared else None)


def _again(
    loop: Loop, stop: int, watched: int, validated: Mapping[int, Mapping[str, float]]
) -> Iterator[Observed]:
    """The steps up to ``stop``, or to one whose loss is not finite."""
    loss = 0.0
    while loop.progress.step < stop and math.isfinite(loss):
        seen = _step(loop, WATCHING if loop.progress.step >= stop - watched else NOTHING)
        loss = seen.loss
        yield seen
        if seen.step in validated:
            loop.improved(validated[seen.step])


class _Loss(NamedTuple):
    """A loss as it was, and as it came out again."""

    step: int
    then: float
    now: float


def _each(steps: Sequence[Observed], recorded: Mapping[int, float]) -> Iterator[_Loss]:
    return (_Loss(seen.step, recorded[seen.step], seen.loss) for seen in steps if seen.step in recorded)


def _means(steps: Sequence[Observed], history: Sequence[Mapping[str, Any]]) -> Iterator[_Loss]:
    """The rows of metrics whose steps were all done again: a row has the mean over those since the last."""
    losses, before = {seen.step: seen.loss for seen in steps}, 0
    for row in history:
        if row["kind"] == "train":
            step = int(row["step"])
            covered = range(before + 1, step + 1)
            # Several ranks add in another order, and a training makes such a difference larger.
            if all(s in losses for s in covered) and "ranks" not in row:
                yield _Loss(step, float(row["loss"]), sum(losses[s] for s in covered) / len(covered))
            before = step


def _another(one: _Loss) -> Verdict:
    """The fault is in nothing that a configuration says."""
    return Verdict(
        f"done again, step {one.step} comes out otherwise: what went wrong is not in the configuration; look "
        "at the hardware, at a device that does not repeat its sums, and at code from outside that touches "
        "the model",
        "none",
        step=one.step,
        evidence=(f"loss up to step {one.step}: {one.then:.6g} then, {one.now:.6g} now",),
    )


def _same(a: float, b: float) -> bool:
    """Equal but for the last digit, which the order of a mean can change."""
    return math.isclose(a, b, rel_tol=1e-12) or (math.isnan(a) and math.isnan(b))


def _step(loop: Loop, preset: Preset) -> Observed:
    """One more step of the loop, watched."""
    records: list[Record] = []
    loop.probing = Probing(loop.model, preset, 1, records.append)
    loop.step()
    (kept,) = loop.recorder.ring
    names = loop.meter.names
    return Observed(
        step=kept.step,
        lr=kept.lr,
        loss=kept.values[0].item(),
        records=tuple(records),
        gradients=dict(zip(names, kept.gradients.tolist(), strict=True)),
        updates=dict(zip(names, kept.updates.tolist(), strict=True)),
    )


@contextmanager
def _set_back(loop: Loop, stop: int) -> Iterator[bool]:
    """Within this block the loop stands at its last checkpoint, or at its start where there is none before
    ``stop``; then it is as it was. Gives whether it is a checkpoint.
    """
    state = loop.optimiser.state
    now = loop.progress, loop.pending, loop.probing, loop.recorder, dict(loop.rates), loop.scaling
    weights = [w.to("cpu", copy=True) for w in loop.meter.weights]
    loop.optimiser.state = type(state)(dict)
    loop.pending, loop.recorder = list[tuple[float, Tensor]](), Recorder(loop, steps=1)
    loop.scaling = loop.unscaled()
    try:
        found = has_checkpoint(loop.folder.last)
        if found:
            last = loop.folder.last
            saved = saved_of(load_checkpoint(last, loop.model, loop.optimiser, run=loop.folder.id()), last)
            loop.scaling.load(saved.scaling)
            loop.progress = saved.position
            found = loop.progress.step < stop or bool(_not_finite(loop))
        if not found:
            loop.optimiser.state.clear()
            loop.progress, loop.scaling = type(loop.progress)(), loop.unscaled()
            anew = loop.task.build()
            loop.begin(anew)
            with torch.no_grad():
                for w, first in zip(loop.meter.weights, anew.parameters(), strict=True):
                    w.copy_(first)
        yield found
    finally:
        loop.progress, loop.pending, loop.probing, loop.recorder, loop.rates, loop.scaling = now
        loop.optimiser.state = state
        loop.optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            for w, kept_weight in zip(loop.meter.weights, weights, strict=True):
                w.copy_(kept_weight)


def _not_finite(loop: Loop) -> str:
    """The first parameter that is not finite."""
    largest = torch.stack([w.abs().amax() for w in loop.meter.weights]).tolist()
    return next((n for n, v in zip(loop.meter.names, largest, strict=True) if not math.isfinite(v)), "")

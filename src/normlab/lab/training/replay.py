"""Replays: steps of a run done again with every module watched, to see which one went wrong first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from normlab.diagnosis.probes import Record
from normlab.errors import UserError
from normlab.lab.recipes.grammar import require_known
from normlab.lab.runs.folder import Row, RunFolder
from normlab.lab.training.checkpoint import Checkpoint, has_checkpoint, open_checkpoint
from normlab.lab.training.probing import probed
from normlab.lab.training.trainer import AnyTask, Trainer, load_task
from normlab.watching.fault import EVERYTHING, NOTHING, NOWHERE, Fault, fault
from normlab.watching.flight import Replayed, Trigger, report_of
from normlab.watching.meter import StepRecord
from normlab.watching.recorder import RING

WATCHED: Final = 64
"""Steps before the bad one in which a replay watches every module; earlier steps run again unwatched."""
LATER: Final = "call normlab.lab.training.replay.examine on the run later"
DIFFERS: Final = (
    "done again, step {step} comes out differently: what went wrong is not in the configuration; look at the "
    "hardware, at a device that does not repeat its sums, and at outside code that uses the model"
)


def examine(path: str | Path, step: int | None = None, *, watched: int = WATCHED) -> dict[str, Any]:
    """Do a run's steps again up to ``step``, or to its last one, and say which module went wrong first.

    It begins at the run's last checkpoint if that lies before ``step``, else at the start; every module is
    watched in the last ``watched`` steps. The run itself stays the same, except that the returned report is
    added to its ``flight.json``. If losses differ from the first time, the report says so and blames nothing.
    Raises UserError for a step that the run has not made, and if another process is working on the run.
    """
    folder = RunFolder(path)
    config, made = folder.config(), folder.status().step
    stop = made if step is None else step
    if not 1 <= stop <= made:
        raise UserError(
            f"step is {stop}, and the run {folder.path} has made {made}; give one from 1 to {made}"
        )
    require_known(config)
    task = load_task(config, folder.path.parent)
    with folder.lock():
        answer = replay(task, folder, stop, watched=watched, history=folder.metrics())
        outcome = folder.status().outcome
        if outcome is not None and outcome.state == "trained" and answer.fault.sentence == NOWHERE:
            answer = replace(answer, fault=replace(answer.fault, sentence=NOTHING))
        trigger = Trigger("asked", stop, stop, f"asked about step {stop}")
        report = report_of(stop, trigger, answer, answer.records)
        folder.add_flight(report)
    return report


def replay(
    task: AnyTask,
    folder: RunFolder,
    stop: int,
    *,
    watched: int = WATCHED,
    most: int | None = None,
    losses: Mapping[int, float] | None = None,
    history: Sequence[Row],
) -> Replayed:
    """Repeat the steps from the run's last checkpoint, or from the start, up to ``stop``, if there are at
    most ``most``.

    The results are compared with the ``losses`` by step and with ``history``, the rows of the run's metrics;
    validations are not repeated.
    """
    with closing(Trainer(task)) as trainer:
        checkpoint = _checkpoint(folder, stop)
        if checkpoint is None:
            trainer.begin()
        else:
            trainer.load_state_dict(checkpoint.state(trainer.parallel.shapes()))
        start = trainer.progress.step
        replayed = partial(Replayed, start=start, checkpoint=checkpoint is not None)
        weights = dict(zip(trainer.meter.names, trainer.meter.weights, strict=True))
        if broken := _not_finite(weights):
            sentence = f"the checkpoint of step {start} already holds the fault: {broken} is not finite"
            return replayed(Fault(sentence, "weight", broken.rpartition(".")[0], start))
        if most is not None and stop - start > most:
            why = f"step {stop} lies before the last checkpoint and {stop - start} steps after the start"
            return replayed(Fault(f"{why}: too far to do again while training; {LATER}", "none"))
        steps = list(_again(trainer, stop, watched, history))
    records = tuple(steps[-RING:])
    if task.config.machine.compile:  # watched modules run uncompiled, and round differently
        return replayed(fault(steps[-watched:]), records=records)
    losses_now = {record.step: record.values[0].item() for record in steps}
    compared = list(_compared(losses_now, losses or {}, history))
    for step, then, now in compared:
        if not _same_loss(then, now):
            evidence = f"loss up to step {step}: {then:.6g} then, {now:.6g} now"
            differs = Fault(DIFFERS.format(step=step), "none", step=step, evidence=(evidence,))
            return replayed(differs, agrees=False, records=records)
    return replayed(fault(steps[-watched:]), agrees=True if compared else None, records=records)


def _same_loss(then: float, now: float) -> bool:
    """Whether two losses are equal but for the last digits, which the order of a mean can change."""
    if math.isnan(then) or math.isnan(now):
        return math.isnan(then) and math.isnan(now)
    return math.isclose(then, now, rel_tol=1e-12)


def _checkpoint(folder: RunFolder, stop: int) -> Checkpoint | None:
    """Return the run's last checkpoint, if it lies before the step or already holds the fault."""
    if not has_checkpoint(folder.last):
        return None
    checkpoint = open_checkpoint(folder.last, run=folder.id())
    usable = checkpoint.progress().step < stop or _not_finite(checkpoint.weights())
    return checkpoint if usable else None


def _not_finite(weights: Mapping[str, Tensor]) -> str:
    """Return the name of the first parameter that is not finite; empty if there is none."""
    return next((name for name, w in weights.items() if not math.isfinite(w.abs().amax())), "")


def _again(trainer: Trainer, stop: int, watched: int, history: Sequence[Row]) -> Iterator[StepRecord]:
    """Do the steps up to ``stop``, or to one whose loss is not finite."""
    seen: list[Record] = []
    validated = {int(row["step"]): row for row in history if row["kind"] == "dev"}

    def watch(step: int, micro_batch: int) -> AbstractContextManager[None]:
        if micro_batch:
            return nullcontext()
        return probed(trainer.model, EVERYTHING, seen.append, step)

    while trainer.progress.step < stop:
        near = trainer.progress.step >= stop - watched
        record = trainer.step(watch) if near else trainer.step()
        yield record._replace(seen=tuple(seen))
        seen.clear()
        if not math.isfinite(record.values[0].item()):
            return
        if record.step in validated:  # its scores may have changed the schedule
            trainer.note_scores(validated[record.step])


def _compared(
    now: Mapping[int, float], then: Mapping[int, float], history: Sequence[Row]
) -> Iterator[tuple[int, float, float]]:
    """Yield steps with their losses then and now: single ones, and rows (means) whose steps all ran again."""
    for step, loss in now.items():
        if step in then:
            yield step, then[step], loss
    last_row = 0
    for row in history:
        if row["kind"] != "train":
            continue
        steps = range(last_row + 1, int(row["step"]) + 1)
        # Several ranks add in another order, and training amplifies the difference.
        if "ranks" not in row and all(step in now for step in steps):
            yield steps[-1], float(row["loss"]), sum(now[step] for step in steps) / len(steps)
        last_row = int(row["step"])

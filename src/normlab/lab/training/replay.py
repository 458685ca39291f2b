"""Probes of normlab's models while they train, and replays: steps done again with every module watched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.diagnosis.presets import PRESETS, SublayerSite, preset_probes
from normlab.diagnosis.probes import PARAMETERS, Emit, Key, Probe, Record, observe
from normlab.errors import UserError
from normlab.lab.recipes.grammar import require_known
from normlab.lab.runs.folder import Row, RunFolder
from normlab.lab.training.checkpoint import Checkpoint, has_checkpoint, open_checkpoint
from normlab.lab.training.parallel import Parallel
from normlab.lab.training.trainer import AnyTask, Trainer, load_task
from normlab.nn.sublayer import Sublayer
from normlab.trace.tensors import Tap, eager
from normlab.watching.fault import EVERYTHING, NOTHING, NOWHERE, Fault, fault
from normlab.watching.flight import Replayed, Trigger, report_of
from normlab.watching.meter import Grouping, Meter, StepRecord, norms_of
from normlab.watching.recorder import RING


def activation_probes(model: nn.Module, preset: str) -> list[Probe]:
    """Return the probes of a preset of ``diagnosis.presets`` in this model; none for "".

    Parameters are not probed, since the trainer has their norms.
    """
    probes = preset_probes(_sites(model), preset) if preset else []
    return [probe for probe in probes if probe.signal not in PARAMETERS]


def _sites(model: nn.Module) -> Iterator[SublayerSite]:
    for path, module in model.named_modules():
        if isinstance(module, Sublayer):
            stack, _, number = path.rpartition(".")
            inside = [name for name, _ in module.named_modules(prefix=path) if name.startswith(f"{path}.f.")]
            before, branch, after = Tap(path, "input", (0,)), Tap(f"{path}.f", "output"), Tap(path, "output")
            taps = {"before": before, "branch": branch, "after": after}
            yield SublayerSite(stack, int(number), tuple(inside), taps)


@contextmanager
def _probed(model: nn.Module, probes: Sequence[Probe], emit: Emit, step: int) -> Iterator[None]:
    with eager(), observe(model, probes, emit) as observer:
        yield
        observer.flush(step)


_WHOLE: Final = (("grad", "l2"), ("weight", "l2"), ("update", "ratio"))
"""Signals and statistics of all parameters of a sublayer."""


class Probing:
    """Measures what a preset of ``diagnosis.presets`` names in one model in training, on the first
    micro-batch of every step that is ``due``; nothing for "".

    Gradients are measured before clipping, and updates relative to the weights, for each sublayer and, from
    ``standard`` on, for each kind of matrix. Between the measured steps there are no hooks. A measured step
    waits for the device once, for activations and gradients; ``flush`` fetches what belongs to parameters.
    """

    def __init__(self, model: nn.Module, preset: str, every_steps: int, emit: Emit) -> None:
        self._model, self._emit, self._every_steps = model, emit, every_steps
        self._probes = activation_probes(model, preset)
        self._of_kinds = preset != PRESETS[0]
        self._homes = homes = [path for path, module in model.named_modules() if isinstance(module, Sublayer)]
        parameters = dict(model.named_parameters())
        owners = [next((h for h in homes if n.startswith(f"{h}.")), n.rpartition(".")[0]) for n in parameters]
        self._grouping = Grouping(owners, next(iter(parameters.values())).device)
        self._late: list[tuple[int, list[Key], Tensor]] = []

    def due(self, step: int) -> bool:
        """Whether a step is measured: the first one, and every multiple of the cadence."""
        return bool(self._probes) and (step == 1 or step % self._every_steps == 0)

    def passing(self, step: int, micro: int) -> AbstractContextManager[None]:
        if micro or not self.due(step):
            return nullcontext()
        return _probed(self._model, self._probes, self._emit, step)

    @torch.no_grad()
    def measure_step(self, record: StepRecord, meter: Meter, parallel: Parallel) -> None:
        """Keep the norms of an optimizer step for ``flush`` to fetch."""
        if not self.due(record.step):
            return
        groups, views = self._grouping, parallel.matrices if self._of_kinds else ()
        keys: list[Key] = [(*self._place(m), m, signal, how) for signal, how in _WHOLE for m in groups.names]
        keys += [(*self._place(v.module), v.module, f"update[{v.kind}]", "ratio") for v in views]
        lengths = groups.together(meter.norms(meter.weights))
        values = [groups.together(record.gradients), lengths, groups.together(record.updates) / lengths]
        if views:
            moved, weights = (
                norms_of([v.of(parallel.whole(meter.names[v.index], tensors[v.index])) for v in views])
                for tensors in (meter.moved, meter.weights)
            )
            values.append(moved / weights)
        self._late.append((record.step, keys, torch.cat(values)))

    def flush(self) -> None:
        if not self._late:
            return
        fetched = torch.stack([values for *_, values in self._late]).tolist()
        for (step, keys, _), values in zip(self._late, fetched, strict=True):
            for key, value in zip(keys, values, strict=True):
                self._emit(Record(step, *key, value))
        self._late.clear()

    def _place(self, module: str) -> tuple[str | None, int | None]:
        """Return the stack and the index of a sublayer, None for any other module."""
        stack, _, number = module.rpartition(".")
        return (stack, int(number)) if module in self._homes else (None, None)


WATCHED: Final = 64
"""Steps before the bad one in which a replay watches every module; earlier steps run again unwatched."""
LATER: Final = "ask normlab.lab.training.replay"
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
        start, there, names = trainer.progress.step, checkpoint is not None, trainer.meter.names
        if broken := _not_finite(dict(zip(names, trainer.meter.weights, strict=True))):
            sentence = f"the checkpoint of step {start} already holds the fault: {broken} is not finite"
            return Replayed(Fault(sentence, "weight", broken.rpartition(".")[0], start), start, there)
        if most is not None and stop - start > most:
            why = f"step {stop} lies before the last checkpoint and {stop - start} steps after the start"
            return Replayed(
                Fault(f"{why}: too far to do again while training; {LATER}", "none"), start, there
            )
        steps = list(_again(trainer, stop, watched, history))
    done = {one.step: one.values[0].item() for one in steps}
    # watched modules run uncompiled, and round differently
    compared = [] if task.config.machine.compile else list(_compared(done, losses or {}, history))
    records = tuple(steps[-RING:])
    for step, then, now in compared:
        # the order of a mean can change the last digit
        if not (math.isclose(then, now, rel_tol=1e-12) or (math.isnan(then) and math.isnan(now))):
            evidence = f"loss up to step {step}: {then:.6g} then, {now:.6g} now"
            other = Fault(DIFFERS.format(step=step), "none", step=step, evidence=(evidence,))
            return Replayed(other, start, there, agrees=False, records=records)
    agrees = True if compared else None
    return Replayed(fault(steps[-watched:]), start, there, agrees=agrees, records=records)


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
    finite = True

    def watch(step: int, micro: int) -> AbstractContextManager[None]:
        return nullcontext() if micro else _probed(trainer.model, EVERYTHING, seen.append, step)

    while trainer.progress.step < stop and finite:
        record = trainer.step(watch) if trainer.progress.step >= stop - watched else trainer.step()
        finite = math.isfinite(record.values[0].item())
        yield record._replace(seen=tuple(seen))
        seen.clear()
        if record.step in validated:
            trainer.note_scores(validated[record.step])


def _compared(
    now: Mapping[int, float], then: Mapping[int, float], history: Sequence[Row]
) -> Iterator[tuple[int, float, float]]:
    """Yield steps with their losses then and now: single ones, and rows (means) whose steps all ran again."""
    yield from ((step, then[step], now[step]) for step in now if step in then)
    before = 0
    for row in history:
        if row["kind"] == "train":
            covered = range(before + 1, int(row["step"]) + 1)
            # Several ranks add in another order, and training amplifies the difference.
            if all(s in now for s in covered) and "ranks" not in row:
                yield covered[-1], float(row["loss"]), sum(now[s] for s in covered) / len(covered)
            before = int(row["step"])

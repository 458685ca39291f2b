"""A run: a training in its folder, with rows, validations and checkpoints, until it ends."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from normlab.config.units import printable
from normlab.errors import UserError
from normlab.runs.files import regular
from normlab.runs.folder import RunFolder, State, Status
from normlab.runs.manifest import committed, read_state
from normlab.training.callbacks.base import Callback, Callbacks, Row
from normlab.training.callbacks.probing import Probing, preset_of
from normlab.training.checkpoint import open_checkpoint, resume, save_checkpoint
from normlab.training.devices import hardware
from normlab.training.progress import Clock
from normlab.training.replay import LATER, replay
from normlab.training.rows import Rows
from normlab.training.stopping import Ending
from normlab.training.trainer import Trainer
from normlab.training.validation import Validation
from normlab.training.warm_start import write as write_initial
from normlab.training.weights import StepWeights
from normlab.watching.fault import Fault
from normlab.watching.recorder import NATS, Recorder, Replayed


class Run:
    """One run in progress: the steps of a trainer, and what its parts do in between."""

    def __init__(self, trainer: Trainer, folder: RunFolder, callbacks: Sequence[Callback] = ()) -> None:
        self.trainer, self.folder = trainer, folder
        self.config, self.ranks, self.progress = trainer.config, trainer.ranks, trainer.progress
        self.callbacks = Callbacks(callbacks if self.ranks.main else (), trainer.snapshot)
        self.rows = Rows(folder, trainer.device, self._written)
        self.step_weights = StepWeights(folder, self.config)
        self.recorder = Recorder(folder, limits=NATS, replay=self._replay)
        with self.ranks.main_first():
            if refused := resume(folder.last, folder.previous, self._load):
                _notice(folder, refused)
            if self.progress.best_step is not None:  # or the run would find out when it is over
                read_state(committed(folder.best), run=folder.id())
            self.ranks.on_main(folder.cut_rows, self.progress.step)
        self.rows.written = folder.metrics()
        if not self.progress.step and (initial := trainer.begin()):
            self.ranks.on_main(write_initial, folder, initial)
        machine, self._measured = self.config.machine, list[Row]()
        preset, every = preset_of(machine.probes, trainer.model), machine.probe_every_steps
        self.probing = Probing(trainer.model, preset, every, lambda r: self._measured.append(r._asdict()))
        self._saved, self.clock = self.progress.step, Clock(self.progress.seconds)
        self.hardware = self._hardware()
        self.validation = Validation(trainer, folder, self.rows, self.clock)
        self.ending = Ending(trainer, self.rows)
        self._report("running")

    def run(self, interrupted: threading.Event) -> None:
        """Train to the last step, or to the step at which the outcome is clear."""
        train, machine, ending = self.config.train, self.config.machine, self.ending
        self.callbacks.tell(self.progress.step, began=True)
        self._keep_weights()
        while not ending.reached:
            self.step()
            step = self.progress.step
            last = step == train.steps
            if last or step % machine.log_every_steps == 0 or step == 1:
                self.flush()
                ending.judge(final=last)
                self._examine()
            if last or step % train.validate_every_steps == 0:
                self.validation.run()
                ending.judge(final=last)
            self._keep_weights()
            ending.consider_stopping()
            if ending.reached:
                self._conclude()
            if self.ranks.any(interrupted.is_set()):
                self.checkpoint("interrupted")
                raise KeyboardInterrupt
            if not ending.reached and step % machine.checkpoint_every_steps == 0:
                self.checkpoint("running")
        self._keep_weights(last=True)
        if self.progress.stopped or ending.outcome is None:
            ending.judge(final=True)
        self.checkpoint("running")
        if train.average_last:
            self.validation.average(self.step_weights)

    def step(self) -> None:
        """Do one step and keep its record, on the device."""
        record = self.trainer.step(self.probing.passing)
        self.probing.stepped(record.step, self.trainer.meter, record.gradients, record.updates)
        self.rows.add(record)
        self.recorder.add(record)

    def flush(self) -> None:
        """Fetch the steps since the last flush from the device, and write one row for them."""
        columns = self.rows.fetch()
        self.recorder.fetch()
        self.progress.seconds = self.clock.seconds()
        counts = {name: getattr(self.progress, name) for name in ("tokens", "padded_tokens", "seconds")}
        extra = {**self.trainer.scaling.row(), **self.ranks.row()}
        self.rows.write({"kind": "train", "step": self.progress.step, **columns, **counts, **extra})
        self._write_probes()

    def checkpoint(self, state: State) -> None:
        """Save everything that is needed to go on from here."""
        if state == "running":
            with self.clock.stopped():
                self.ranks.on_main(self.recorder.report_spike, self.progress.step)
        self.ranks.on_main(self.step_weights.prune, self._saved, self.rows.validations())
        self._saved = self.progress.step
        self._write_probes()
        self.ranks.on_main(self.folder.sync_rows)
        self.progress.seconds = self.clock.seconds()
        parts = {"rows": self.rows.state_dict(), "recorder": self.recorder.state_dict()}
        save = partial(save_checkpoint, run=self.folder.id(), previous=self.folder.previous)
        self.ranks.on_main(save, self.folder.last, self.trainer.state_dict() | parts)
        self.recorder.saved(self._saved)
        self.callbacks.tell(self._saved, saved=True)
        self._report(state)

    def _hardware(self) -> str:
        """The hardware of all steps so far; a change of it, which changes how sums are rounded, is told."""
        now, before = hardware(self.trainer.device, self.ranks.count), self.folder.status().hardware
        step, last = self.progress.step, re.split(r"; from step [\d,]+ on ", before)[-1]
        if not step or not before or last == now:
            return before if step and before else now
        sentence = f"the run goes on from step {step:,} on {now}, and was made on {last} so far"
        exactly = "sums are rounded otherwise there, so that neither alone repeats it bit for bit"
        self.ranks.on_main(_notice, self.folder, f"{sentence}; {exactly}")
        return f"{before}; from step {step + 1:,} on {now}"

    def _load(self, folder: Path) -> int:
        """Go on from a checkpoint; return its step."""
        checkpoint = open_checkpoint(folder, run=self.folder.id())
        state = checkpoint.state(self.trainer.shapes())
        with checkpoint.loading():
            self.trainer.load_state_dict(state)
            if self.progress.step > self.config.train.steps:
                steps = self.config.train.steps
                raise UserError(f"progress.step is {self.progress.step}, and the run has {steps} steps")
            sizes = self.rows.load_state_dict(state.get("rows", {}))
            self.folder.require_rows(sizes, folder)
            names, device = self.trainer.meter.names, self.trainer.device
            self.recorder.load_state_dict(state.get("recorder", {}), names, device)
        return self.progress.step

    def _replay(self, stop: int, losses: Mapping[int, float]) -> Replayed:
        if self.ranks.count > 1:
            sentence = f"steps of several ranks are not done again while training; {LATER}"
            return Replayed(Fault(sentence, "none"))
        most, history = self.config.machine.checkpoint_every_steps, self.rows.written
        return replay(self.trainer.task, self.folder, stop, most=most, losses=losses, history=history)

    def _examine(self) -> None:
        """Let the flight recorder look; a replay is no training time."""
        with self.clock.stopped():
            self.ranks.on_main(self.recorder.check_steps, self.progress.step, self.ending.outcome)

    def _written(self, row: Row) -> None:
        self.ranks.on_main(self.folder.append_metrics, row)
        self.callbacks.tell(self.progress.step, rows=[row], validated=row["kind"] == "dev")

    def _write_probes(self) -> None:
        self.probing.flush()
        if self._measured:
            self._measured.sort(key=lambda row: row["step"])  # whenever they are fetched, in one order
            self.ranks.on_main(self.folder.append_probes, self._measured)
            self.callbacks.tell(self.progress.step, probes=self._measured)
            self._measured.clear()

    def _conclude(self) -> None:
        """Write the last rows before their step's checkpoint: a resumed run must not write them again."""
        p = self.progress
        if self.rows.pending:
            self.flush()
            self._examine()
        if p.best_step is None or (p.stopped and not self.rows.validated(p.step)):
            self.validation.run()
        self.ending.judge(final=self.ending.over)

    def _keep_weights(self, *, last: bool = False) -> None:
        step = self.progress.step
        if self.step_weights.wants(step, validated=self.rows.validated(step), last=last):
            with self.trainer.ema.in_place():
                self.ranks.on_main(self.step_weights.save, self.trainer.parallel.plain(), step)

    def _report(self, state: State) -> None:
        p = self.progress
        status = Status(
            state=state,
            step=p.step,
            outcome=self.ending.outcome,
            best_step=p.best_step,
            best_dev=dict(p.best_dev),
            train_seconds=p.seconds,
            hardware=self.hardware,
            stopped=p.stopped,
        )
        self.ranks.on_main(self.folder.set_status, status)


def _notice(folder: RunFolder, sentence: str) -> None:
    """Write a sentence to standard error and to the run's log, which are one file in a queue's worker."""
    line = f"normlab: {printable(sentence)}\n"
    with suppress(OSError):  # the terminal may be gone
        sys.stderr.write(line)
        sys.stderr.flush()
    with open(folder.log, "a", encoding="utf-8", errors="backslashreplace", opener=regular) as file:
        if not os.path.sameopenfile(file.fileno(), 2):
            file.write(line)

"""A run in progress: the steps of its trainer, with rows, validations and checkpoints in between."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from normlab.errors import UserError
from normlab.lab.runs.folder import RunFolder, State, Status, write_json_atomic
from normlab.lab.runs.manifest import committed, read_state
from normlab.lab.training.checkpoint import open_checkpoint, resume, save_checkpoint
from normlab.lab.training.devices import hardware, hardware_so_far
from normlab.lab.training.log import notice
from normlab.lab.training.parts import RunContext, RunPart
from normlab.lab.training.progress import TrainingClock
from normlab.lab.training.recording import FlightRecorder, MetricRows, ProbeRows, StoppingRule
from normlab.lab.training.trainer import Trainer
from normlab.lab.training.validation import KeptWeights, Validation

_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of Ctrl-C, of a queue and of a terminal that is closed."""


class Run(RunContext):
    """A run in progress: the steps of a trainer, and what its parts do in between."""

    def __init__(self, trainer: Trainer, folder: RunFolder, observers: Sequence[RunPart] = ()) -> None:
        super().__init__(trainer, folder)
        self.hardware = ""
        self.rows = MetricRows(self)
        self.probes = ProbeRows(self)
        self.stopping = StoppingRule(self, self.rows)
        self.recorder = FlightRecorder(self, self.rows, self.stopping)
        self.weights = KeptWeights(self, self.rows)
        self.validation = Validation(self, self.rows, self.weights)
        # Parts are called in this order: the recorder needs the outcome that the stopping rule has judged.
        self.parts = (self.rows, self.probes, self.stopping, self.recorder, self.validation, self.weights)
        if self.ranks.main:
            self.parts = (*observers, *self.parts)

    def resume(self) -> Run:
        """Continue from the newest usable checkpoint, or begin at the start; return the run."""
        with self.ranks.main_first():
            if refused := resume(self.folder.last, self.folder.previous, self._load):
                notice(self.folder, refused)
            if self.progress.best_step is not None:
                # A run would find out only at its end that its best weights are damaged.
                read_state(committed(self.folder.best), run=self.folder.id())
            self.ranks.on_main(self.folder.cut_rows, self.progress.step)
        self.rows.written = self.folder.metrics()
        if not self.progress.step and (initial := self.trainer.begin()):
            start = {**asdict(initial), "sentence": initial.sentence()}
            self.ranks.on_main(write_json_atomic, self.folder.start, start)
        self.saved = self.progress.step
        self.clock = TrainingClock(self.progress.seconds)
        before = self.folder.status().hardware
        now = hardware(self.trainer.device, self.ranks.count)
        self.hardware, changed = hardware_so_far(before, now, self.progress.step)
        if changed:
            self.ranks.on_main(notice, self.folder, changed)
        self.stopping.judge()
        self._report("running")
        return self

    def train(self) -> None:
        """Train to the last step, or to the step at which the outcome is clear.

        The first Ctrl-C saves a checkpoint after the step in progress and raises KeyboardInterrupt.
        """
        train, machine = self.config.train, self.config.machine
        with _graceful_interrupt() as interrupted, self.clock.watched():
            for part in self.parts:
                part.on_start(self)
            self.weights.keep()
            while not self.stopping.reached:
                self.step()
                step = self.progress.step
                last = step == train.steps
                if last or step % machine.log_every_steps == 0 or step == 1:
                    self.rows.flush()
                if last or step % train.validate_every_steps == 0:
                    self.validation.run()
                self.weights.keep()
                if self.stopping.consider():
                    self._conclude()
                if self.ranks.any(interrupted.is_set()):
                    self.checkpoint("interrupted")
                    raise KeyboardInterrupt
                if not self.stopping.reached and step % machine.checkpoint_every_steps == 0:
                    self.checkpoint("running")
            self.weights.keep(last=True)
            self.checkpoint("running")
            if train.average_last:
                self.validation.average()

    def step(self) -> None:
        record = self.trainer.step(self.probes.passing)
        for part in self.parts:
            part.on_step(record)

    def checkpoint(self, state: State) -> None:
        for part in self.parts:
            part.before_checkpoint(interrupted=state == "interrupted")
        self.saved = self.progress.step
        # Rows reach the disk before the checkpoint that counts on them.
        self.ranks.on_main(self.folder.sync_rows)
        self.progress.seconds = self.clock.seconds()
        parts = {part.key: part.state_dict() for part in self.parts if part.key}
        save = partial(save_checkpoint, run=self.folder.id(), previous=self.folder.previous)
        self.ranks.on_main(save, self.folder.last, self.trainer.state_dict() | parts)
        for part in self.parts:
            part.on_checkpoint(self.saved)
        self._report(state)

    def end(self) -> None:
        for part in self.parts:
            part.on_end()

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def _load(self, folder: Path) -> int:
        checkpoint = open_checkpoint(folder, run=self.folder.id())
        state = checkpoint.state(self.trainer.parallel.shapes())
        with checkpoint.loading():
            self.trainer.load_state_dict(state)
            steps = self.config.train.steps
            if self.progress.step > steps:
                raise UserError(f"progress.step is {self.progress.step}, and the run has {steps} steps")
            for part in self.parts:
                part.load_state_dict(state.get(part.key, {}))
            self.folder.require_rows(self.rows.sizes, folder)
        return self.progress.step

    def _conclude(self) -> None:
        """Write the last rows before their step's checkpoint: a resumed run must not write them again."""
        if self.rows.pending:
            self.rows.flush()
        stopped_unscored = self.progress.stopped and not self.rows.validated
        if self.progress.best_step is None or stopped_unscored:
            self.validation.run()
        self.stopping.judge()

    def _report(self, state: State) -> None:
        progress = self.progress
        status = Status(
            state=state,
            step=progress.step,
            outcome=self.stopping.outcome,
            best_step=progress.best_step,
            best_dev=dict(progress.best_dev),
            train_seconds=progress.seconds,
            hardware=self.hardware,
            stopped=progress.stopped,
        )
        self.ranks.on_main(self.folder.set_status, status)


@contextmanager
def _graceful_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C, or a closed terminal, set an event, so that the step in progress is saved.

    The second one interrupts at once. A signal that is ignored, as under ``nohup``, stays ignored.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        with contextlib.suppress(OSError, RuntimeError, AttributeError):  # gone, busy just now, or none
            sys.stderr.write("\nsaving after this step; press Ctrl-C again to stop at once\n")

    before = {s: signal.signal(s, handle) for s in _STOPS if signal.getsignal(s) != signal.SIG_IGN}
    try:
        yield event
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)

"""A run: a training in its folder, with rows, validations and checkpoints, until it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from normlab.spec.outcome import Outcome
from normlab.store.folder import RunFolder, Status
from normlab.store.manifest import committed, read_state
from normlab.training.callbacks.base import Callback, Callbacks, Row
from normlab.training.callbacks.blame import Verdict
from normlab.training.callbacks.flight import Recorder, Replay
from normlab.training.callbacks.probing import Probing, preset_of, rows_into
from normlab.training.checkpoint import (
    has_checkpoint,
    open_checkpoint,
    resume,
    save_checkpoint,
    weights_state,
)
from normlab.training.devices import hardware
from normlab.training.notice import notice
from normlab.training.outcome import outcome
from normlab.training.phase import Phases
from normlab.training.replay import LATER, replayed
from normlab.training.rows import Rows
from normlab.training.stopping import why_stop
from normlab.training.trainer import Trainer
from normlab.training.warm_start import write as write_initial
from normlab.training.weights import StepWeights


class Run:
    """One run in progress: what follows each step of its trainer."""

    def __init__(self, trainer: Trainer, folder: RunFolder, callbacks: Sequence[Callback] = ()) -> None:
        self.trainer, self.folder = trainer, folder
        self.config, self.ranks, self.progress = trainer.config, trainer.ranks, trainer.progress
        self.callbacks = Callbacks(callbacks if self.ranks.main else (), trainer.snapshot)
        self.rows, self.kept = Rows(folder, trainer.device), StepWeights(folder, self.config)
        self.recorder = Recorder(folder, trainer.meter.names, trainer.device, self._replay)
        with self.ranks.main_first():
            if refused := resume(folder.last, folder.previous, self._load):
                notice(folder, refused)
            if self.progress.best_step is not None:  # or the run would find out when it is over
                read_state(committed(folder.best), run=folder.id())
            self.ranks.on_main(folder.cut_rows, self.progress.step)
        self.rows.written = folder.metrics()
        if not self.progress.step and (initial := trainer.begin()):
            self.ranks.on_main(write_initial, folder, initial)
        machine, self._measured = self.config.machine, list[Row]()
        preset, emit = preset_of(machine.probes, trainer.model), rows_into(self._measured)
        self.probing = Probing(trainer.model, preset, machine.probe_every_steps, emit)
        self._phases, self._saved = Phases(folder), self.progress.step
        self.outcome = self._judge(final=self._over())
        self._clock = time.perf_counter() - self.progress.seconds
        self._report("running")

    def run(self, interrupted: threading.Event) -> None:
        """Train to the last step, or to the step at which the outcome is clear."""
        train, machine = self.config.train, self.config.machine
        self.callbacks.tell(self.progress.step, began=True)
        self._keep_weights()
        while not self._ended():
            self.step()
            step = self.progress.step
            last = step == train.steps
            if last or step % machine.log_every_steps == 0 or step == 1:
                self.flush()
                self.outcome = self._judge(final=last)
                self._examine()
            if last or step % train.validate_every_steps == 0:
                self.validate()
                self.outcome = self._judge(final=last)
            self._keep_weights()
            self._consider_stopping()
            if self._ended():
                self._conclude()
            if self.ranks.any(interrupted.is_set()):
                self.checkpoint("interrupted")
                raise KeyboardInterrupt
            if not self._ended() and step % machine.checkpoint_every_steps == 0:
                self.checkpoint("running")
        self._keep_weights(last=True)
        if self.progress.stopped or self.outcome is None:
            self.outcome = self._judge(final=True)
        self.checkpoint("running")
        if train.average_last:
            model = self.trainer.parallel.plain()
            self.ranks.from_main(lambda: self._average(model))

    def step(self) -> None:
        """Do one step and keep its record, on the device."""
        record = self.trainer.step(self.probing.passing)
        self.probing.stepped(record.step, self.trainer.meter, record.gradients, record.updates)
        self.rows.add(record)
        self.recorder.add(record)

    def flush(self) -> None:
        """Fetch the steps since the last flush from the device, and write one row for them."""
        columns, values = self.rows.fetch()
        self.recorder.fetched(self.progress.step, values)
        self.progress.seconds = self._seconds()
        counts = {name: getattr(self.progress, name) for name in ("tokens", "padded_tokens", "seconds")}
        extra = {**self.trainer.scaling.row(), **self.ranks.row()}
        self._write({"kind": "train", "step": self.progress.step, **columns, **counts, **extra})
        self._write_probes()

    def validate(self) -> None:
        """Score the model on dev, and keep its weights if they are the best so far."""
        p = self.progress
        with self.trainer.ema.in_place():
            model = self.trainer.parallel.plain()
            scores = self.ranks.from_main(lambda: self._dev_scores(model))
            p.seconds = self._seconds()
            self._write({"kind": "dev", "step": p.step, **scores, "seconds": p.seconds})
            if self.trainer.validated(scores):
                self._save_scored(self.folder.best, model, scores)

    def checkpoint(self, state: str) -> None:
        """Save everything that is needed to go on from here."""
        self.ranks.on_main(self.kept.prune, self._saved, self.rows.validations())
        self._saved = self.progress.step
        self._write_probes()
        self.ranks.on_main(self.folder.sync_rows)
        self.progress.seconds = self._seconds()
        parts = {"rows": self.rows.state_dict(), "recorder": self.recorder.state_dict()}
        save = partial(save_checkpoint, run=self.folder.id(), previous=self.folder.previous)
        self.ranks.on_main(save, self.folder.last, self.trainer.state_dict() | parts)
        self.recorder.saved(self._saved)
        self.callbacks.tell(self._saved, saved=True)
        self._report(state)

    def _load(self, folder: Path) -> int:
        """Go on from a checkpoint; return its step."""
        checkpoint = open_checkpoint(folder, run=self.folder.id())
        state = checkpoint.state(self.trainer.shapes())
        with checkpoint.loading():
            self.trainer.load_state_dict(state)
            sizes = self.rows.load_state_dict(state.get("rows", {}))
            self.folder.require_rows(sizes, folder)
            self.recorder.load_state_dict(state.get("recorder", {}))
        return self.progress.step

    def _replay(self, stop: int, losses: Mapping[int, float]) -> Replay:
        """Do steps again in a fresh trainer."""
        if self.ranks.count > 1:
            sentence = f"steps of several ranks are not done again while training; {LATER}"
            return Replay(Verdict(sentence, "none"))
        replay, _ = replayed(
            self.trainer.task,
            self.folder,
            stop,
            most=self.config.machine.checkpoint_every_steps,
            losses=losses,
            history=self.rows.written,
        )
        return replay

    def _seconds(self) -> float:
        """Seconds of training so far, to the millisecond, without the pauses between resumptions."""
        return round(time.perf_counter() - self._clock, 3)

    def _examine(self) -> None:
        """Let the flight recorder look; a replay is no training time."""
        began = time.perf_counter()
        self.ranks.on_main(self.recorder.look, self.progress.step, self.outcome)
        self._clock += time.perf_counter() - began

    def _write(self, row: Row) -> None:
        self.rows.written.append(row)
        self.ranks.on_main(self.folder.append_metrics, row)
        self.callbacks.tell(self.progress.step, rows=[row], validated=row["kind"] == "dev")

    def _write_probes(self) -> None:
        self.probing.flush()
        if self._measured:
            self._measured.sort(key=lambda row: row["step"])  # whenever they are fetched, in one order
            self.ranks.on_main(self.folder.append_probes, self._measured)
            self.callbacks.tell(self.progress.step, probes=self._measured)
            self._measured.clear()

    def _over(self) -> bool:
        """Whether the last step is done."""
        return self.progress.step >= self.config.train.steps or bool(self.progress.stopped)

    def _hopeless(self) -> bool:
        """Whether the outcome ends the run before its last step."""
        failed = self.outcome is not None and self.outcome.state != "trained"
        return failed and self.config.train.stop_early

    def _ended(self) -> bool:
        return self._over() or self._hopeless()

    def _conclude(self) -> None:
        """Write the last rows before the checkpoint of their step: a run that goes on from there must not
        write them again.
        """
        if self.rows.pending:
            self.flush()
            self._examine()
        if self.progress.best_step is None or (self.progress.stopped and not self._validated()):
            self.validate()
        self.outcome = self._judge(final=self._over())

    def _consider_stopping(self) -> None:
        p = self.progress
        if not self._over():
            next_lr = self.trainer.learning_rate(1)
            p.stopped = why_stop(self.config, step=p.step, waited=p.waited, next_lr=next_lr)

    def _keep_weights(self, *, last: bool = False) -> None:
        step = self.progress.step
        if self.kept.wants(step, validated=self._validated(), last=last):
            with self.trainer.ema.in_place():
                self.ranks.on_main(self.kept.save, self.trainer.parallel.plain(), step)

    def _average(self, model: nn.Module) -> None:
        """Save the average of the weights with its dev scores; the model gets these weights."""
        if not has_checkpoint(self.folder.average):
            steps = self.kept.average(model, self.rows.validations())
            self._save_scored(self.folder.average, model, self._dev_scores(model), average={"steps": steps})
        self.kept.finish()

    def _dev_scores(self, model: nn.Module) -> dict[str, float]:
        with self._phases.during(self.trainer.task, "validating"):
            return self.trainer.dev_scores(model)

    def _save_scored(
        self, folder: Path, model: nn.Module, dev: Mapping[str, float], **parts: Mapping[str, Any]
    ) -> None:
        state = {**weights_state(model, self.progress.step), "dev": dict(dev), **parts}
        self.ranks.on_main(partial(save_checkpoint, run=self.folder.id()), folder, state)

    def _validated(self) -> bool:
        return self.progress.step in self.rows.validations()[-1:]

    def _judge(self, *, final: bool) -> Outcome | None:
        return outcome(
            self.rows.written,
            unigram_entropy_nats=self.trainer.task.corpus.unigram_entropy_nats,
            total_steps=self.progress.step if self.progress.stopped else self.config.train.steps,
            final=final,
        )

    def _report(self, state: str) -> None:
        p = self.progress
        status = Status(
            state=state,
            step=p.step,
            outcome=self.outcome,
            best_step=p.best_step,
            best_dev=dict(p.best_dev),
            train_seconds=p.seconds,
            hardware=hardware(self.trainer.device, self.ranks.count),
            stopped=p.stopped,
        )
        self.ranks.on_main(self.folder.set_status, status)

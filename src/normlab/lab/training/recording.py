"""Parts of a run that record its steps and judge them: rows, probes, the outcome, the flight recorder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normlab.base.io import from_plain
from normlab.base.metric import Outcome
from normlab.diagnosis.probes import Record
from normlab.lab.runs.folder import Row
from normlab.lab.training.outcome import outcome, why_stop
from normlab.lab.training.parts import RunContext, RunPart
from normlab.lab.training.probing import Probing
from normlab.lab.training.replay import LATER, replay
from normlab.watching.fault import Fault
from normlab.watching.meter import StepRecord
from normlab.watching.recorder import Recorder, Replayed
from normlab.watching.spikes import NATS

_Steps = tuple[tuple[float, tuple[float, float, float]], ...]
"""Of each step the learning rate, and its loss, NLL and gradient norm."""


class MetricRows(RunPart):
    """The rows of ``metrics.jsonl`` so far, and the steps that are in no row yet."""

    key = "rows"

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self.written: list[Row] = []
        self.pending: list[tuple[float, Tensor]] = []
        """Learning rate, and `[3]` loss, NLL and gradient norm, of every step since the last row."""
        self.sizes: dict[str, int] = {}
        """Sizes in bytes that the files of rows had when the loaded state was saved."""

    def on_step(self, record: StepRecord) -> None:
        self.pending.append((record.lr, record.values))

    def flush(self) -> None:
        """Fetch the pending steps from the device, and write a row for them.

        Loss and NLL are means over the steps; the gradient norm is the last step's, or the first that is not
        finite.
        """
        run, progress = self._run, self._run.progress
        values = torch.stack([values for _, values in self.pending]).tolist()
        losses, nlls, norms = zip(*values, strict=True)
        progress.seconds = run.clock.seconds()
        row = {
            "kind": "train",
            "step": progress.step,
            "loss": sum(losses) / len(losses),
            "nll": sum(nlls) / len(nlls),
            "grad_norm_l2": next((norm for norm in norms if not math.isfinite(norm)), norms[-1]),
            "lr": self.pending[-1][0],
            "tokens": progress.tokens,
            "padded_tokens": progress.padded_tokens,
            "seconds": progress.seconds,
            **run.trainer.scaling.row(),
        }
        if run.ranks.count > 1:
            row["ranks"] = run.ranks.count
        self.pending.clear()
        self.write(row)
        for part in run.parts:
            part.on_row(dict(row))

    def write(self, row: Row) -> None:
        """Append a row to the file."""
        self.written.append(row)
        self._run.ranks.on_main(self._run.folder.append_metrics, row)

    def validations(self) -> list[int]:
        return [row["step"] for row in self.written if row["kind"] == "dev"]

    @property
    def validated(self) -> bool:
        """Whether the current weights have been validated."""
        return self._run.progress.step in self.validations()[-1:]

    def state_dict(self) -> dict[str, Any]:
        pending = [(lr, values.tolist()) for lr, values in self.pending]
        return {"pending": pending, "sizes": self._run.folder.row_sizes()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pending: _Steps = from_plain(_Steps, state.get("pending", []), "rows.pending")
        self.sizes = from_plain(dict[str, int], state.get("sizes", {}), "rows.sizes")
        device = self._run.trainer.device
        self.pending = [(lr, torch.tensor(values, device=device)) for lr, values in pending]


class ProbeRows(RunPart):
    """The measurements of modules in ``probes.jsonl``."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._records: list[Record] = []
        machine = run.config.machine
        self._probing = Probing(
            run.trainer.model, machine.probes, machine.probe_every_steps, self._records.append
        )
        self.passing = self._probing.passing

    def on_step(self, record: StepRecord) -> None:
        self._probing.measure_step(record, self._run.trainer.meter, self._run.trainer.parallel)

    def on_row(self, row: Row) -> None:
        self._write()

    def before_checkpoint(self, *, interrupted: bool) -> None:
        self._write()

    def _write(self) -> None:
        self._probing.flush()
        if not self._records:
            return
        self._records.sort(key=lambda record: record.step)  # the same order whenever they are fetched
        rows = [record._asdict() for record in self._records]
        self._run.ranks.on_main(self._run.folder.append_probes, rows)
        for part in self._run.parts:
            part.on_probes([dict(row) for row in rows])
        self._records.clear()


class StoppingRule(RunPart):
    """The outcome so far, and whether it, a rule or the last step ends the run."""

    def __init__(self, run: RunContext, rows: MetricRows) -> None:
        self._run, self._rows = run, rows
        self.outcome: Outcome | None = None

    @property
    def over(self) -> bool:
        """Whether the last step is done, or a rule has stopped the run."""
        last_done = self._run.progress.step >= self._run.config.train.steps
        return last_done or bool(self._run.progress.stopped)

    @property
    def reached(self) -> bool:
        """Whether the run makes no more steps: it is over, or it failed and stops early."""
        failed = self.outcome is not None and self.outcome.state != "trained"
        return self.over or (failed and self._run.config.train.stop_early)

    def judge(self) -> None:
        """Judge the run by its rows so far."""
        progress, task = self._run.progress, self._run.trainer.task
        self.outcome = outcome(
            self._rows.written,
            unigram_entropy_nats=task.corpus.unigram_entropy_nats,
            total_steps=progress.step if progress.stopped else self._run.config.train.steps,
            best_step=progress.best_step,
            has_source=task.has_source,
            final=self.over,
        )

    def on_row(self, row: Row) -> None:
        self.judge()

    on_validation = on_row

    def consider(self) -> bool:
        """Let the rules stop the run here; return whether it is ``reached``."""
        config, progress = self._run.config, self._run.progress
        if not self.over:
            lr = progress.learning_rate(config, ahead=1)
            progress.stopped = why_stop(config, step=progress.step, waited=progress.waited, next_lr=lr)
        return self.reached


class FlightRecorder(RunPart):
    """The recorder of the last steps. Time spent on its replays does not count as training time."""

    key = "recorder"

    def __init__(self, run: RunContext, rows: MetricRows, stopping: StoppingRule) -> None:
        self._run, self._rows, self._stopping = run, rows, stopping
        self._recorder = Recorder(run.folder, limits=NATS, replay=self._replay)
        self.report = self._recorder.report

    def on_step(self, record: StepRecord) -> None:
        self._recorder.add(record)

    def on_row(self, row: Row) -> None:
        self._recorder.fetch()
        with self._run.clock.stopped():
            step, outcome = self._run.progress.step, self._stopping.outcome
            self._run.ranks.on_main(self._recorder.check_steps, step, outcome)

    def before_checkpoint(self, *, interrupted: bool) -> None:
        if interrupted:  # whoever interrupts waits for the checkpoint, not for a replay
            return
        with self._run.clock.stopped():
            self._run.ranks.on_main(self._recorder.report_spike, self._run.progress.step)

    def on_checkpoint(self, step: int) -> None:
        self._recorder.saved(step)

    def state_dict(self) -> Mapping[str, Any]:
        return self._recorder.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recorder.load_state_dict(state, self._run.trainer.meter.names, self._run.trainer.device)

    def _replay(self, stop: int, losses: Mapping[int, float]) -> Replayed:
        run = self._run
        if run.ranks.count > 1:
            return Replayed(
                Fault(f"steps of several ranks are not done again while training; {LATER}", "none")
            )
        return replay(
            run.trainer.task,
            run.folder,
            stop,
            most=run.config.machine.checkpoint_every_steps,
            losses=losses,
            history=self._rows.written,
        )

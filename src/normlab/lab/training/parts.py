"""The parts of a run: what it does with its trainer's steps, and with the weights after them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor, nn

from normlab.base.io import from_plain
from normlab.base.metric import Outcome
from normlab.diagnosis.probes import Record
from normlab.lab.runs.manifest import recover
from normlab.lab.training.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint, weights_state
from normlab.lab.training.outcome import Row, outcome, why_stop
from normlab.lab.training.progress import Phases
from normlab.lab.training.replay import LATER, Probing, replay
from normlab.lab.training.weights import kept_steps
from normlab.watching.fault import Fault
from normlab.watching.flight import Replayed
from normlab.watching.meter import StepRecord
from normlab.watching.recorder import Recorder
from normlab.watching.spikes import NATS

if TYPE_CHECKING:
    from normlab.lab.training.train import Run


_Steps = tuple[tuple[float, tuple[float, float, float]], ...]


class RunPart:
    """Something that a run does besides its steps, or an observer that a caller gives. An error that it
    raises ends the run.

    Observers live only in the main process and cannot change the run's numbers: they get copies of the rows,
    and ``run.trainer.snapshot()`` returns a copy of the model.
    """

    key: ClassVar[str] = ""
    """The name of its state in a checkpoint, if it has any."""

    def on_start(self, run: Run) -> None:
        """The run begins, or continues, at ``run.progress.step``."""

    def on_step(self, record: StepRecord) -> None:
        """A step is done."""

    def on_row(self, row: Row) -> None:
        """A row about the steps since the last row was written."""

    def on_probes(self, rows: list[Row]) -> None:
        """Measurements of modules were written."""

    def on_validation(self, row: Row) -> None:
        """The weights were scored on dev."""

    def before_checkpoint(self, *, interrupted: bool) -> None:
        """A checkpoint is about to be saved."""

    def on_checkpoint(self, step: int) -> None:
        """A checkpoint was saved: the run will not go back before this step."""

    def on_end(self) -> None:
        """The run is done, and scored on its test text."""

    def close(self) -> None:
        """Release what is open; called once, however the run ends."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what the part needs to continue."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``, or from nothing. Raises UserError for anything else."""


@final
class OnRow(RunPart):
    """Calls a function with every row of metrics."""

    def __init__(self, function: Callable[[Row], None]) -> None:
        self._function = function

    def on_row(self, row: Row) -> None:
        self._function(row)

    on_validation = on_row


class MetricRows(RunPart):
    """The rows of ``metrics.jsonl`` so far, and the steps that are in no row yet."""

    key = "rows"

    def __init__(self, run: Run) -> None:
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
        run, p = self._run, self._run.progress
        values = torch.stack([v for _, v in self.pending]).tolist()
        norms = [v[2] for v in values]
        p.seconds = run.clock.seconds()
        row = {
            "kind": "train",
            "step": p.step,
            "loss": sum(v[0] for v in values) / len(values),
            "nll": sum(v[1] for v in values) / len(values),
            "grad_norm_l2": next((n for n in norms if not math.isfinite(n)), norms[-1]),
            "lr": self.pending[-1][0],
            **{name: getattr(p, name) for name in ("tokens", "padded_tokens", "seconds")},
            **run.trainer.scaling.row(),
            **({"ranks": run.ranks.count} if run.ranks.count > 1 else {}),
        }
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

    def __init__(self, run: Run) -> None:
        self._run, machine, model = run, run.config.machine, run.trainer.model
        self._records: list[Record] = []
        self._probing = Probing(model, machine.probes, machine.probe_every_steps, self._records.append)
        self.passing = self._probing.passing

    def on_step(self, record: StepRecord) -> None:
        self._probing.measure_step(record, self._run.trainer.meter, self._run.trainer.parallel)

    def on_row(self, row: Row) -> None:
        self._write()

    def before_checkpoint(self, *, interrupted: bool) -> None:
        self._write()

    def _write(self) -> None:
        self._probing.flush()
        if self._records:
            self._records.sort(key=lambda record: record.step)  # the same order whenever they are fetched
            rows = [record._asdict() for record in self._records]
            self._run.ranks.on_main(self._run.folder.append_probes, rows)
            for part in self._run.parts:
                part.on_probes([dict(row) for row in rows])
            self._records.clear()


class StoppingRule(RunPart):
    """The outcome so far, and whether it, a rule or the last step ends the run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.outcome: Outcome | None = None

    @property
    def over(self) -> bool:
        """Whether the last step is done, or a rule has stopped the run."""
        return self._run.progress.step >= self._run.config.train.steps or bool(self._run.progress.stopped)

    @property
    def reached(self) -> bool:
        """Whether the run makes no more steps: it is over, or it failed and stops early."""
        failed = self.outcome is not None and self.outcome.state != "trained"
        return self.over or (failed and self._run.config.train.stop_early)

    def judge(self) -> None:
        p, task = self._run.progress, self._run.trainer.task
        self.outcome = outcome(
            self._run.rows.written,
            unigram_entropy_nats=task.corpus.unigram_entropy_nats,
            total_steps=p.step if p.stopped else self._run.config.train.steps,
            best_step=p.best_step,
            has_source=task.has_source,
            final=self.over,
        )

    def on_row(self, row: Row) -> None:
        self.judge()

    on_validation = on_row

    def consider(self) -> bool:
        """Let the rules stop the run here; return whether it is ``reached``."""
        p = self._run.progress
        if not self.over:
            lr = p.learning_rate(self._run.config, ahead=1)
            p.stopped = why_stop(self._run.config, step=p.step, waited=p.waited, next_lr=lr)
        return self.reached


class FlightRecorder(RunPart):
    """The recorder of the last steps. Time spent on its replays does not count as training time."""

    key = "recorder"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._recorder = Recorder(run.folder, limits=NATS, replay=self._replay)
        self.report = self._recorder.report

    def on_step(self, record: StepRecord) -> None:
        self._recorder.add(record)

    def on_row(self, row: Row) -> None:
        self._recorder.fetch()
        with self._run.clock.stopped():
            outcome = self._run.stopping.outcome
            self._run.ranks.on_main(self._recorder.check_steps, self._run.progress.step, outcome)

    def before_checkpoint(self, *, interrupted: bool) -> None:
        if not interrupted:
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
        most, history = run.config.machine.checkpoint_every_steps, run.rows.written
        return replay(run.trainer.task, run.folder, stop, most=most, losses=losses, history=history)


class Validation(RunPart):
    """The scores of the weights on dev, and the weights that score best."""

    def __init__(self, run: Run) -> None:
        self._run, self._phases = run, Phases(run.folder)

    def run(self) -> None:
        """Write a row of dev scores, and save the weights if they are the best so far."""
        run, p = self._run, self._run.progress
        with run.trainer.ema.in_place():
            model = run.trainer.parallel.plain()
            scores = run.ranks.from_main(lambda: self._scores(model))
            p.seconds = run.clock.seconds()
            row = {"kind": "dev", "step": p.step, **scores, "seconds": p.seconds}
            run.rows.write(row)
            if run.trainer.note_scores(scores):
                self._save(run.folder.best, model, scores)
            for part in run.parts:
                part.on_validation(dict(row))

    def average(self) -> None:
        """Save the average of the last weights with its dev scores, and delete what only it needed."""
        model = self._run.trainer.parallel.plain()
        self._run.ranks.from_main(lambda: self._average(model))

    def _average(self, model: nn.Module) -> None:
        average, weights = self._run.folder.average, self._run.weights
        recover(average)
        if not has_checkpoint(average):
            steps = weights.average(model)
            self._save(average, model, self._scores(model), average={"steps": steps})
        weights.finish()

    def _scores(self, model: nn.Module) -> dict[str, float]:
        with self._phases.during(self._run.trainer.task, "validating"):
            return self._run.trainer.dev_scores(model)

    def _save(
        self, folder: Path, model: nn.Module, dev: Mapping[str, float], **parts: Mapping[str, Any]
    ) -> None:
        state = {**weights_state(model, self._run.progress.step), "dev": dict(dev), **parts}
        self._run.ranks.on_main(partial(save_checkpoint, run=self._run.folder.id()), folder, state)


class KeptWeights(RunPart):
    """``runs/<id>/steps/<n>/``: the weights after step n, as a validation there scores them.

    Those of ``machine.keep_checkpoints`` stay; those that only the average needs are deleted when it no
    longer needs them. Weights that already exist are not written again.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._folder = run, run.folder
        self._policy, self._average_last = run.config.machine.keep_checkpoints, run.config.train.average_last

    def keep(self, *, last: bool = False) -> None:
        """Save the weights if they are wanted; ``last`` at the end of the run."""
        step, every = self._run.progress.step, self._policy == "all" or bool(self._average_last)
        if not (
            self._stays(step) or (self._run.rows.validated and every) or (last and self._policy == "log")
        ):
            return
        with self._run.trainer.ema.in_place():
            self._run.ranks.on_main(self._save, self._run.trainer.parallel.plain(), step)

    def before_checkpoint(self, *, interrupted: bool) -> None:
        """Delete weights that a run resumed from the previous or a later checkpoint cannot need again."""
        self._run.ranks.on_main(self._prune)

    def average(self, model: nn.Module) -> list[int]:
        r"""Give the model :math:`\bar\theta = \frac{1}{k} \sum_{i=1}^{k} \theta_{n_i}`, the mean of the
        weights at its last k validations, and return the steps of these.

        k is ``train.average_last``, or as many as there were. Vaswani et al. 2017, Section 6.1 (arXiv
        1706.03762), who take the last 5 or 20 checkpoints.
        """
        steps = list(dict.fromkeys(self._run.rows.validations()))[-self._average_last :]
        weights = [p.detach() for p in model.parameters()]
        total = [torch.zeros_like(w) for w in weights]
        for step in steps:
            load_checkpoint(self._folder.steps / str(step), model, run=self._folder.id())
            torch._foreach_add_(total, weights)
        torch._foreach_div_(total, float(len(steps)))
        torch._foreach_copy_(weights, total)
        return steps

    def finish(self) -> None:
        steps = kept_steps(self._folder)
        self._delete(steps[:-1] if self._policy == "log" else steps)

    def _save(self, model: nn.Module, step: int) -> None:
        path = self._folder.steps / str(step)
        recover(path)
        if not path.exists():
            save_checkpoint(path, weights_state(model, step), run=self._folder.id())

    def _prune(self) -> None:
        if self._average_last:
            saved = self._run.saved
            needed = [step for step in self._run.rows.validations() if step <= saved][-self._average_last :]
            self._delete(s for s in kept_steps(self._folder) if s <= saved and s not in needed)

    def _stays(self, step: int) -> bool:
        return str(step) in self._policy.split(",") or (self._policy == "log" and step & (step - 1) == 0)

    def _delete(self, steps: Iterable[int]) -> None:
        for step in list(steps):
            if self._policy != "all" and not self._stays(step):
                recover(self._folder.steps / str(step))
                shutil.rmtree(self._folder.steps / str(step))

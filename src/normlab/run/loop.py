"""The loop: one run in progress, step by step."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normlab.optim import Course, ValDecay, build_optimiser, schedule_factor
from normlab.run.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from normlab.run.devices import autocast, hardware
from normlab.run.flight import Recorder
from normlab.run.meter import Meter
from normlab.run.outcome import outcome
from normlab.run.probing import NOTHING, PRESETS, Probing, rows_into
from normlab.spec.outcome import Outcome
from normlab.spec.randomness import derive
from normlab.spec.serialise import from_plain
from normlab.store.folder import RunFolder, Status
from normlab.tasks.task import Task

Row = dict[str, Any]
AnyTask = Task[Any, Any, Any]


@dataclass
class Position:
    """How far a run is: what a checkpoint keeps beside the weights."""

    step: int = 0
    tokens: int = 0
    positions: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_dev_bleu: float | None = None
    best_dev_nll: float | None = None
    val_decay: ValDecay = ValDecay()


def _position(state: dict[str, Any], checkpoint: Path) -> Position:
    """What a checkpoint's state says. Raises ValueError where somebody else wrote it."""
    try:
        if "step" not in state:
            raise ValueError("step is missing")
        position: Position = from_plain(Position, state)
    except ValueError as error:
        raise ValueError(
            f"{checkpoint / 'state.json'}: {error}; move the run's folder away to train it anew"
        ) from error
    return position


class Loop:
    """One run in progress. Every random draw is derived from (seed, purpose, step, micro-batch)."""

    def __init__(self, task: AnyTask, folder: RunFolder, on_row: Callable[[Row], None]) -> None:
        self.task, self.folder, self.on_row = task, folder, on_row
        self.config, self.device = task.config, task.device
        self.model = task.build()
        self.optimiser = build_optimiser(self.model.parameters(), self.config.optim)
        self.progress = Position()
        self.pending: list[tuple[float, Tensor]] = []
        """Learning rate, and `[3]` loss, likelihood and gradient norm, of every step since the last row."""
        if has_checkpoint(folder.last):
            state = load_checkpoint(folder.last, self.model, self.optimiser)
            self.pending = [(lr, torch.tensor(v, device=self.device)) for lr, v in state.pop("pending", [])]
            self.progress = _position(state, folder.last)
        folder.cut_rows(self.progress.step)
        self.rows: list[Row] = folder.metrics()
        self.outcome = self._judge(final=self.progress.step == self.config.train.steps)
        self.rates: dict[int, float] = {}
        """Learning rates of the steps since the checkpoint: a step that is done again takes its own."""
        self.meter, self.recorder, self._probed = Meter(self.model), Recorder(self), list[Row]()
        preset = PRESETS.get(self.config.machine.probes, NOTHING)
        emit = rows_into(self._probed)
        self.probing = Probing(self.model, preset, self.config.machine.probe_every_steps, emit)
        self._clock = time.perf_counter() - self.progress.seconds
        self._report("running")

    def run(self, interrupted: threading.Event) -> None:
        """Train to the last step, or to the step at which the outcome is clear."""
        train, machine = self.config.train, self.config.machine
        while self.progress.step < train.steps and not self._hopeless():
            self.step()
            step = self.progress.step
            last = step == train.steps
            if last or step % machine.log_every_steps == 0 or step == 1:
                self.flush()
                self.outcome = self._judge(final=last)
                self._examine()
            if last or step % train.validate_every_steps == 0:
                self.validate()
            if interrupted.is_set():
                self.checkpoint("interrupted")
                raise KeyboardInterrupt
            if not last and step % machine.checkpoint_every_steps == 0:
                self.checkpoint("running")
        if self.progress.best_step is None:
            self.validate()
        self.outcome = self.outcome or self._judge(final=True)
        self.checkpoint("running")

    def step(self) -> None:
        """One optimiser step over the micro-batches of the global batch; nothing waits for the device."""
        config, p = self.config, self.progress
        p.step += 1
        first = (p.step - 1) * config.train.accumulation
        batches = [self.task.batch(first + i) for i in range(config.train.accumulation)]
        tokens = sum(b.tokens for b in batches)
        self.model.train()
        loss = nll = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            torch.manual_seed(derive(config.seeds.dropout, "dropout", p.step, i))
            with self.probing.passing(p.step, i):
                with autocast(self.device, config.train.precision):
                    sums = self.task.loss(self.model, batch)
                (sums.loss / tokens).backward()
            loss, nll = loss + sums.loss.detach(), nll + sums.nll
        gradients = self.meter.gradients()
        norm = self._clip(gradients)
        lr = self.rates[p.step] = self.rates.get(p.step, self._learning_rate())
        for group in self.optimiser.param_groups:
            group["lr"].fill_(lr)
        self.meter.before()
        self.optimiser.step()
        updates = self.meter.after()
        self.probing.stepped(p.step, self.meter, gradients, updates)
        self.optimiser.zero_grad(set_to_none=True)
        p.tokens += tokens
        p.positions += sum(b.positions for b in batches)
        self.pending.append((lr, torch.stack([loss / tokens, nll / tokens, norm])))
        self.recorder.keep(p.step, self.pending[-1], gradients, updates)

    def flush(self) -> None:
        """Fetch what the steps since the last flush left on the device, and write one row for them.

        Loss and likelihood are means over those steps; the gradient norm is the last step's, or the first one
        that is not finite.
        """
        values = torch.stack([v for _, v in self.pending]).tolist()
        self.recorder.see(self.progress.step, values)
        norms = [v[2] for v in values]
        self.progress.seconds = self._seconds()
        self._emit(
            {
                "kind": "train",
                "step": self.progress.step,
                "loss": sum(v[0] for v in values) / len(values),
                "nll": sum(v[1] for v in values) / len(values),
                "grad_norm_l2": next((n for n in norms if not math.isfinite(n)), norms[-1]),
                "lr": self.pending[-1][0],
                "tokens": self.progress.tokens,
                "positions": self.progress.positions,
                "seconds": self.progress.seconds,
            }
        )
        self.pending.clear()
        self._keep_probes()

    def validate(self) -> None:
        """The task's dev scores; a new best is kept as a checkpoint of weights."""
        self.model.eval()
        with autocast(self.device, self.config.train.precision):
            scores = self.task.dev_scores(self.model)
        p = self.progress
        p.seconds = self._seconds()
        self._emit({"kind": "dev", "step": p.step, **scores, "seconds": p.seconds})
        if self.improved(scores):
            save_checkpoint(self.folder.best, self.model, None, {"step": p.step, **scores})

    def improved(self, scores: Mapping[str, float]) -> bool:
        """Take note of dev scores; whether they are the best so far."""
        p, best = self.progress, self._is_best(scores)
        p.val_decay = p.val_decay.after(p.step, self.config.optim, improved=best)
        if best:
            p.best_step, p.best_dev_bleu, p.best_dev_nll = p.step, scores.get("bleu"), scores["nll"]
        return best

    def checkpoint(self, state: str) -> None:
        """Everything that is needed to go on from here."""
        self._keep_probes()
        self.progress.seconds = self._seconds()
        pending = [(lr, values.tolist()) for lr, values in self.pending]
        kept = asdict(self.progress) | {"pending": pending}
        save_checkpoint(self.folder.last, self.model, self.optimiser, kept)
        self.rates.clear()
        self._report(state)

    def _seconds(self) -> float:
        """Of training so far, to the millisecond; pauses between resumptions are left out."""
        return round(time.perf_counter() - self._clock, 3)

    def _clip(self, gradients: Tensor) -> Tensor:
        """The global gradient norm; gradients are scaled down to the configured one if it is larger."""
        norm = torch.linalg.vector_norm(gradients)
        largest = self.config.optim.clip_norm_l2
        if largest:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), largest, norm)
        return norm

    def _examine(self) -> None:
        """Let the flight recorder look; what it does again is no training time."""
        began = time.perf_counter()
        self.recorder.look()
        self._clock += time.perf_counter() - began

    def _keep_probes(self) -> None:
        self.probing.flush()
        if self._probed:
            self.folder.append_probes(self._probed)
            self._probed.clear()

    def _hopeless(self) -> bool:
        """Whether the outcome ends the run before its last step."""
        stop = self.outcome is not None and self.outcome.state != "trained"
        return stop and self.config.train.stop_early

    def _learning_rate(self) -> float:
        optim, p = self.config.optim, self.progress
        course = Course(optim, self.config.train.steps, p.val_decay.decays)
        return optim.lr * schedule_factor(p.step, course)

    def _is_best(self, scores: Mapping[str, float]) -> bool:
        """By the score that decides, the likelihood loss where it is equal."""
        p, nll = self.progress, scores["nll"]
        if p.best_step is None or p.best_dev_nll is None:
            return True
        if self.config.train.best_by == "nll" or p.best_dev_bleu is None:
            return nll < p.best_dev_nll
        return (scores["bleu"], -nll) > (p.best_dev_bleu, -p.best_dev_nll)

    def _judge(self, *, final: bool) -> Outcome | None:
        return outcome(
            self.rows,
            unigram_entropy_nats=self.task.corpus.unigram_entropy_nats,
            total_steps=self.config.train.steps,
            final=final,
        )

    def _emit(self, row: Row) -> None:
        self.rows.append(row)
        self.folder.append_metrics(row)
        self.on_row(row)

    def _report(self, state: str) -> None:
        p = self.progress
        self.folder.set_status(
            Status(
                state=state,
                step=p.step,
                outcome=self.outcome,
                best_step=p.best_step,
                best_dev_bleu=p.best_dev_bleu,
                best_dev_nll=p.best_dev_nll,
                train_seconds=p.seconds,
                hardware=hardware(self.device),
            )
        )

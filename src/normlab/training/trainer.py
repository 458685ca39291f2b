"""The loop: one run in progress, step by step."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normlab.data.prefetch import Prefetch
from normlab.optim import ScheduleState, build_optimiser, schedule_factor
from normlab.spec.metric import NLL
from normlab.spec.outcome import Outcome
from normlab.spec.randomness import derive
from normlab.store.folder import RunFolder, Status
from normlab.store.sealed import standing, unsealed
from normlab.tasks.task import Task
from normlab.training.callbacks.base import Callback
from normlab.training.callbacks.flight import Recorder, require_memory
from normlab.training.callbacks.probing import Probing, preset_of, rows_into
from normlab.training.checkpoint import has_checkpoint, load_checkpoint, load_extra, resume, save_checkpoint
from normlab.training.devices import autocast, hardware
from normlab.training.meter import Meter
from normlab.training.notice import notice
from normlab.training.outcome import outcome
from normlab.training.progress import Position, saved_of
from normlab.training.ranks import SINGLE_PROCESS, Ranks
from normlab.training.scaling import Scaling
from normlab.training.stopping import why_stop
from normlab.training.warm_start import fill
from normlab.training.warm_start import write as write_taken
from normlab.training.weights import Ema, Kept

Row = dict[str, Any]
AnyTask = Task[Any, Any, Any]


class Loop:
    """One run in progress. Every random draw is derived from (seed, purpose, step, micro-batch)."""

    def __init__(
        self, task: AnyTask, folder: RunFolder, on_row: Callable[[Row], None], ranks: Ranks = SINGLE_PROCESS
    ) -> None:
        self.task, self.folder, self.on_row, self.ranks = task, folder, on_row, ranks
        self.config, self.device = task.config, task.device
        self.model = task.build()
        self.optimiser = build_optimiser(self.model.parameters(), self.config.optim)
        self.progress = Position()
        self.pending: list[tuple[float, Tensor]] = []
        """Learning rate, and `[3]` loss, likelihood and gradient norm, of every step since the last row."""
        self._scaled: dict[str, Any] = {}
        self._remembered: dict[str, Tensor] = {}
        with ranks.main_first():
            if refused := resume(folder.last, folder.previous, self._restore):
                notice(folder, refused)
            if self.progress.best_step is not None:  # or the run would find out when it is over
                unsealed(standing(folder.best), run=folder.id())
            ranks.on_main(folder.cut_rows, self.progress.step)
        self.rows: list[Row] = folder.metrics()
        if not self.progress.step:
            self.begin(self.model)
        machine, self._probed = self.config.machine, list[Row]()
        preset, emit = preset_of(machine.probes, self.model), rows_into(self._probed)
        self.probing = Probing(self.model, preset, machine.probe_every_steps, emit)
        self.parallel = ranks.parallel(self.model, self.optimiser, shard=machine.shard)
        self.scaling = self.unscaled()
        self.scaling.load(self._scaled)
        self.batches = Prefetch(
            lambda index: self.task.batch(index),
            workers=machine.num_workers,
            stop=self.config.train.steps * self.config.train.grad_accum_steps,
            stride=ranks.count,
        )
        self.ema = Ema(self.optimiser, self.config.train.ema_decay)
        self.kept = Kept(folder, self.config)
        self._saved = self.progress.step
        self.callbacks: list[Callback] = []
        self.outcome = self._judge(final=self._over())
        self.rates: dict[int, float] = {}
        """Learning rates of the steps since the checkpoint: a step that is done again takes its own."""
        self.meter, self.recorder = Meter(self.parallel), Recorder(self)
        self.recorder.restore(self._remembered)
        self._clock = time.perf_counter() - self.progress.seconds
        self._report("running")

    def run(self, interrupted: threading.Event) -> None:
        """Train to the last step, or to the step at which the outcome is clear."""
        train, machine = self.config.train, self.config.machine
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
            model = self.plain()
            self.ranks.from_main(lambda: self._average(model))

    def step(self) -> None:
        """One optimiser step over the micro-batches of the global batch; nothing waits for the device."""
        config, p = self.config, self.progress
        p.step += 1
        first = (p.step - 1) * config.train.grad_accum_steps
        mine = self.ranks.share(config.train.grad_accum_steps)
        batches = [self.batches.at(first + i) for i in mine]
        tokens, positions = self.ranks.total(
            sum(b.tokens for b in batches), sum(b.positions for b in batches)
        )
        self.parallel.model.train()
        loss = nll = torch.zeros((), device=self.device)
        for i, batch in zip(mine, batches, strict=True):
            torch.manual_seed(derive(config.seeds.dropout, "dropout", p.step, i))
            with self.probing.passing(p.step, i), self.parallel.passing(last=i == mine[-1]):
                with autocast(self.device, config.train.precision):
                    sums = self.task.loss(self.parallel.model, batch)
                self.scaling.scaled(sums.loss / tokens).backward()
            loss, nll = loss + sums.loss.detach(), nll + sums.nll
        loss, nll = self.ranks.sum(torch.stack([loss, nll]))
        self.scaling.unscale(self.optimiser)
        gradients = self.meter.gradients()
        norm = self._clip(gradients)
        lr = self.rates[p.step] = self.rates.get(p.step, self._learning_rate())
        for group in self.optimiser.param_groups:
            group["lr"].fill_(lr)
        self.meter.before()
        norm = self.scaling.step(self.optimiser, norm)
        updates = self.meter.after()
        self.probing.stepped(p.step, self.meter, gradients, updates)
        self.optimiser.zero_grad(set_to_none=True)
        p.tokens += tokens
        p.positions += positions
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
                **self.scaling.row(),
                **self.ranks.row(),
            }
        )
        self.pending.clear()
        self._keep_probes()

    def validate(self) -> None:
        """The task's dev scores; a new best is kept as a checkpoint of weights."""
        p = self.progress
        with self.ema.in_place():
            model = self.plain()
            scores = self.ranks.from_main(lambda: self._dev_scores(model))
            p.seconds = self._seconds()
            self._emit({"kind": "dev", "step": p.step, **scores, "seconds": p.seconds})
            if self.improved(scores):
                self._save_scored(self.folder.best, model, {"step": p.step, "dev": scores})

    def improved(self, scores: Mapping[str, float]) -> bool:
        """Take note of dev scores; whether they are the best so far."""
        p, best = self.progress, self._is_best(scores)
        p.val_decay = p.val_decay.after(p.step, self.config.optim, improved=best)
        p.waited = 0 if best else p.waited + 1
        if best:
            p.best_step, p.best_dev = p.step, dict(scores)
        return best

    def begin(self, model: nn.Module) -> None:
        """Give a model at its start the weights that the run starts from, if there are any."""
        if self.config.train.init_digest:
            self.ranks.on_main(write_taken, self.folder, fill(model, self.config, self.task.corpus))

    def plain(self) -> nn.Module:
        """The model with its weights now, as one process has it."""
        return self.parallel.plain()[0]

    def unscaled(self) -> Scaling:
        """The scaling of losses at its start."""
        enabled = self.config.train.precision == "fp16"
        return Scaling(self.parallel.scaler(self.device, enabled=enabled), self.device)

    def checkpoint(self, state: str) -> None:
        """Everything that is needed to go on from here."""
        self.ranks.on_main(self.kept.prune, self._saved, self._validations())
        self._saved = self.progress.step
        self._keep_probes()
        self.ranks.on_main(self.folder.sync_rows)
        self.progress.seconds = self._seconds()
        pending = [(lr, values.tolist()) for lr, values in self.pending]
        scaling = self.scaling.state()
        kept = asdict(self.progress) | {"pending": pending, "rows": self.folder.row_sizes()}
        kept |= {"scaling": scaling} if scaling else {}
        folder, whole = self.folder, self.parallel.plain(self.optimiser)
        extra = self.recorder.tensors()
        save = partial(save_checkpoint, run=folder.id(), extra=extra, previous=folder.previous)
        self.ranks.on_main(save, folder.last, *whole, kept)
        self.rates.clear()
        for callback in self.callbacks:
            callback.saved()
        self._report(state)

    def _restore(self, checkpoint: Path) -> int:
        """Go back to where a checkpoint was made; its step."""
        state = load_checkpoint(checkpoint, self.model, self.optimiser, run=self.folder.id())
        saved = saved_of(state, checkpoint)
        self.folder.require_rows(saved.rows, checkpoint)
        self.pending = [(lr, torch.tensor(v, device=self.device)) for lr, v in saved.pending]
        self.progress, self._scaled = saved.position, saved.scaling
        self._remembered = load_extra(checkpoint)
        require_memory(self._remembered, len(list(self.model.parameters())), checkpoint)
        return self.progress.step

    def _seconds(self) -> float:
        """Of training so far, to the millisecond; pauses between resumptions are left out."""
        return round(time.perf_counter() - self._clock, 3)

    def _clip(self, gradients: Tensor) -> Tensor:
        """The global gradient norm; gradients are scaled down to the configured one if it is larger."""
        norm = torch.linalg.vector_norm(gradients)
        largest = self.config.optim.max_grad_norm
        if largest:
            nn.utils.clip_grads_with_norm_(self.parallel.parts.values(), largest, norm)
        return norm

    def _examine(self) -> None:
        """Let the flight recorder look; what it does again is no training time."""
        began = time.perf_counter()
        self.recorder.look()
        self._clock += time.perf_counter() - began

    def _keep_probes(self) -> None:
        self.probing.flush()
        if self._probed:
            self._probed.sort(key=lambda row: row["step"])  # whenever they are fetched, in one order
            self.ranks.on_main(self.folder.append_probes, self._probed)
            for callback in self.callbacks:
                callback.probes(self._probed)
            self._probed.clear()

    def _over(self) -> bool:
        """Whether the last step is done."""
        return self.progress.step >= self.config.train.steps or bool(self.progress.stopped)

    def _ended(self) -> bool:
        return self._over() or self._hopeless()

    def _conclude(self) -> None:
        """The last rows. They are written before the checkpoint of their step: a run that goes on from there
        must not write them again.
        """
        if self.pending:
            self.flush()
            self._examine()
        if self.progress.best_step is None or (self.progress.stopped and not self._validated()):
            self.validate()
        self.outcome = self._judge(final=self._over())

    def _consider_stopping(self) -> None:
        p = self.progress
        if not self._over():
            p.stopped = why_stop(self.config, step=p.step, waited=p.waited, next_lr=self._learning_rate(1))

    def _keep_weights(self, *, last: bool = False) -> None:
        step = self.progress.step
        if self.kept.wants(step, validated=self._validated(), last=last):
            with self.ema.in_place():
                self.ranks.on_main(self.kept.save, self.plain(), step)

    def _average(self, model: nn.Module) -> None:
        """Put the average of the weights in its folder, with its dev scores, in the model's place."""
        if not has_checkpoint(self.folder.average):
            steps = self.kept.average(model, self._validations())
            scores = {"step": self.progress.step, "steps": steps, "dev": self._dev_scores(model)}
            self._save_scored(self.folder.average, model, scores)
        self.kept.finish()

    def _dev_scores(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        with autocast(self.device, self.config.train.precision):
            return self.task.dev_scores(model)

    def _save_scored(self, folder: Path, model: nn.Module, state: dict[str, Any]) -> None:
        save = partial(save_checkpoint, run=self.folder.id())
        self.ranks.on_main(save, folder, model, None, state)

    def _validations(self) -> list[int]:
        """Steps at which there was a validation."""
        return [row["step"] for row in self.rows if row["kind"] == "dev"]

    def _validated(self) -> bool:
        dev = (row["step"] for row in reversed(self.rows) if row["kind"] == "dev")
        return next(dev, None) == self.progress.step

    def _hopeless(self) -> bool:
        """Whether the outcome ends the run before its last step."""
        stop = self.outcome is not None and self.outcome.state != "trained"
        return stop and self.config.train.stop_early

    def _learning_rate(self, ahead: int = 0) -> float:
        """Of this step, or of one so many steps ahead."""
        optim, p = self.config.optim, self.progress
        course = ScheduleState(optim, self.config.train.steps, p.val_decay.decays)
        return optim.lr * schedule_factor(p.step + ahead, course)

    def _is_best(self, scores: Mapping[str, float]) -> bool:
        """By the metric that decides; where it is equal, by the negative log-likelihood."""
        p = self.progress
        if p.best_step is None:
            return True
        decides = (self.task.decides(self.config), NLL)
        now, then = ([m.merit(of.get(m.name)) for m in decides] for of in (scores, p.best_dev))
        return now > then

    def _judge(self, *, final: bool) -> Outcome | None:
        return outcome(
            self.rows,
            unigram_entropy_nats=self.task.corpus.unigram_entropy_nats,
            total_steps=self.progress.step if self.progress.stopped else self.config.train.steps,
            final=final,
        )

    def _emit(self, row: Row) -> None:
        self.rows.append(row)
        self.ranks.on_main(self.folder.append_metrics, row)
        for callback in self.callbacks:
            callback.metrics(row)
        self.ranks.on_main(self.on_row, row)

    def _report(self, state: str) -> None:
        p = self.progress
        status = Status(
            state=state,
            step=p.step,
            outcome=self.outcome,
            best_step=p.best_step,
            best_dev=dict(p.best_dev),
            train_seconds=p.seconds,
            hardware=hardware(self.device, self.ranks.count),
            stopped=p.stopped,
        )
        self.ranks.on_main(self.folder.set_status, status)

"""The trainer: one configuration's model, optimizer and progress, and the step that moves them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normlab.base.metric import NLL, selection_metric
from normlab.base.model_config import derive
from normlab.base.units import count
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.data.prefetch import Prefetch
from normlab.lab.tasks import TASKS
from normlab.lab.tasks.task import LossSum, Task
from normlab.lab.training.checkpoint import State
from normlab.lab.training.devices import (
    Scaling,
    autocast,
    compiled,
    in_precision,
    prepare_process,
    wide_products,
)
from normlab.lab.training.progress import RunProgress
from normlab.lab.training.ranks import SINGLE_PROCESS, Ranks
from normlab.lab.training.weights import Ema, InitialWeights, load_initial_weights
from normlab.nn import after_step
from normlab.optim import build_optimizer, clipped_together, keeps_tensors, set_rate
from normlab.watching.meter import Meter, StepRecord

AnyTask = Task[Any, Any, Any]
Watch = Callable[[int, int], AbstractContextManager[None]]
"""Given a step and the number of a micro-batch, return the context of its forward and backward pass."""


def load_task(config: Config, root: Path, device: torch.device | None = None) -> AnyTask:
    """Prepare a configuration's text below ``root``; return its task on a device, by default the configured.

    Raises UserError for a task that cannot do what the configuration asks for, and for too long a sentence.
    """
    kind = TASKS[config.task]
    kind.check(config)
    device = device or prepare_process(config.machine)
    data, corpus = kind.prepare(config.data, root / "data")
    config = replace(config, data=data)
    kind.check_text(config, corpus)
    return kind(config, corpus, device)


class Trainer:
    """The training of one configuration, independent of any run folder.

    Every random draw is derived from (seed, purpose, step, micro-batch). Every rank calls every method, in
    the same order; no step waits for the device.
    """

    def __init__(self, task: AnyTask, ranks: Ranks = SINGLE_PROCESS) -> None:
        self.task, self.ranks = task, ranks
        self.config, self.device = task.config, task.device
        self.model = task.build()
        self.compiled = self._compiled() if self.config.machine.compile else None
        """The task's loss, compiled with everything that it calls; the model itself stays as it is."""
        self.optimizer = build_optimizer(self.model, self.config.optim)
        self.clipped = clipped_together(self.model, self.config.optim)
        self.parallel = ranks.parallel(self.model, self.optimizer, shard=self.config.machine.shard)
        enabled = self.config.train.precision == "fp16"
        self.scaling = Scaling(self.parallel.scaler(self.device, enabled=enabled), self.device)
        self.ema = Ema(self.optimizer, self.config.train.ema_decay)
        self.meter = Meter(self.parallel.parts, self.parallel.norms)
        self.progress = RunProgress()
        self.batches = Prefetch(
            lambda index: self.task.batch(index),
            workers=self.config.machine.num_workers,
            stop=self.config.train.steps * self.config.train.grad_accum_steps,
            stride=ranks.count,
        )

    def close(self) -> None:
        self.batches.close()

    def step(self, watch: Watch = lambda step, micro_batch: nullcontext()) -> StepRecord:
        """Do one optimizer step over the micro-batches of the global batch."""
        config, progress = self.config, self.progress
        progress.step += 1
        first = (progress.step - 1) * config.train.grad_accum_steps
        share = self.ranks.share(config.train.grad_accum_steps)
        batches = [self.batches.at(first + i) for i in share]
        tokens, padded_tokens = self.ranks.total(
            sum(batch.tokens for batch in batches), sum(batch.padded_tokens for batch in batches)
        )
        self.parallel.model.train()
        loss = nll = torch.zeros((), device=self.device)
        for i, batch in zip(share, batches, strict=True):
            torch.manual_seed(derive(config.seeds.dropout, "dropout", progress.step, i))
            passing = self.parallel.passing(last=i == share[-1])
            with watch(progress.step, i), passing, self._products():
                with autocast(self.device, config.train.precision):
                    sums = (self.compiled or self.task.loss)(self.parallel.model, batch)
                self.scaling.scale(sums.loss / tokens).backward()
            loss = loss + sums.loss.detach()
            nll = nll + sums.nll
        loss, nll = self.ranks.sum(torch.stack([loss, nll]))
        lr, norm, gradients, updates = self._update()
        progress.tokens += tokens
        progress.padded_tokens += padded_tokens
        return StepRecord(
            progress.step,
            lr,
            loss / tokens,
            self.meter.names,
            gradients,
            updates,
            nll=nll / tokens,
            norm=norm,
        )

    def note_scores(self, scores: Mapping[str, float]) -> bool:
        """Record dev scores; return whether they are the best so far."""
        progress, best = self.progress, self._is_best(scores)
        progress.val_decay = progress.val_decay.after(progress.step, self.config.optim, improved=best)
        progress.waited = 0 if best else progress.waited + 1
        if best:
            progress.best_step, progress.best_dev = progress.step, dict(scores)
        return best

    def dev_scores(self, model: nn.Module) -> dict[str, float]:
        """The task's scores of a model on dev, in the run's precision."""
        model.eval()
        with in_precision(self.device, self.config.train.precision):
            return self.task.dev_scores(model)

    def _products(self) -> AbstractContextManager[object]:
        """Return the context of a step's two passes: none for a compiled loss, which torch would run
        uncompiled in it.
        """
        if self.compiled:
            return nullcontext()
        return wide_products(self.device, self.config.train.precision)

    def snapshot(self) -> nn.Module:
        """Return a copy of the model as it is now.

        Raises RuntimeError if the weights are spread over the ranks.
        """
        if self.ranks.count > 1 and self.config.machine.shard:
            raise RuntimeError("the model is sharded, and no process has all of it; train without --shard")
        return copy.deepcopy(self.parallel.plain())

    def begin(self) -> InitialWeights | None:
        """Load the weights that ``train.init_from`` names, if any; return what was taken from them."""
        if not self.config.train.init_digest:
            return None
        return load_initial_weights(self.parallel, self.task)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of every part, as a single process would have it."""
        return {
            **self.parallel.state_dict(self.optimizer),
            "progress": self.progress.state_dict(),
            "scaling": self.scaling.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from ``state_dict()``. Raises UserError for a part whose state it did not write itself."""
        self.progress.load_state_dict(state.get("progress", {}))
        self.scaling.load_state_dict(state.get("scaling", {}))
        done = self.progress.step - self.scaling.row().get("skipped_steps", 0)
        if done > 0 and not state["optimizer"] and keeps_tensors(self.config.optim):
            raise UserError(f"the optimizer's tensors are missing after {count(int(done), 'step')}")
        self.parallel.load_state_dict(state, self.optimizer)

    def _compiled(self) -> Callable[[nn.Module, Any], LossSum]:
        if self.ranks.count > 1:
            raise UserError(f"--compile is for one process, and there are {self.ranks.count}; leave it out")
        return compiled(self.task.loss, self.device)

    def _update(self) -> tuple[float, Tensor, Tensor, Tensor]:
        """Let the optimizer step; return the learning rate, the gradient norm, and norms by parameter."""
        self.scaling.unscale(self.optimizer)
        gradients = self.meter.gradients()
        norm = self._clip(gradients)
        lr = self.progress.learning_rate(self.config)
        set_rate(self.optimizer, lr)
        self.meter.before()  # after clipping, right before the weights move
        norm = self.scaling.step(self.optimizer, norm)
        after_step(self.model)
        updates = self.meter.after()
        self.optimizer.zero_grad(set_to_none=True)
        return lr, norm, gradients, updates

    def _clip(self, gradients: Tensor) -> Tensor:
        """Clip the gradients that are clipped together; return the norm of all before that."""
        norm = torch.linalg.vector_norm(gradients)
        largest = self.config.optim.max_grad_norm
        if not largest:
            return norm
        parts = list(self.parallel.parts.values())
        for indices in self.clipped:
            all_together = len(indices) == len(parts)
            norm_of_these = norm if all_together else torch.linalg.vector_norm(gradients[indices])
            nn.utils.clip_grads_with_norm_([parts[i] for i in indices], largest, norm_of_these)
        return norm

    def _is_best(self, scores: Mapping[str, float]) -> bool:
        """Compare by the metric that decides; if it is equal, by the negative log-likelihood."""
        if self.progress.best_step is None:
            return True
        metrics = self.task.metrics_on(self.task.corpus)
        deciding = (selection_metric(metrics, self.config.train.best_by), NLL)

        def sort_key(scores: Mapping[str, float]) -> list[float]:
            return [metric.sort_key(scores.get(metric.name)) for metric in deciding]

        return sort_key(scores) > sort_key(self.progress.best_dev)

"""How long a run takes on this machine, measured on a few of its real steps."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from normlab.optim import build_optimiser
from normlab.spec.config import Config
from normlab.tasks.registry import TASKS
from normlab.tasks.task import Prepared
from normlab.training.devices import autocast, prepare_process


@dataclass(frozen=True)
class Seconds:
    """Seconds of one optimiser step, of one validation, and of a whole run."""

    step: float
    validation: float
    run: float


def measure(config: Config, corpus: Prepared, *, steps: int = 5) -> Seconds:
    """Median over ``steps`` steps after two that are not counted, on ``machine.threads`` threads.

    Validation and test are what the task's rehearsal says. A rough figure: other runs at the same time make
    it longer, and a model that has learnt to end its sentences searches faster.
    """
    device = prepare_process(config.machine)
    task = TASKS[config.task](config, corpus, device)
    model = task.build()
    optimiser = build_optimiser(model.parameters(), config.optim)
    taken = []
    for index in range(steps + 2):
        start = time.perf_counter()
        for i in range(config.train.grad_accum_steps):
            batch = task.batch(index * config.train.grad_accum_steps + i)
            with autocast(device, config.train.precision):
                sums = task.loss(model, batch)
            (sums.loss / batch.tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    step = statistics.median(taken[2:])
    model.eval()
    with autocast(device, config.train.precision):
        validation, test = task.rehearse(model)
    validations = -(-config.train.steps // config.train.validate_every_steps)
    return Seconds(step, validation, step * config.train.steps + validations * validation + test)

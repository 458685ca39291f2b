"""The time that a run takes on this machine, measured on a few of its real steps."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import dataclass

import torch

from normlab.config.config import Config
from normlab.tasks.registry import TASKS
from normlab.tasks.task import Prepared
from normlab.training.devices import autocast, prepare_process
from normlab.training.trainer import Trainer


@dataclass(frozen=True)
class Seconds:
    """Seconds of one optimiser step, of one validation, and of a whole run."""

    step: float
    validation: float
    run: float


def measure(config: Config, corpus: Prepared, *, steps: int = 5) -> Seconds:
    """Measure the median of ``steps`` steps after two warm-up steps, on ``machine.threads`` threads, and with
    the task's rehearsal a validation and the test.

    These are rough figures: other runs at the same time make them longer, and a model that has learnt to end
    its sentences searches faster.
    """
    device = prepare_process(config.machine)
    task = TASKS[config.task](config, corpus, device)
    with closing(Trainer(task)) as trainer:
        taken = [_seconds_of_step(trainer) for _ in range(steps + 2)]
    step = statistics.median(taken[2:])
    trainer.model.eval()
    with autocast(device, config.train.precision):
        validation, test = task.rehearse(trainer.model)
    validations = -(-config.train.steps // config.train.validate_every_steps)
    return Seconds(step, validation, step * config.train.steps + validations * validation + test)


def _seconds_of_step(trainer: Trainer) -> float:
    start = time.perf_counter()
    trainer.step()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return time.perf_counter() - start

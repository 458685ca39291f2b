"""How long a run will take: its own first steps, a validation and a test, timed in parallel processes, as in
a comparison.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from normlab.base.io import from_json, to_json
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.recipes.plugins import load_plugins
from normlab.lab.runs.folder import RunFolder
from normlab.lab.tasks import TASKS
from normlab.lab.tasks.task import Prepared
from normlab.lab.training.devices import autocast, prepare_process
from normlab.lab.training.jobs import usable_cores
from normlab.lab.training.run import Run
from normlab.lab.training.trainer import Trainer, load_task


@dataclass(frozen=True)
class Seconds:
    """Seconds of one optimizer step, of one validation, of a whole run, and until a worker begins its first
    run.
    """

    step: float
    validation: float
    run: float
    start: float = 0.0

    @classmethod
    def mean(cls, every: Sequence[Seconds]) -> Seconds:
        """Return the means of several measurements."""
        return cls(*map(statistics.mean, zip(*map(astuple, every), strict=True)))


def measure(config: Config, corpus: Prepared, *, steps: int = 5) -> Seconds:
    """Time the beginning of a run, in a folder that is then deleted, on ``machine.threads`` threads: after
    two warm-up steps, the median of ``steps`` steps, one with its probes, a row and a checkpoint; and, with
    the task's rehearsal, a validation and the test.
    """
    train, machine = config.train, config.machine
    device = prepare_process(machine)
    probed = replace(config, machine=replace(machine, probe_every_steps=steps + 3, keep_checkpoints=""))
    task = TASKS[config.task](probed, corpus, device)

    def seconds(action: Callable[[], Any]) -> float:
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    with TemporaryDirectory() as root, closing(Trainer(task)) as trainer:
        folder = RunFolder(Path(root) / "rehearsal")
        RunFolder.create(folder.path, probed, task.metrics)
        with closing(Run(trainer, folder)) as run:
            begin = seconds(run.resume)
            *plain, with_probes = [seconds(run.step) for _ in range(steps + 3)]
            row, checkpoint = seconds(run.rows.flush), seconds(lambda: run.checkpoint("running"))
        trainer.model.eval()
        with autocast(device, train.precision):
            validation, test = task.rehearse(trainer.model)
    step = statistics.median(plain[2:])
    probing = (with_probes - step) / machine.probe_every_steps if machine.probes else 0.0
    validations = -(-train.steps // train.validate_every_steps)
    checkpoints = train.steps // machine.checkpoint_every_steps + 1
    parts = (
        begin,
        train.steps * (step + probing + row / machine.log_every_steps),
        validations * (validation + checkpoint),
        checkpoints * checkpoint,
        test * (2 if train.average_last else 1),
    )
    return Seconds(step, validation, sum(parts))


def measure_side_by_side(
    configs: Sequence[Config], root: Path, jobs: int, setups: Sequence[str] = ()
) -> Seconds:
    """Measure each configuration in a process of its own, ``jobs`` at a time, and return the means. The data
    is prepared below ``root``, or the configuration trains one of the user's own files ``setups``.

    Processes slow each other down, so all are kept busy: if the last round is not full, the first
    configurations are measured again. Raises UserError as a run does.
    """
    jobs = min(jobs, usable_cores())
    rounds = -(-len(configs) // jobs)
    asked = [configs[i % len(configs)] for i in range(rounds * jobs)]
    with ThreadPoolExecutor(jobs) as threads:
        found = list(threads.map(lambda config: _in_process(config, root, setups), asked))
    return Seconds.mean(found)


def _in_process(config: Config, root: Path, setups: Sequence[str]) -> Seconds:
    command = [sys.executable, "-P", "-m", "normlab.lab.training.timing", str(root), *setups]
    began = time.time()
    answer = subprocess.run(command, input=to_json(config), stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(answer.stdout)
    if "refused" in found:
        raise UserError(found["refused"])
    return Seconds(**{**found, "start": found["start"] - began})


def main() -> None:
    """Read a configuration from standard input and write its seconds, with the time at which this started."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    load_plugins()
    start, began = time.time(), time.perf_counter()
    config, (root, *setups) = from_json(Config, sys.stdin.read()), sys.argv[1:]
    try:
        if setups:
            from normlab.lab.training.own_runs import rehearse
            from normlab.lab.training.own_setups import files_of

            found = Seconds(*rehearse(config, files_of(setups)))
        else:
            task = load_task(config, Path(root))
            loading = time.perf_counter() - began
            found = measure(task.config, task.corpus)
            found = replace(found, run=found.run + loading)
        answer = asdict(replace(found, start=start))
    except UserError as error:
        answer = {"refused": str(error)}
    with answers:
        json.dump(answer, answers)


if __name__ == "__main__":
    main()

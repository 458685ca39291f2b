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
from normlab.lab.training.devices import in_precision, prepare_process
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
    def mean(cls, measurements: Sequence[Seconds]) -> Seconds:
        """Return the means of several measurements."""
        columns = zip(*map(astuple, measurements), strict=True)
        return cls(*map(statistics.mean, columns))


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
            step_times = [seconds(run.step) for _ in range(steps + 3)]
            row = seconds(run.rows.flush)
            checkpoint = seconds(lambda: run.checkpoint("running"))
        trainer.model.eval()
        with in_precision(device, train.precision):
            validation, test = task.rehearse(trainer.model)
    *unprobed, with_probes = step_times[2:]  # two to warm up, the first of them with probes
    step = statistics.median(unprobed)
    probing = (with_probes - step) / machine.probe_every_steps if machine.probes else 0.0
    validations = -(-train.steps // train.validate_every_steps)
    checkpoints = train.steps // machine.checkpoint_every_steps + 1
    tests = 2 if train.average_last else 1
    total = begin
    total += train.steps * (step + probing + row / machine.log_every_steps)
    total += validations * (validation + checkpoint)
    total += checkpoints * checkpoint
    total += tests * test
    return Seconds(step, validation, total)


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
    measured = [configs[i % len(configs)] for i in range(rounds * jobs)]
    with ThreadPoolExecutor(jobs) as threads:
        times = list(threads.map(lambda config: _in_process(config, root, setups), measured))
    return Seconds.mean(times)


def _in_process(config: Config, root: Path, setups: Sequence[str]) -> Seconds:
    command = [sys.executable, "-P", "-m", "normlab.lab.training.timing", str(root), *setups]
    began = time.time()
    answer = subprocess.run(command, input=to_json(config), stdout=subprocess.PIPE, text=True, check=True)
    fields = json.loads(answer.stdout)
    if "refused" in fields:
        raise UserError(fields["refused"])
    seconds = Seconds(**fields)
    return replace(seconds, start=seconds.start - began)  # the process says when it was ready


def main() -> None:
    """Read a configuration from standard input and write its seconds, with the time at which this started."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever is printed goes to standard error, and the answer alone to standard output
    load_plugins()
    ready = time.time()
    config, (root, *setups) = from_json(Config, sys.stdin.read()), sys.argv[1:]
    try:
        seconds = _measured(config, Path(root), setups)
        answer: dict[str, Any] = asdict(replace(seconds, start=ready))
    except UserError as error:
        answer = {"refused": str(error)}
    with answers:
        json.dump(answer, answers)


def _measured(config: Config, root: Path, setups: Sequence[str]) -> Seconds:
    """Measure a run of one of the user's setups, or of a recipe with the time that its data takes to load."""
    if setups:
        from normlab.lab.training.own_runs import rehearse
        from normlab.lab.training.own_setups import files_of

        return Seconds(*rehearse(config, files_of(setups)))
    began = time.perf_counter()
    task = load_task(config, root)
    loading = time.perf_counter() - began
    seconds = measure(task.config, task.corpus)
    return replace(seconds, run=seconds.run + loading)


if __name__ == "__main__":
    main()

"""What probes and the flight recorder cost a training step, by preset, interleaved in one process.

    python benchmarks/probing.py             # print the table
    python benchmarks/probing.py --write     # and keep it in benchmarks/results/probing.json

Every step is the same one: the first batch, from wherever the weights are by then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from normlab.diagnosis import PRESETS, Record
from normlab.lab.config import Config, DataConfig, MachineConfig, ModelConfig, TrainConfig
from normlab.lab.tasks import TASKS
from normlab.lab.training.devices import hardware, prepare_process
from normlab.lab.training.probing import Probing
from normlab.lab.training.trainer import Trainer
from normlab.watching.meter import Meter

RESULTS = Path(__file__).parent / "results/probing.json"
ROUNDS, WARM = 12, 2
ALONE = "the recorder's work alone"
CONFIG = Config(
    model=ModelConfig(),
    data=DataConfig(builtin_pairs=4000, vocab_size=4000),
    train=TrainConfig(max_tokens=2048),
    machine=MachineConfig(threads=1),
)
EVERY = CONFIG.machine.probe_every_steps


class Blind:
    """In the place of the meter: the gradient norms that clipping needs, and nothing of updates."""

    def __init__(self, meter: Meter) -> None:
        self.names, self._meter, self._none = meter.names, meter, torch.zeros(len(meter.names))

    def gradients(self) -> Tensor:
        return self._meter.gradients()

    def before(self) -> None:
        pass

    def after(self) -> Tensor:
        return self._none


@dataclass(frozen=True)
class Way:
    """One way to do a step."""

    name: str
    preset: str
    recorded: bool = True


WAYS = (Way("bare", "", recorded=False), Way("recorder", ""), *(Way(name, name) for name in PRESETS))


def timed(trainer: Trainer, way: Way, meter: Meter) -> float:
    """Seconds of the first step, once more."""
    records: list[Record] = []
    trainer.meter = meter if way.recorded else Blind(meter)  # pyrefly: ignore
    probing = Probing(trainer.model, way.preset, 1, records.append)
    trainer.progress.step = 0
    start = time.perf_counter()
    record = trainer.step(probing.passing)
    probing.measure_step(record, meter, trainer.parallel)
    probing.flush()
    return time.perf_counter() - start


def measured() -> dict[str, list[float]]:
    """Seconds by way, one of each in every round."""
    kind = TASKS[CONFIG.task]
    taken: dict[str, list[float]] = {name: [] for name in (*(w.name for w in WAYS), ALONE)}
    with tempfile.TemporaryDirectory() as root:
        data, corpus = kind.prepare(CONFIG.data, Path(root) / "data")
        config = replace(CONFIG, data=data)
        trainer = Trainer(kind(config, corpus, torch.device("cpu")))
        meter = trainer.meter
        for i in range(WARM + ROUNDS):
            for way in WAYS[i % len(WAYS) :] + WAYS[: i % len(WAYS)]:
                seconds = timed(trainer, way, meter)
                if i >= WARM:
                    taken[way.name].append(seconds)
            start = time.perf_counter()
            meter.before()
            meter.after()
            if i >= WARM:
                taken[ALONE].append(time.perf_counter() - start)
    return taken


def table(taken: dict[str, list[float]]) -> list[str]:
    """Markdown lines. Shares are medians over rounds: of the bare step of the round, and for presets, of the
    step with the recorder.
    """
    lines = [
        f"| step | median, ms | quartiles, ms | more than without | averaged over {EVERY} steps |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, seconds in taken.items():
        low, middle, high = (1000 * q for q in statistics.quantiles(seconds, n=4))
        beside = taken["recorder" if name in PRESETS else "bare"]
        share = statistics.median(a / b for a, b in zip(seconds, beside, strict=True)) - (name != ALONE)
        cells = f"{share:+.1%} | {share / EVERY:+.2%}" if name in PRESETS else f"{share:+.1%} | every step"
        cells = " | " if name == "bare" else cells
        lines.append(f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} | {cells} |")
    return lines


def main() -> None:
    """Measure, print, and keep it if asked."""
    parser = argparse.ArgumentParser(description="The cost of probes in training.")
    parser.add_argument("--write", action="store_true", help="keep it in benchmarks/results/probing.json")
    args = parser.parse_args()
    device = prepare_process(CONFIG.machine)
    load = os.getloadavg()[0]
    taken = measured()
    print("\n".join(table(taken)))
    if args.write:
        rounded = {name: [round(s, 5) for s in seconds] for name, seconds in taken.items()}
        about = f"{hardware(device)}, {os.cpu_count()} cores at a load of {load:.1f}"
        RESULTS.write_text(json.dumps({"about": about, "seconds": rounded}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

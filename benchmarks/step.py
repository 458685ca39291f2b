"""A training step of ours against other libraries' of the same size, interleaved in one process.

Equal on all sides: batches, the label-smoothed loss, fused Adam, fp32 or bf16 autocast, the allocator. What
the models have in common and what not is in ``peers.py``; the table has their parameters. Starting weights
differ, which changes no time. JoeyNMT takes part where it is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from normlab.lab.config import MachineConfig, ModelConfig, OptimConfig
from normlab.lab.data.batches import Batch, PairBatches
from normlab.lab.data.ragged import Ragged, TokenPairs
from normlab.lab.data.shapes import plan_shapes
from normlab.lab.tasks.task import build_model, label_smoothed
from normlab.lab.training.devices import autocast, hardware, prepare_process
from normlab.nn import PAD, Seq2Seq
from normlab.optim import build_optimizer, set_rate
from peers import PEERS, installed

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
VOCAB = 5000
SMOOTHING = 0.1
Quartiles = tuple[float, float, float]


@dataclass(frozen=True)
class Setting:
    """A model's size and the positions of a batch, source and target together."""

    layers: int
    dim: int
    ffn_dim: int
    max_tokens: int

    def config(self, placement: str) -> ModelConfig:
        return replace(
            ModelConfig(),
            dim=self.dim,
            ffn_dim=self.ffn_dim,
            heads=4,
            encoder_layers=self.layers,
            decoder_layers=self.layers,
            encoder_placement=placement,
            decoder_placement=placement,
            dropout=0.1,
            attention_dropout=0.1,
            ffn_dropout=0.1,
        )


SETTINGS = {
    "small": Setting(layers=6, dim=512, ffn_dim=1024, max_tokens=2048),
    "default": Setting(layers=3, dim=256, ffn_dim=1024, max_tokens=4096),
}
"""Transformer-small, and the size that a configuration has by default."""


def batches(max_tokens: int, count: int) -> list[Batch]:
    """Random tokens in the lengths of image captions: about 14 on either side, from 3 to 40."""
    rng = np.random.default_rng(1)
    source = np.clip(rng.lognormal(2.6, 0.3, 6000).round(), 3, 40).astype(int)
    target = np.clip((source * rng.lognormal(0.0, 0.15, 6000)).round(), 3, 40).astype(int)
    pairs = TokenPairs(
        *(Ragged.of([rng.integers(4, VOCAB, n).tolist() for n in lengths]) for lengths in (source, target))
    )
    made = PairBatches(pairs, plan_shapes(pairs, max_tokens), 1)
    return [made.at(i) for i in range(min(count, made.steps_per_epoch))]


def stepper(model: nn.Module, precision: str) -> Callable[[Batch], float]:
    """A training step; its seconds."""
    optimizer = set_rate(build_optimizer(model, OptimConfig()), 1e-4)
    model.train()

    def step(batch: Batch) -> float:
        start = time.perf_counter()
        with autocast(CPU, precision):
            sums = label_smoothed(
                model(batch.source, batch.target_in), batch.target_out, SMOOTHING, None, PAD
            )
        (sums.loss / batch.tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    return step


@dataclass(frozen=True)
class Row:
    """One side of one setting; quartiles over batches and rounds."""

    setting: str
    placement: str
    precision: str
    threads: int
    side: str
    parameters: int
    steps: int
    step_ms: Quartiles
    tokens_per_second: float
    """Source and target tokens, without padding."""
    speedup: Quartiles
    """Its step over ours on the same batch: above 1, ours is faster."""


def measure(setting: str, placement: str, precision: str, threads: int, seconds: float) -> list[Row]:
    """Every side's step on each batch in turn, whose turn is first going round, until the time is up."""
    prepare_process(MachineConfig(threads=threads))
    size = SETTINGS[setting]
    config = size.config(placement)
    data = batches(size.max_tokens, 16)
    models = {"normlab": build_model(Seq2Seq, config, VOCAB, 1)}
    models |= {name: PEERS[name][1](config, VOCAB) for name in installed(config)}
    steps = {name: stepper(model, precision) for name, model in models.items()}
    for step in steps.values():
        for batch in sorted(data, key=lambda b: -b.target_in.numel())[:2]:
            step(batch)
    names = list(models)
    taken: dict[str, list[float]] = {name: [] for name in names}
    tokens, rounds, end = 0, 0, time.perf_counter() + seconds
    while time.perf_counter() < end or rounds < 2 * len(names):
        batch = data[rounds // 2 % len(data)]
        first = rounds % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(steps[name](batch))
        tokens += batch.tokens + int((batch.source != PAD).sum())
        rounds += 1
    return [
        Row(
            setting,
            placement,
            precision,
            threads,
            name,
            sum(p.numel() for p in models[name].parameters()),
            rounds,
            quartiles([1000 * t for t in taken[name]]),
            tokens / sum(taken[name]),
            quartiles([a / b for a, b in zip(taken[name], taken["normlab"], strict=True)]),
        )
        for name in names
    ]


def quartiles(values: list[float]) -> Quartiles:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(rows: list[Row]) -> Iterator[str]:
    """Markdown lines."""
    yield (
        "| size | placement | precision | threads | side | parameters | step, ms | tokens/s | times ours |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for r in rows:
        low, middle, high = r.step_ms
        ours = r.side == "normlab"
        factor = "" if ours else f"{r.speedup[1]:.2f} ({r.speedup[0]:.2f} to {r.speedup[2]:.2f})"
        yield (
            f"| {r.setting} | {r.placement} | {r.precision} | {r.threads} | {r.side} | {r.parameters:,} "
            f"| {middle:.0f} ({low:.0f} to {high:.0f}) | {r.tokens_per_second:.0f} | {factor} |"
        )


def profiled(title: str, sides: Mapping[str, Callable[[], object]], most: int = 12) -> Iterator[str]:
    """Markdown lines: the milliseconds that each side spends in the operators that take longest."""
    found: dict[str, dict[str, float]] = {}
    for name, action in sides.items():
        action()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            action()
        found[name] = {event.key: event.self_cpu_time_total / 1000 for event in seen.key_averages()}
    longest: dict[str, float] = {}
    for times in found.values():
        for key, ms in times.items():
            longest[key] = max(ms, longest.get(key, 0.0))
    shown = sorted(longest, key=lambda key: -longest[key])[:most]
    rest = [sum(ms for key, ms in times.items() if key not in shown) for times in found.values()]
    yield f"| {title} | {' | '.join(found)} |"
    yield "| --- |" + " --- |" * len(found)
    for key in shown:
        yield f"| `{key}` | " + " | ".join(f"{times.get(key, 0.0):.2f}" for times in found.values()) + " |"
    yield "| all others | " + " | ".join(f"{ms:.2f}" for ms in rest) + " |"
    yield "| sum | " + " | ".join(f"{sum(times.values()):.2f}" for times in found.values()) + " |"


def about() -> str:
    """Sizes and machine in words."""
    sizes = "; ".join(
        f"{name}: {s.layers}+{s.layers} layers, d {s.dim}, FFN {s.ffn_dim}, {s.max_tokens} positions a batch"
        for name, s in SETTINGS.items()
    )
    return f"{sizes}; vocabulary {VOCAB}, dropout 0.1; medians with quartiles; {machine()}"


def machine() -> str:
    """Processor and torch; the threads stand in the rows."""
    return re.sub(r"\d+ threads?, ", "", hardware(CPU))


def main() -> None:
    """Measure every setting, print the table, write it when asked."""
    parser = argparse.ArgumentParser(description="A training step against other libraries'.")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each setting")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--placements", nargs="+", choices=["post", "pre"], default=["post", "pre"])
    parser.add_argument("--sizes", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/step.json and step.md")
    args = parser.parse_args()
    rows: list[Row] = []
    for setting in args.sizes:
        for threads in args.threads:
            for precision in args.precisions:
                for placement in args.placements:
                    found = measure(setting, placement, precision, threads, args.seconds)
                    rows += found
                    print(*list(table(found))[2:], sep="\n", flush=True)
    text = "\n".join([about(), "", *table(rows), ""])
    if args.write:
        RESULTS.mkdir(exist_ok=True)
        content = {"about": about(), "rows": [asdict(row) for row in rows]}
        (RESULTS / "step.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "step.md").write_text(f"# A training step\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()

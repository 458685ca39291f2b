"""What a diagnosis costs: seconds and memory against depth.

    python benchmarks/diagnosis.py             # the shallowest encoder, to see that it runs
    python benchmarks/diagnosis.py --write     # all depths and presets, and `normlab diagnose`
    python benchmarks/diagnosis.py --page      # write docs/diagnosis-cost.md, without measuring

Every case is a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from normlab.diagnosis import diagnose
from normlab.diagnosis.laws import LawFit, fits
from normlab.lab.config import MachineConfig, ModelConfig
from normlab.lab.tasks.task import build_model
from normlab.lab.training.devices import hardware, prepare_process
from normlab.nn import Encoder

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/diagnosis.json"
PAGE = ROOT / "docs/diagnosis-cost.md"

LAYERS = (6, 12, 18, 24, 36, 60)
PRESETS = ("cheap", "standard")
SIZE = ModelConfig(dim=512, ffn_dim=2048, heads=8, decoder_layers=0, dropout=0.0)
VOCAB, ROWS, LENGTH = 1000, 64, 32
RATE, THREADS = 5e-4, 2
COMMAND = (
    "diagnose --recipe post --encoder-layers 18 --decoder-layers 18 --lr 5e-4 --dim 512 --ffn-dim 2048 "
    "--heads 8 --preset standard"
)
ALLOWED_SECONDS, ALLOWED_GIB = 90, 10
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One process."""

    layers: int
    """Of the encoder; 0 for ``COMMAND``."""
    preset: str
    seconds: float
    """Of the diagnosis: the structure is read and all studies are done; of ``COMMAND``, of the process."""
    studies: dict[str, float]
    """Seconds of each."""
    process_seconds: float
    """From the process's start to its end."""
    cpu_seconds: float
    """Of all threads of the process."""
    peak_bytes: int
    load: float
    """Of the machine during the minute before the end: processes that run or wait to."""


def diagnosed(layers: int, preset: str) -> dict[str, Any]:
    """The diagnosis of an encoder that fills in tokens, at its start, on random tokens."""
    prepare_process(MachineConfig(threads=THREADS))
    size = ModelConfig(**{**asdict(SIZE), "encoder_layers": layers})
    model = build_model(Encoder, size, VOCAB, seed=1)
    ids = torch.randint(4, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0])[0].flatten(0, 1), batch[0].flatten())

    start = time.perf_counter()
    optimizer = partial(torch.optim.Adam, lr=RATE)
    found = diagnose(model, (ids,), loss=loss, optimizer=optimizer, preset=preset)
    return {"total": time.perf_counter() - start, "seconds": dict(found.seconds)}


def measure(layers: int, preset: str) -> Row:
    """One case in a process of its own."""
    own = [sys.executable, str(Path(__file__).resolve()), "--case", str(layers), preset]
    typed = [str(Path(sys.executable).with_name("normlab")), *COMMAND.split(), "--threads", str(THREADS)]
    with tempfile.TemporaryDirectory() as fresh:
        return timed(layers, preset, own if layers else [*typed, "--runs", fresh, "--json"])


def timed(layers: int, preset: str, command: Sequence[str]) -> Row:
    """A process that ends by printing its seconds as JSON. Raises RuntimeError where it fails."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f"{layers} layers, {preset}: the process ended with {process.returncode}")
    found = json.loads(said)
    return Row(
        layers=layers,
        preset=preset,
        seconds=round(found.get("total", wall), 2),
        studies={name: round(seconds, 2) for name, seconds in found["seconds"].items()},
        process_seconds=round(wall, 2),
        cpu_seconds=round(used.ru_utime + used.ru_stime, 2),
        peak_bytes=used.ru_maxrss * 1024,
        load=round(os.getloadavg()[0], 2),
    )


def kept() -> tuple[list[Row], str]:
    """What ``diagnosis.json`` holds, and the hardware."""
    if not RESULTS.exists():
        return [], ""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return [Row(**row) for row in found["rows"]], found["hardware"]


def keep(rows: Sequence[Row]) -> None:
    """Write ``diagnosis.json``."""
    torch.set_num_threads(THREADS)
    about = json.dumps(hardware(torch.device("cpu")))
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    RESULTS.write_text(f'{{"hardware": {about},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown lines of one preset's encoders."""
    yield "| layers | seconds | a layer | CPU seconds of the process | peak memory | load |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for r in sorted(rows, key=lambda r: r.layers):
        yield (
            f"| {r.layers} | {r.seconds:.1f} | {r.seconds / r.layers:.2f} | {r.cpu_seconds:.0f} | "
            f"{r.peak_bytes / GIB:.1f} GiB | {r.load:.1f} |"
        )


def growth(rows: Sequence[Row]) -> str:
    """How the seconds grow with depth: a power of it, and what each layer adds to the start."""
    rows = sorted(rows, key=lambda r: r.layers)
    found = {fit.law: fit for fit in fits([r.layers for r in rows], [r.seconds for r in rows])}
    power, linear = found["power"], found["linear"]
    return (
        f"Seconds grow like N^p with p = {power.exponent:.2f} ({_interval(power)}). A line through them has "
        f"R² = {linear.r2:.3f} and adds {linear.coefficient:.2f} s a layer ({_interval(linear)})."
    )


def _interval(fit: LawFit) -> str:
    return f"95 % interval {fit.low:.2f} to {fit.high:.2f}"


def slowest(row: Row, number: int = 5) -> str:
    """The studies that take longest."""
    most = sorted(row.studies.items(), key=lambda pair: -pair[1])[:number]
    return ", ".join(f"`{name}` {seconds:.1f} s" for name, seconds in most)


def deep(row: Row) -> str:
    """What the command costs, against what it may."""
    gib = row.peak_bytes / GIB
    kept_to = row.seconds <= ALLOWED_SECONDS and gib <= ALLOWED_GIB
    return (
        f"`normlab {COMMAND}`, from typing it to its end (imports, text from the built-in corpus, diagnosis "
        f"and page): **{row.seconds:.0f} s, {gib:.1f} GiB** and {row.cpu_seconds:.0f} CPU seconds, at a load "
        f"of {row.load:.1f}. The bound is {ALLOWED_SECONDS} s and {ALLOWED_GIB} GiB: "
        f"{'kept' if kept_to else 'not kept'}. The longest studies: {slowest(row)}."
    )


def page() -> str:
    """``docs/diagnosis-cost.md``, from what is kept."""
    rows, machine = kept()
    setting = (
        f"A Post-LN encoder (d {SIZE.dim}, FFN {SIZE.ffn_dim}, {SIZE.heads} heads) at its start on "
        f"{ROWS} x {LENGTH} = {ROWS * LENGTH} random tokens, which it is to put out again; Adam at {RATE:g}. "
        "Seconds are those of `normlab.diagnose`: the structure is read and every study of the preset done. "
        "The first study, `scales`, makes the pass forward and back that later ones share. "
        "CPU seconds and peak memory are those of the whole process, imports included. *Load* is the "
        f"machine's in the last minute, of which a case is about {THREADS} where it has the machine for "
        "itself: seconds beside a higher one are too long."
    )
    purpose = "This page shows how much time and memory a diagnosis takes, study by study."
    paragraphs = ["# What a diagnosis costs", purpose, setting]
    for preset in PRESETS:
        those = [r for r in rows if r.layers and r.preset == preset]
        longest = max(those, key=lambda r: r.layers)
        paragraphs += [f"## Preset `{preset}`", "\n".join(table(those)), growth(those)]
        paragraphs.append(f"Of the {longest.seconds:.0f} s at {longest.layers} layers: {slowest(longest)}.")
    paragraphs += ["## 18 + 18 layers, as typed", *(deep(r) for r in rows if not r.layers)]
    made = (
        f"{machine}. This page is written by `python benchmarks/diagnosis.py --page` from "
        "[`benchmarks/results/diagnosis.json`](../benchmarks/results/diagnosis.json), which `--write` "
        "measures."
    )
    return "\n\n".join([*paragraphs, "## How it was measured", made]) + "\n"


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description="Seconds and memory of a diagnosis.")
    parser.add_argument("--case", nargs=2, metavar=("LAYERS", "PRESET"), help="one case, in this process")
    parser.add_argument("--write", action="store_true", help="all cases, kept in diagnosis.json")
    parser.add_argument("--page", action="store_true", help="write docs/diagnosis-cost.md and no more")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(diagnosed(int(args.case[0]), args.case[1])))
        return
    if not args.page:
        wanted = [(layers, preset) for preset in PRESETS for layers in LAYERS]
        rows: list[Row] = []
        for layers, preset in [*wanted, (0, "standard")] if args.write else wanted[:1]:
            rows.append(measure(layers, preset))
            print(rows[-1], flush=True)
        if args.write:
            keep(rows)
    if args.write or args.page:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

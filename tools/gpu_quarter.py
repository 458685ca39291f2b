"""What ten minutes of one GPU are used for: ``NORMLAB_DATA=... python tools/gpu_quarter.py --device cuda``.

Each part runs in a process of its own, because an error on a GPU may leave its process unable to use it, and
is interrupted at its time limit. Its rows are added to ``rows.jsonl`` of ``--out`` as soon as they are there,
with hardware, commit and date; a last row says whether the part is done, was interrupted, or raised. A second
call leaves out what is done, and trainings go on from their checkpoints below ``--runs``. With ``--tiny``
every part runs at a size that a CPU does in seconds, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normlab
from checkout import HOME, commit
from normlab.base.files import row_line
from normlab.lab.config import Config, MachineConfig, ModelConfig, OptimConfig, SeedConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs.folder import RunFolder
from normlab.lab.tasks.task import build_model, label_smoothed
from normlab.lab.training.cost import cost_of
from normlab.lab.training.devices import autocast, hardware, resolved_precision
from normlab.lab.training.train import train
from normlab.nn import PAD, Norm, Seq2Seq
from normlab.optim import build_optimizer, set_rate
from normlab.papers.bases import BASE, DATES
from normlab.papers.experiments import dev_curve, made_at
from normlab.papers.liu2020.training import SECTION5_3
from normlab.papers.nguyen2019.bases import GL_EN
from normlab.papers.trainings import changed

sys.path.append(str(HOME / "benchmarks"))

from decoder_peers import NanoGPT
from peers import TorchTransformer
from step import VOCAB, batches

sys.path.remove(str(HOME / "benchmarks"))  # a module there has the name of a folder of tests

Row: TypeAlias = dict[str, Any]
OUT: Final = HOME / "results" / "gpu-quarter"
ROWS: Final = "rows.jsonl"
DONE, INTERRUPTED, FAILED = "done", "interrupted", "failed"
MINUTES: Final = 10.0
"""All parts together."""
GRACE_S: Final = 30.0
"""How long a part that was interrupted may take to save its training."""
TINY: Final = ModelConfig(dim=32, ffn_dim=64, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.1)


@dataclass(frozen=True)
class Place:
    """Where a part runs, and how large."""

    device: torch.device
    tiny: bool
    runs: Path

    def model_config(self) -> ModelConfig:
        """Transformer-base, or a tiny model."""
        return TINY if self.tiny else replace(BASE.model, dropout=0.1)

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, action: Callable[[], object], times: int) -> float:
        """The mean time of an action, after two that warm the device up."""
        for _ in range(2):
            action()
        self.wait()
        start = time.perf_counter()
        for _ in range(times):
            action()
        self.wait()
        return (time.perf_counter() - start) / times

    def peak_bytes(self) -> int | None:
        """The most memory that torch held on the device since the last call; None without CUDA."""
        if self.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


# ------------------------------------------------------------------------------------------ check and watch


def _next_token(model: nn.Module, ids: Tensor) -> Tensor:
    with autocast(ids.device, "bf16"):
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def _translation(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    target = batch["target"]
    with autocast(target.device, "bf16"):
        logits = model(batch["source"], target[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten(), ignore_index=PAD)


def _pairs(place: Place) -> dict[str, Tensor]:
    """Sentence pairs of several lengths, each with a first and a last token and then padding."""
    batch = batches(256 if place.tiny else 4096, 1)[0]
    target = torch.cat([batch.target_in[:, :1], batch.target_out], 1)
    return {"source": batch.source.to(place.device), "target": target.to(place.device)}


def _ids(place: Place) -> Tensor:
    rows, length = (4, 16) if place.tiny else (16, 256)
    return torch.randint(4, VOCAB, (rows, length)).to(place.device)


def _setup(place: Place, model: str) -> normlab.Setup:
    """A model in bf16 autocast on the device, with a fused AdamW and clipping."""
    config = place.model_config()

    def make() -> nn.Module:
        torch.manual_seed(1)
        if model == "decoder":
            return NanoGPT(config, VOCAB).to(place.device)
        if model == "torch":
            return TorchTransformer(config, VOCAB).to(place.device)
        return build_model(Seq2Seq, config, VOCAB, 1).to(place.device)

    loss, batch = (_next_token, _ids(place)) if model == "decoder" else (_translation, _pairs(place))
    ready = make()

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, _: object = None) -> Tensor:
        value = loss(model, batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value

    optimizer = torch.optim.AdamW(ready.parameters(), lr=3e-4, fused=True)
    return normlab.Setup(ready, batch, loss=loss, optimizer=optimizer, step=step, make=make)


def instruments(model: str) -> Callable[[Place], Iterator[Row]]:
    """The part that checks one model and watches its training."""

    def part(place: Place) -> Iterator[Row]:
        setup = _setup(place, model)
        place.peak_bytes()
        report = normlab.check(setup, budget_s=5 if place.tiny else 40).to_dict()
        yield {
            "what": f"check of {model}",
            **{name: report[name] for name in ("verdict", "failures", "holds", "untestable", "seconds")},
            "peak_bytes": place.peak_bytes(),
        }
        yield {"what": f"watch of {model}", **_watched(place, setup), "peak_bytes": place.peak_bytes()}

    return part


def _watched(place: Place, setup: normlab.Setup) -> Row:
    """What a watch of a training says, and what a step takes with it and without it."""
    model, steps = setup.model, 6 if place.tiny else 100
    model.train()

    def step() -> Tensor:
        return setup.step(model, setup.batch, setup.optimizer)

    alone = place.seconds(step, steps)
    folder, every = place.runs / "watch", max(2, steps // 4)
    with normlab.watch(model, setup.optimizer, out=folder, every_steps=every) as watch:

        def watched_step() -> None:
            watch.loss(step())

        watched = place.seconds(watched_step, steps)
    flight = json.loads(watch.flight.read_text(encoding="utf-8"))
    return {
        "steps": watch.steps,
        "losses": flight["losses"],
        "notes": flight["notes"],
        "triggers": [report["trigger"]["words"] for report in watch.reports],
        "ms_alone": 1000 * alone,
        "ms_watched": 1000 * watched,
    }


# ---------------------------------------------------------------------------------------------------- speed


def steps_per_second(place: Place) -> Iterator[Row]:
    """Training steps of a Transformer-base, and their share of the rate of large products."""
    config, positions = place.model_config(), 512 if place.tiny else 16_384
    model = build_model(Seq2Seq, config, VOCAB, 1).to(place.device).train()
    optimizer = set_rate(build_optimizer(model, OptimConfig()), 1e-4)
    batch = max(batches(positions, 8), key=lambda b: b.target_in.numel()).to(place.device)

    def loss(model: nn.Module) -> Tensor:
        sums = label_smoothed(model(batch.source, batch.target_in), batch.target_out, 0.1, None, PAD)
        return sums.loss / batch.tokens

    flops = cost_of(model, loss).flops
    for precision in ("bf16", "fp32"):

        def step(precision: str = precision) -> None:
            with autocast(place.device, precision):
                value = loss(model)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        seconds = place.seconds(step, 3 if place.tiny else 50)
        peak = _product_rate(place, torch.bfloat16 if precision == "bf16" else torch.float32)
        yield {
            "what": "training step",
            "precision": precision,
            "positions": batch.source.numel() + batch.target_in.numel(),
            "steps_per_second": 1 / seconds,
            "flops": flops,
            "flops_per_second": flops / seconds,
            "product_flops_per_second": peak,
            "share_of_products": flops / seconds / peak,
            "peak_bytes": place.peak_bytes(),
        }


def _product_rate(place: Place, dtype: torch.dtype) -> float:
    """FLOPs per second of the product of two large square matrices."""
    size = 256 if place.tiny else 8192
    x = torch.randn(size, size, device=place.device, dtype=dtype)
    return 2 * size**3 / place.seconds(lambda: x @ x, 3 if place.tiny else 20)


def norms(place: Place) -> Iterator[Row]:
    """Every norm's time forward, and forward and backward, over the time of a copy of its input."""
    rows, dim = (64, 32) if place.tiny else (65_536, 1024)
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "torch.nn.LayerNorm": nn.LayerNorm,
        "torch.nn.RMSNorm": nn.RMSNorm,
        **Norm.registry,
    }
    times = 3 if place.tiny else 50
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(rows, dim, device=place.device, dtype=dtype, requires_grad=True)
        gradient = torch.randn_like(x)
        source, target = x.detach(), torch.empty_like(x)
        copying = place.seconds(lambda source=source, target=target: target.copy_(source), times)
        bandwidth = 2 * x.nbytes / copying
        yield {"what": "copy", "dtype": str(dtype), "ms": 1000 * copying, "bytes_per_second": bandwidth}
        for name, kind in kinds.items():
            norm = kind(dim).to(place.device, dtype)

            def forward(norm: nn.Module = norm, x: Tensor = x) -> Tensor:
                with torch.no_grad():
                    return norm(x)

            def both(norm: nn.Module = norm, x: Tensor = x, gradient: Tensor = gradient) -> None:
                norm.zero_grad()
                x.grad = None
                norm(x).backward(gradient)

            way, both_ways = place.seconds(forward, times), place.seconds(both, times)
            ratios = {"forward_of_copy": way / copying, "both_of_copy": both_ways / copying}
            yield {"what": name, "dtype": str(dtype), "ms_forward": 1000 * way, **ratios}


# ------------------------------------------------------------------------------------------------ trainings


def _tiny(config: Config) -> Config:
    """The same recipe on dates, at two layers and a few steps, in a precision that a CPU has."""
    steps = {"train.steps": 4, "train.validate_every_steps": 2, "train.max_tokens": 512}
    changes = {**steps, "train.dev_decode_sentences": 4, "train.precision": "fp32", "optim.warmup_steps": 2}
    return changed(replace(config, data=DATES.data, model=_tiny_model(config.model)), changes)


def _tiny_model(model: ModelConfig) -> ModelConfig:
    return replace(model, **{name: getattr(TINY, name) for name in ("dim", "ffn_dim", "heads")}, **_TWO)


_TWO: Final = {"encoder_layers": 2, "decoder_layers": 2}


def training(name: str, config: Callable[[], Config]) -> Callable[[Place], Iterator[Row]]:
    """The part that trains one configuration, as far as its time reaches."""

    def part(place: Place) -> Iterator[Row]:
        asked = _tiny(config()) if place.tiny else config()
        machine = MachineConfig(str(place.device), probes="", checkpoint_every_steps=200)
        # forced, as the papers' trainings are: FixUp's start and a tied table are the paper's own
        asked = resolve(asked.recipe, resolved_precision(replace(asked, machine=machine)), force=True)
        try:
            train(asked, place.runs)
        finally:  # an interrupted run tells as much, up to where it is
            for file in place.runs.glob("*/config.json"):
                folder = RunFolder(file.parent)
                if folder.config().recipe == asked.recipe:
                    yield {"what": name, **_of_run(folder)}

    return part


def _of_run(folder: RunFolder) -> Row:
    status = folder.status()
    last = [row for row in folder.metrics() if row["kind"] == "train"][-1:]
    return {
        "run": folder.path.name,
        "recipe": folder.config().recipe,
        "step": status.step,
        "outcome": status.outcome.state if status.outcome else "",
        "dev": dev_curve(folder),
        "last": last[0] if last else {},
        "train_seconds": round(status.train_seconds, 1),
    }


def _half(cell: str) -> Callable[[], Config]:
    """A cell of Section 5.3 of Liu et al. 2020 at the gpu scale, with its first seed."""

    def config() -> Config:
        return next(config for name, _, config in SECTION5_3.trainings["gpu"].configs() if name == cell)

    return config


def _gl_en() -> Config:
    return replace(GL_EN, recipe="pre+fixnorm+scalenorm+smallinit+warmup", seeds=SeedConfig.of(1))


# ---------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class Part:
    """One thing to measure, and how long it may take at most."""

    name: str
    limit_s: float
    rows: Callable[[Place], Iterator[Row]]


PARTS: Final = (
    Part("decoder", 75, instruments("decoder")),
    Part("torch", 75, instruments("torch")),
    Part("normlab", 75, instruments("normlab")),
    Part("step", 45, steps_per_second),
    Part("norms", 30, norms),
    Part("rezero", 75, training("rezero", _half("ReZero, dropout"))),
    Part("fixup", 75, training("fixup", _half("FixUp, dropout"))),
    Part("looklinear", 75, training("looklinear", _half("LookLinear+Post, dropout"))),
    Part("gl-en", 240, training("gl-en", _gl_en)),
)
"""In the order of their worth; the last one takes what is left, up to its limit."""


def kept(out: Path) -> list[Row]:
    """The rows that are there, without a last line that a power cut left unfinished."""
    path = out / ROWS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def finished(out: Path, device: torch.device, *, tiny: bool) -> set[str]:
    """The parts that are done on this kind of device at this size."""
    return {
        row["part"]
        for row in kept(out)
        if row.get("state") == DONE and (row["device"], row["tiny"]) == (device.type, tiny)
    }


def run_part(part: Part, place: Place, out: Path, made_by_commit: str) -> None:
    """Run a part in this process, and keep each of its rows and how it ended."""
    about = {"part": part.name, "device": place.device.type, "tiny": place.tiny}
    made_by = {"hardware": hardware(place.device), "torch": torch.__version__, "commit": made_by_commit}
    start = time.perf_counter()

    def keep(row: Row) -> None:
        line = row_line({**about, **row, **made_at(), **made_by})
        with (out / ROWS).open("a", encoding="utf-8") as file:
            file.write(line)

    ended: Row = {"state": DONE}
    try:
        for row in part.rows(place):
            keep(row)
    except KeyboardInterrupt:
        ended = {"state": INTERRUPTED}
    except Exception as error:  # the other parts go on
        ended = {"state": FAILED, "error": f"{type(error).__name__}: {error}"}
    keep({**ended, "seconds": round(time.perf_counter() - start, 1)})


def main() -> None:
    """Run what is not done yet, each part in a process of its own, until the time is up."""
    parser = argparse.ArgumentParser(description="What ten minutes of one GPU are used for.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu together with --tiny")
    parser.add_argument("--tiny", action="store_true", help="try every part at a tiny size")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="all parts together")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of {ROWS}")
    parser.add_argument("--runs", type=Path, default=HOME / "runs/gpu-quarter", help="folder of trainings")
    parser.add_argument("--commit", default="", help="that of the code, if no git is there to ask")
    parser.add_argument("--only", nargs="*", choices=[part.name for part in PARTS], help="some parts")
    parser.add_argument("--here", choices=[part.name for part in PARTS], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(asked.device)
    parts = {part.name: part for part in PARTS}
    if asked.here:
        run_part(parts[asked.here], Place(device, asked.tiny, asked.runs), asked.out, asked.commit)
        return
    end = time.monotonic() + 60 * asked.minutes
    done = finished(asked.out, device, tiny=asked.tiny)
    for part in PARTS:
        left = end - time.monotonic()
        if part.name in done or (asked.only and part.name not in asked.only) or left <= GRACE_S:
            continue
        command = [sys.executable, __file__, "--here", part.name, "--device", asked.device]
        places = ["--out", str(asked.out), "--runs", str(asked.runs), *(["--tiny"] * asked.tiny)]
        places += ["--commit", asked.commit or commit()]
        # the limits are those of a GPU
        limit = left - GRACE_S if asked.tiny else min(part.limit_s, left - GRACE_S)
        print(part.name, ended([*command, *places], limit, asked.out), flush=True)


def ended(command: list[str], limit_s: float, out: Path) -> str:
    """Run a part's process, interrupt it at its limit, and say how it ended."""
    before = len(kept(out))
    process = subprocess.Popen(command)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    last = kept(out)[before:][-1:]
    return json.dumps(last[0]) if last else f"left no row; its process ended with {process.returncode}"


if __name__ == "__main__":
    main()

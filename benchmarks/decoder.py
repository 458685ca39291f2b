"""A training step of a decoder, and generation with it, against other libraries', interleaved in one process.

Equal on all sides: size, batch, cross-entropy of the logits, fused AdamW, fp32 or bf16 autocast, the
allocator. What the models have in common is in ``decoder_peers.py``. ``torch.compile`` keeps what it made on
disk: a second run of this begins minutes earlier.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder_peers import peers, products, products_alone
from normlab.cli.presets import language_model
from normlab.lab.config import Config, MachineConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.tasks.task import build_model
from normlab.lab.training.devices import autocast, best_precision, prepare_process
from normlab.lab.training.jobs import usable_cores
from normlab.nn import Decoder
from normlab.nn.decode import generate
from step import Quartiles, machine, profiled, quartiles

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
SHAPES = {"GPT-2": "like:gpt2", "Llama": "like:llama"}
OURS, COMPILED, PRODUCTS = "normlab", ", compiled", "matrix products alone"
VOCAB, ROWS, LENGTH = 4000, 8, 256
PROMPT, NEW = 32, 200
"""Tokens that are given, and that are generated."""


def config_of(shape: str) -> Config:
    """Our recipe of a shape: 6 layers, 6 heads, d 384, FFN four times as wide, or as large with its gate."""
    base = language_model()
    ffn = 1536 if shape == "GPT-2" else 1024
    model = replace(base.model, decoder_layers=6, dim=384, heads=6, ffn_dim=ffn, max_positions=LENGTH)
    return resolve(SHAPES[shape], replace(base, model=model, data=replace(base.data, block_len=LENGTH)))


def stepper(model: nn.Module, precision: str) -> Callable[[Tensor], float]:
    """A training step; its seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train()

    def step(ids: Tensor) -> float:
        start = time.perf_counter()
        with autocast(CPU, precision):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    return step


def taken_by(action: Callable[[], object]) -> Callable[[Tensor], float]:
    """The seconds of an action that reads no batch."""

    def seconds(_: Tensor) -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return seconds


@dataclass(frozen=True)
class Row:
    """One side of one setting; quartiles over rounds."""

    shape: str
    precision: str
    threads: int
    side: str
    parameters: int
    rounds: int
    ms: Quartiles
    ours: Quartiles
    """Its time over that of ``normlab`` in the same round: above 1, ours is faster."""


def interleaved(sides: dict[str, Callable[[Tensor], float]], seconds: float) -> dict[str, list[float]]:
    """The seconds of every side in turn, whose turn is first going round, until the time is up."""
    names = list(sides)
    taken: dict[str, list[float]] = {name: [] for name in names}
    draw = torch.Generator().manual_seed(1)
    rounds, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end or rounds < 3:
        ids = torch.randint(4, VOCAB, (ROWS, LENGTH + 1), generator=draw)
        first = rounds % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(sides[name](ids))
        rounds += 1
    return taken


def models(shape: str) -> tuple[Config, dict[str, nn.Module]]:
    """Our model and those of the peers that are installed."""
    config = config_of(shape)
    ours = build_model(Decoder, config.model, VOCAB, 1)
    return config, {OURS: ours, **{name: make() for name, make in peers(shape, config, ours).items()}}


def steps(shape: str, precision: str, threads: int, seconds: float, *, compiled: bool) -> list[Row]:
    """Time every side's training step."""
    prepare_process(MachineConfig(threads=threads))
    config, built = models(shape)
    sides = {name: stepper(model, precision) for name, model in built.items()}
    if compiled:
        _, again = models(shape)
        sides |= {name + COMPILED: stepper(torch.compile(model), precision) for name, model in again.items()}
    warm = torch.randint(4, VOCAB, (ROWS, LENGTH + 1))
    for name, step in list(sides.items()):
        try:
            step(warm)
        except Exception as error:  # a peer that cannot be compiled is named, and the others go on
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            del sides[name]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    sides[PRODUCTS] = taken_by(products_alone(config.model, VOCAB, ROWS * LENGTH, dtype))
    taken = interleaved(sides, seconds)
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in built.items()}
    return [
        Row(
            shape,
            precision,
            threads,
            name,
            sizes.get(name.removesuffix(COMPILED), 0),
            len(times),
            quartiles([1000 * t for t in times]),
            quartiles([a / b for a, b in zip(times, taken[OURS], strict=True)]),
        )
        for name, times in taken.items()
    ]


def likeliest_alone(log_p: Tensor) -> Tensor:
    """Leave the likeliest token alone, which makes sampling greedy."""
    return log_p.masked_fill(log_p < log_p.amax(-1, keepdim=True), float("-inf"))


def generation(shape: str, threads: int, seconds: float, samples: int) -> list[Row]:
    """Time greedy generation from caches with equal weights; raises if the tokens differ."""
    prepare_process(MachineConfig(threads=threads))
    _, built = models(shape)
    peer = next(name for name in built if name.startswith("Hugging Face"))
    ours, theirs = (built[name].eval() for name in (OURS, peer))
    prompt = torch.randint(4, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(2))
    rows = prompt.expand(samples, -1)
    seeds = list(range(samples))

    def by_us() -> Tensor:
        return generate(ours, prompt.tolist(), seeds, likeliest_alone, count=NEW, window=LENGTH)

    def by_them() -> Tensor:
        out = theirs.model.generate(
            rows, attention_mask=torch.ones_like(rows), do_sample=False, max_new_tokens=NEW, eos_token_id=None
        )
        return out[:, PROMPT:]

    if not torch.equal(by_us(), by_them()):
        raise RuntimeError("both libraries have the same weights, and generate different tokens")
    taken = interleaved({OURS: taken_by(by_us), peer: taken_by(by_them)}, seconds)
    size = sum(p.numel() for p in ours.parameters())
    return [
        Row(
            shape,
            f"{samples} at a time",
            threads,
            name,
            size,
            len(times),
            quartiles([1000 * t / NEW for t in times]),
            quartiles([a / b for a, b in zip(times, taken[OURS], strict=True)]),
        )
        for name, times in taken.items()
    ]


def table(rows: Sequence[Row], what: str) -> Iterator[str]:
    """Markdown lines."""
    yield f"| shape | {what} | threads | side | parameters | ms | times ours | rounds |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        ms, ours = (
            "{1:.{d}f} ({0:.{d}f} to {2:.{d}f})".format(*v, d=d) for v, d in ((row.ms, 1), (row.ours, 2))
        )
        size = f"{row.parameters:,}" if row.parameters else ""
        own = "" if row.side == OURS else ours
        yield (
            f"| {row.shape} | {row.precision} | {row.threads} | {row.side} | {size} | {ms} | {own} "
            f"| {row.rounds} |"
        )


def where_time_goes(shape: str, precision: str) -> Iterator[str]:
    """Markdown lines: the operators that take most of a step on one thread, on each eager side."""
    prepare_process(MachineConfig(threads=1))
    _, built = models(shape)
    ids = torch.randint(4, VOCAB, (ROWS, LENGTH + 1))
    sides = {name: partial(stepper(model, precision), ids) for name, model in built.items()}
    yield from profiled(f"{shape}, {precision}, ms of a step", sides)


def about(precisions: Sequence[str]) -> str:
    """Size and machine in words."""
    config = config_of("GPT-2").model
    flops = sum(6 * m * k * n for m, k, n in products(config, VOCAB, ROWS * LENGTH))
    left = "" if "bf16" in precisions else "; this processor multiplies no bf16, so that is left out"
    return (
        f"{config.decoder_layers} layers, d {config.dim}, {config.heads} heads, context {LENGTH}, vocabulary "
        f"{VOCAB}, batch {ROWS}: {flops / 1e9:.0f} GFLOP of matrix products a step (GPT-2); medians with "
        f"quartiles; {machine()}, {torch.backends.cpu.get_cpu_capability()}{left}"
    )


def main() -> None:
    """Measure, print the tables, write them when asked."""
    parser = argparse.ArgumentParser(description="A decoder's training step and generation, beside peers.")
    precisions = ["fp32", "bf16"] if best_precision("cpu") == "bf16" else ["fp32"]
    every = usable_cores()
    parser.add_argument("--seconds", type=float, default=30.0, help="for each setting")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, every}))
    parser.add_argument("--precisions", nargs="+", default=precisions)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--compiled-threads", type=int, nargs="*", help="those of compiled sides (all, unless given)"
    )
    parser.add_argument(
        "--write",
        nargs="?",
        const="decoder",
        metavar="NAME",
        help="write benchmarks/results/NAME.json and .md",
    )
    args = parser.parse_args()
    rows, generated, lines = list[Row](), list[Row](), list[str]()
    for shape in args.shapes:
        for threads in args.threads:
            for precision in args.precisions:
                compiled = args.compiled_threads is None or threads in args.compiled_threads
                found = steps(shape, precision, threads, args.seconds, compiled=compiled)
                print(*list(table(found, "precision"))[2:], sep="\n", flush=True)
                rows += found
            for samples in (1, ROWS):
                found = generation(shape, threads, args.seconds / 8, samples)
                print(*list(table(found, "outputs"))[2:], sep="\n", flush=True)
                generated += found
        lines += [*where_time_goes(shape, args.precisions[-1]), ""]
    text = "\n".join(
        [
            *(about(args.precisions), "", "## A training step", "", *table(rows, "precision"), ""),
            *(f"## {NEW} tokens after {PROMPT}, ms a token", "", *table(generated, "outputs"), ""),
            *("## Where a step's time goes, on one thread", "", *lines),
        ]
    )
    print(*lines, sep="\n")
    if args.write:
        content = {
            "about": about(args.precisions),
            "steps": [asdict(row) for row in rows],
            "generation": [asdict(row) for row in generated],
            "profile": lines,
        }
        (RESULTS / f"{args.write}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (RESULTS / f"{args.write}.md").write_text(f"# A decoder\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()

"""Beam search against Hugging Face's ``generate`` with the same weights, interleaved in one process.

A Marian-shaped Transformer-small with random weights, whose outputs all run to their limit: both sides make
the same number of steps, and ours does not gain from leaving out what has ended. That outputs are the same is
shown by ``tests/oracles/test_marian.py``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from normlab.lab.config import MachineConfig
from normlab.lab.training.devices import autocast, prepare_process
from normlab.nn.decode import Bounds, search
from peers import like_marian, marian
from step import CPU, SETTINGS, VOCAB, machine, quartiles

RESULTS = Path(__file__).parent / "results"
BEAMS, RATIO = 5, 0.5
Outputs = list[list[int]]


@dataclass(frozen=True)
class Row:
    """One side; quartiles over batches."""

    precision: str
    threads: int
    side: str
    sentences: int
    per_second: float
    mean_length: float
    slower: tuple[float, float, float]
    """Its time over ours on the same batch: above 1, ours is faster."""


def peer() -> nn.Module:
    """Weights large enough that an output depends on its source."""
    model = marian(SETTINGS["small"].config("post"), VOCAB).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "embed_positions" not in name:
                p.copy_(torch.randn(p.shape, generator=generator) * (2 / p.shape[1]) ** 0.5)
    return model


def sources(sentences: int) -> list[Tensor]:
    """Batches `[B, S]`, all tokens of which are real, of about the lengths of captions: both sides then have
    the same limit of outputs.
    """
    generator = torch.Generator().manual_seed(7)
    made = []
    for length in (24, 20, 17, 15, 13, 12, 10, 8):
        ids = torch.randint(4, VOCAB, (sentences, length), generator=generator)
        ids[:, -1] = 3
        made.append(ids)
    return made


def sides(model: nn.Module) -> dict[str, Callable[[Tensor], Outputs]]:
    """Each side's best outputs, without EOS and what follows it."""
    ours = like_marian(model, SETTINGS["small"].config("post"), VOCAB)

    def by_us(source: Tensor) -> Outputs:
        return [found[0].ids for found in search(ours, source, Bounds(RATIO), beams=BEAMS)]

    def by_marian(source: Tensor) -> Outputs:
        with torch.inference_mode():
            found = model.generate(
                source,
                attention_mask=torch.ones_like(source),
                num_beams=BEAMS,
                early_stopping=True,
                length_penalty=1.0,
                max_new_tokens=int(source.shape[1] * RATIO) + 10,
            )
        rows = [row[1:] for row in found.tolist()]
        return [row[: row.index(3)] if 3 in row else [t for t in row if t] for row in rows]

    return {"normlab": by_us, "Marian": by_marian}


def measure(model: nn.Module, precision: str, threads: int, batches: list[Tensor], rounds: int) -> list[Row]:
    """Each side's time on each batch, whose turn is first alternating."""
    prepare_process(MachineConfig(threads=threads))
    searching = sides(model)
    taken: dict[str, list[float]] = {name: [] for name in searching}
    lengths: dict[str, list[int]] = {name: [] for name in searching}
    for i, source in enumerate([batches[-1], *batches * rounds]):
        for name in sorted(searching, reverse=bool(i % 2)):
            with autocast(CPU, precision):
                start = time.perf_counter()
                found = searching[name](source)
            if i:  # the first one warms up
                taken[name].append(time.perf_counter() - start)
                lengths[name] += map(len, found)
    return [
        Row(
            precision,
            threads,
            name,
            len(lengths[name]),
            len(lengths[name]) / sum(taken[name]),
            sum(lengths[name]) / len(lengths[name]),
            quartiles([a / b for a, b in zip(taken[name], taken["normlab"], strict=True)]),
        )
        for name in searching
    ]


def main() -> None:
    """Measure, print the table, write it when asked."""
    parser = argparse.ArgumentParser(description="Beam search against Hugging Face's generate.")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--sentences", type=int, default=40, help="of a batch; there are eight")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/search.json and .md")
    args = parser.parse_args()
    model, batches = peer(), sources(args.sentences)
    lines = [
        f"Transformer-small, beam {BEAMS}, {args.sentences} sentences a batch, V {VOCAB}; {machine()}",
        "",
        "| precision | threads | side | sentences | sentences/s | mean length | times ours |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = []
    for threads in args.threads:
        for precision in args.precisions:
            rows += measure(model, precision, threads, batches, args.rounds)
    for r in rows:
        low, middle, high = r.slower
        lines.append(
            f"| {r.precision} | {r.threads} | {r.side} | {r.sentences} | {r.per_second:.1f} "
            f"| {r.mean_length:.1f} | {middle:.2f} ({low:.2f} to {high:.2f}) |"
        )
    print(*lines, sep="\n")
    if args.write:
        content = {"about": lines[0], "rows": [asdict(row) for row in rows]}
        (RESULTS / "search.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "search.md").write_text("\n".join(["# Beam search", "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()

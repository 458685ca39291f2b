"""Forward and backward pass of every norm, and of its plain form, against ``torch.nn.LayerNorm``.

Interleaved in one process. The input is a leaf, so a time has the copy of its gradient in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from normlab.lab.config import MachineConfig
from normlab.lab.training.devices import prepare_process
from normlab.nn import Norm, reference
from step import machine, profiled, quartiles

RESULTS = Path(__file__).parent / "results"
PEER = "torch.nn.LayerNorm"


def passes(norm: nn.Module, x: Tensor, grad: Tensor, *, plainly: bool) -> Callable[[], float]:
    """One forward and one backward pass; its milliseconds."""

    def once() -> float:
        x.grad = None
        norm.zero_grad()
        start = time.perf_counter()
        with reference() if plainly else nullcontext():
            norm(x).backward(grad)
        return 1000 * (time.perf_counter() - start)

    return once


def measure(rows: int, dim: int, threads: int, rounds: int) -> list[dict[str, object]]:
    """Quartiles of each in ms, and of its time over the peer's in the same round."""
    prepare_process(MachineConfig(threads=threads))
    x, grad = torch.randn(rows, dim, requires_grad=True), torch.randn(rows, dim)
    sides = {PEER: passes(nn.LayerNorm(dim), x, grad, plainly=False)}
    for name, kind in Norm.registry.items():
        sides[name] = passes(kind(dim), x, grad, plainly=False)
        sides[f"{name}, plain"] = passes(kind(dim), x, grad, plainly=True)
    taken = {name: [once() for _ in range(3)][:0] for name, once in sides.items()}
    names = list(sides)
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(sides[name]())
    return [
        {
            "norm": name,
            "threads": threads,
            "ms": quartiles(times),
            "of_peer": quartiles([a / b for a, b in zip(times, taken[PEER], strict=True)]),
        }
        for name, times in taken.items()
    ]


PASSES = 20
"""Passes of which a profile is taken together."""


def where_time_goes(rows: int, dim: int) -> Iterator[str]:
    """Markdown lines: the operators of each norm that is no LayerNorm, on one thread."""
    prepare_process(MachineConfig(threads=1))
    x, grad = torch.randn(rows, dim, requires_grad=True), torch.randn(rows, dim)
    kinds = {PEER: nn.LayerNorm, **{name: Norm.registry[name] for name in ("rmsnorm", "dyt", "derf")}}
    sides = {name: passes(kind(dim), x, grad, plainly=False) for name, kind in kinds.items()}
    many = {name: partial(repeated, once) for name, once in sides.items()}
    yield from profiled(f"ms of {PASSES} passes each way, one thread", many, most=16)


def repeated(once: Callable[[], float]) -> None:
    """Do a pass each way ``PASSES`` times."""
    for _ in range(PASSES):
        once()


def main() -> None:
    """Measure, print the table, write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/norms.json and .md")
    args = parser.parse_args()
    found = [row for t in args.threads for row in measure(args.rows, args.dim, t, args.rounds)]
    lines = [
        f"{args.rows} x {args.dim}, fp32, {args.rounds} rounds; medians with quartiles; {machine()}",
        "",
        f"| norm | threads | forward and backward, ms | of {PEER} |",
        "| --- | --- | --- | --- |",
    ]
    for row in found:
        ms, share = ("{1:.2f} ({0:.2f} to {2:.2f})".format(*row[key]) for key in ("ms", "of_peer"))
        lines.append(f"| {row['norm']} | {row['threads']} | {ms} | {share} |")
    lines += ["", *where_time_goes(args.rows, args.dim)]
    print(*lines, sep="\n")
    if args.write:
        content = {"about": lines[0], "rows": found}
        (RESULTS / "norms.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "norms.md").write_text("\n".join(["# Norms", "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()

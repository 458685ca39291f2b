"""The rank table: one global batch spread over micro-batches and processes, against one batch in one process.

    python benchmarks/ranks.py             # print the table
    python benchmarks/ranks.py --write     # and put it into docs/ranks.md

A global batch has 4096 positions. The first row computes them as one batch; the others as two micro-batches
of 2048, which hold the same sentences: one after the other, on two gloo ranks with the model on each, and on
two with half of it on each. Dropout is 0. The difference is that of the summed gradient: of each parameter in
the L2 norm relative to the L2 norm of the first row's gradient, and of those the largest. Seconds are the
median of whole optimizer steps, one thread a process; they want a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normlab.lab.config import Config, DataConfig, MachineConfig, ModelConfig, TrainConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.tasks import TASKS
from normlab.lab.training.devices import hardware, prepare_process
from normlab.lab.training.ranks import SINGLE_PROCESS, Ranks, join_processes
from normlab.lab.training.trainer import Trainer

PAGE = Path(__file__).parents[1] / "docs/ranks.md"
BEGIN, END = "<!-- table: benchmarks/ranks.py --write -->", "<!-- end of table -->"
PLACEMENTS = ("post", "pre", "admin", "rezero", "deepnorm")
WHOLE, TURNS = "1 x 4096", "accumulation, 2 x 2048"
COPIED, SHARDED = "2 ranks x 2048, DDP", "2 ranks x 2048, sharded"
POSITIONS, WARM, STEPS = 2048, 1, 5
TINY = torch.finfo(torch.float32).tiny
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Measured:
    """The whole gradient by parameter and the micro-batches' own, its loss, and seconds of a step."""

    gradients: dict[str, Tensor]
    loss: float
    seconds: float


def config_of(placement: str, *, shard: bool = False) -> Config:
    """A recipe in steps of two micro-batches."""
    machine = MachineConfig(threads=1, probes="", shard=shard)
    base = Config(
        model=ModelConfig(dim=128, ffn_dim=512, dropout=0.0),
        data=DataConfig(builtin_pairs=4000, vocab_size=4000),
        train=TrainConfig(max_tokens=POSITIONS, grad_accum_steps=2, steps=100),
        machine=machine,
    )
    return replace(resolve(placement, base), machine=machine)


def trainer_of(config: Config, root: Path, ranks: Ranks = SINGLE_PROCESS) -> Trainer:
    """A trainer at its start."""
    kind = TASKS[config.task]
    with ranks.main_first():
        data, corpus = kind.prepare(config.data, root / "data")
    return Trainer(kind(replace(config, data=data), corpus, CPU), ranks)


def measured(trainer: Trainer) -> Measured:
    """The first step's gradient, then steps by the clock."""
    found: dict[str, Tensor] = {}
    whole: Callable[[], Any] = trainer.optimizer.step

    def look() -> None:
        for index, (name, part) in enumerate(trainer.parallel.parts.items()):
            assert part.grad is not None
            found[name] = trainer.parallel.whole(index, part.grad).clone()

    trainer.optimizer.step = look  # pyrefly: ignore
    loss = trainer.step().values[0].item()
    trainer.optimizer.step = whole  # pyrefly: ignore
    return Measured(found, loss, seconds_of(trainer.step))


def seconds_of(step: Callable[[], object]) -> float:
    """Median of a call."""
    taken = []
    for _ in range(WARM + STEPS):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[WARM:])


def at_once(trainer: Trainer) -> Measured:
    """Both micro-batches as one batch of 4096 positions, rows padded to the widest."""
    batches = [trainer.task.batch(i) for i in range(2)]

    def rows(name: str) -> Tensor:
        rows = [row for batch in batches for row in getattr(batch, name)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    sides = {name: rows(name) for name in ("source", "target_in", "target_out")}
    batch = replace(batches[0], **sides, tokens=sum(b.tokens for b in batches))

    def gradient() -> float:
        trainer.model.train()
        loss = trainer.task.loss(trainer.model, batch).loss / batch.tokens
        loss.backward()
        return loss.item()

    def step() -> None:
        gradient()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)

    loss = gradient()
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.optimizer.zero_grad(set_to_none=True)
    return Measured(found, loss, seconds_of(step))


def work(rank: int, root: str, port: int) -> None:
    """One rank: measure every placement, whole on both ranks and in halves; rank 0 writes the results."""
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    prepare_process(MachineConfig(threads=1))
    with join_processes(CPU) as (ranks, _):
        for placement in PLACEMENTS:
            for name, shard in ((COPIED, False), (SHARDED, True)):
                seen = measured(trainer_of(config_of(placement, shard=shard), Path(root), ranks))
                ranks.on_main(torch.save, vars(seen), Path(root, f"{placement} {name}"))


def difference(found: Measured, wanted: Measured) -> float:
    """Largest relative one of a parameter's gradient."""
    both = ((found.gradients[name], g) for name, g in wanted.gradients.items())
    return max(float((a - b).norm() / b.norm().clamp(min=TINY)) for a, b in both)


def table(root: Path) -> list[str]:
    """Lines of markdown."""
    prepare_process(MachineConfig(threads=1))
    rows: dict[str, list[str]] = {name: [] for name in (WHOLE, TURNS, COPIED, SHARDED)}
    alone = {p: tuple(row(trainer_of(config_of(p), root)) for row in (at_once, measured)) for p in PLACEMENTS}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, args=(str(root), port), nprocs=2)
    for placement, (whole, turns) in alone.items():
        files = (root / f"{placement} {name}" for name in (COPIED, SHARDED))
        spread = [Measured(**torch.load(file, weights_only=True)) for file in files]
        rows[WHOLE].append(f"0, {whole.seconds:.2f} s")
        for name, seen in zip((TURNS, COPIED, SHARDED), (turns, *spread), strict=True):
            rows[name].append(f"{difference(seen, whole):.1e}, {seen.seconds:.2f} s")
    return [
        f"| | {' | '.join(PLACEMENTS)} |",
        f"| --- | {' | '.join('---' for _ in PLACEMENTS)} |",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()),
        "",
        f"Width 128, 3 + 3 layers. {hardware(CPU)}, of each process.",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write it where that is asked for."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--write", action="store_true", help=f"put it into {PAGE.name}")
    wanted = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        lines = table(Path(folder))
    print("\n".join(lines))
    if wanted.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
        PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{after}"]), encoding="utf-8")


if __name__ == "__main__":
    main()

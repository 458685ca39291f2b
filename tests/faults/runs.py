"""Runs of half a second that are killed and gone on with, and what must not depend on that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from normlab.data.builtin import generate
from normlab.data.text import Pairs
from normlab.run.recipes import resolve
from normlab.spec.config import (
    Config,
    DataConfig,
    DecodeConfig,
    MachineConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from normlab.store import RunFolder
from run.tiny import NAMES

RECIPES = (
    ("post+warmup", 1, "fp32"),
    ("pre+scalenorm+fixnorm", 2, "bf16"),
    ("admin+warmup", 3, "fp32"),
    ("rezero", 1, "bf16"),
    ("pre+radam", 2, "fp32"),
    ("pre+val_decay", 3, "bf16"),
    ("enc:post/dec:pre+warmup", 1, "fp32"),
)
"""Recipe, accumulation, precision."""


class Server:
    """``faults.server`` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, task: str, **more: Any) -> int:
        """What became of a task: 0, or the signal that ended it."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"do": task, **more}) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, "the server is gone"
        return int(answer)


@contextmanager
def serving(said: Path) -> Generator[Server]:
    """A server; what it and its children say goes to a file."""
    tests = str(Path(__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "faults.server"]
    with (
        said.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()


def write_text(folder: Path) -> DataConfig:
    """Eighty pairs of written-out numbers to train on, the three shortest each for dev and test."""
    folder.mkdir(parents=True)
    splits = generate("numbers-de-en", pairs=80, seed=0)
    texts = (*(splits.train.source, splits.train.target), *_short(splits.dev), *_short(splits.test))
    paths = {name: str(folder / f"{name}.txt") for name in NAMES}
    for name, lines in zip(NAMES, texts, strict=True):
        Path(paths[name]).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return DataConfig(**paths, vocab_size=60, word_dropout=0.1)


def _short(pairs: Pairs) -> tuple[tuple[str, ...], ...]:
    """Translating them takes no time."""
    both = sorted(zip(pairs.source, pairs.target, strict=True), key=lambda pair: len(pair[1]))
    return tuple(zip(*both[:3], strict=True))


def configuration(data: DataConfig, recipe: str, accumulation: int, precision: str) -> Config:
    """2+2 layers of width 16, 14 steps, a checkpoint every 3, rows and validations at another pace."""
    train = TrainConfig(
        steps=14,
        max_tokens=200,
        validate_every_steps=4,
        dev_bleu_sentences=3,
        accumulation=accumulation,
        precision=precision,
    )
    base = Config(
        model=ModelConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.1),
        data=data,
        optim=OptimConfig(lr=5e-3, schedule="constant", warmup_steps=4, decay_step=5, decay_patience=1),
        train=train,
        decode=DecodeConfig(beam=2, max_len_ratio=1.0),
        machine=MachineConfig(
            threads=1, log_every_steps=2, checkpoint_every_steps=3, probes="full", probe_every_steps=2
        ),
    )
    return resolve(recipe, base)


def outcome(run: RunFolder) -> dict[str, Any]:
    """All that must be the same, bit by bit, however often a run was killed."""
    names = ("last/model.safetensors", "last/optimiser.safetensors", "best/model.safetensors")
    files = (*names, "probes.jsonl", "test.hyp.txt", "scores.json")
    state = json.loads((run.last / "state.json").read_text())
    best = json.loads((run.best / "state.json").read_text())
    return {
        **{name: (run.path / name).read_bytes() for name in files},
        "metrics": [_timeless(row) for row in map(json.loads, _lines(run.path / "metrics.jsonl"))],
        "last": {key: state[key] for key in state.keys() - {"seconds", "seal"}},
        "best": {key: best[key] for key in best.keys() - {"seal"}},
        "status": replace(run.status(), train_seconds=0.0),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if repr(one[name]) != repr(other[name])]


def _lines(path: Path) -> Iterator[str]:
    yield from path.read_text().splitlines()


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "seconds"}

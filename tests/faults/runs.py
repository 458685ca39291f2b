"""Runs of half a second that are killed and then continued, and what must not depend on that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.training.tiny import NAMES
from normlab.lab.config import (
    Config,
    DataConfig,
    DecodeConfig,
    MachineConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from normlab.lab.data.builtin import generate
from normlab.lab.data.text import Pairs
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs import RunFolder


@dataclass(frozen=True)
class Case:
    """A run that is killed."""

    recipe: str
    grad_accum_steps: int
    precision: str
    changes: tuple[tuple[str, object], ...] = ()
    """A field of the configuration, such as ``train.steps``, and its value."""
    leaves: str = "scores.json"
    """A file that such a run has."""


KEEP_LOG = ("machine.keep_checkpoints", "log")
CASES = (
    Case("post+warmup", 1, "fp32"),
    Case("pre+scalenorm+fixnorm", 2, "bf16", (("train.ema_decay", 0.9),)),
    Case("admin+warmup", 3, "fp32", (("train.average_last", 2), KEEP_LOG), "steps/8/model.safetensors"),
    Case("rezero", 1, "bf16", (("train.average_last", 3),), "average/model.safetensors"),
    Case("pre+radam", 2, "fp32", (("train.ema_decay", 0.5), ("train.early_stopping_patience", 2))),
    Case("pre+val_decay", 3, "bf16", (KEEP_LOG,), "steps/14/model.safetensors"),
    Case("enc:post/dec:pre+warmup", 1, "fp32"),
    Case("post", 1, "fp32", (("optim.lr", 300.0),), "flight.json"),
)
"""The last one diverges, and the flight recorder tells why."""


class Server:
    """``faults.server`` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, task: str, **more: Any) -> int:
        """Do a task; return 0, or the signal that ended it."""
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
    """The three pairs with the shortest targets: translating them takes no time."""
    both = sorted(zip(pairs.source, pairs.target, strict=True), key=lambda pair: len(pair[1]))
    return tuple(zip(*both[:3], strict=True))


def configuration(data: DataConfig, case: Case) -> Config:
    """2+2 layers of width 16, 14 steps, a checkpoint every 3, rows and validations at another pace."""
    base = Config(
        model=ModelConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.1),
        data=data,
        optim=OptimConfig(lr=5e-3, schedule="constant", warmup_steps=4, decay_step=5, decay_patience=1),
        train=TrainConfig(
            steps=14,
            max_tokens=200,
            validate_every_steps=4,
            dev_decode_sentences=3,
            grad_accum_steps=case.grad_accum_steps,
            precision=case.precision,
        ),
        decode=DecodeConfig(beam=2, max_len_ratio=1.0),
        machine=MachineConfig(
            threads=1, log_every_steps=2, checkpoint_every_steps=3, probes="full", probe_every_steps=2
        ),
    )
    config = resolve(case.recipe, base)
    for name, value in case.changes:
        part, field = name.split(".")
        config = replace(config, **{part: replace(getattr(config, part), **{field: value})})
    return config


def outcome(run: RunFolder) -> dict[str, object]:
    """Every file of a run without what only the clock decides.

    Left out are its lock, its log, the checkpoint before the last one, and the parts that a killed write
    left, whose names begin with a dot.
    """
    found = {path.relative_to(run.path): path for path in run.path.rglob("*") if path.is_file()}
    return {
        str(name): _timeless(path)
        for name, path in sorted(found.items())
        if name.parts[0] not in {"lock", "log.txt", "previous"} and not name.name.startswith(".")
    }


def differences(one: dict[str, object], other: dict[str, object]) -> list[str]:
    """Files that only one has, or that differ."""
    return sorted(name for name in one.keys() | other.keys() if repr(one.get(name)) != repr(other.get(name)))


def _timeless(path: Path) -> object:
    if path.name in {"state.json", "status.json"}:
        return _without_clock(json.loads(path.read_text()))
    if path.name == "metrics.jsonl":
        return [_without_clock(json.loads(line)) for line in path.read_text().splitlines()]
    return path.read_bytes()


def _without_clock(row: dict[str, object]) -> dict[str, object]:
    """A state's manifest, and the sizes of its rows, depend on the digits of ``seconds``."""
    kept = sorted(row.keys() - {"seconds", "train_seconds", "manifest", "sizes"})
    return {key: _without_clock(v) if isinstance(v := row[key], dict) else v for key in kept}

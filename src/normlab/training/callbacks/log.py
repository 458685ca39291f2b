"""A run's log: the facts that are needed to repeat it, and a line for each validation."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final, final

import torch
from torch import nn

from normlab.config.config import SEMANTICS, Config
from normlab.config.io import to_json
from normlab.config.units import duration
from normlab.data.hub import HUB
from normlab.data.sources import file_of, open_lines
from normlab.data.vocabulary import LEARNED
from normlab.runs.files import regular
from normlab.runs.folder import RunFolder, Status
from normlab.tasks.registry import TASKS
from normlab.training.callbacks.base import Callback, Event
from normlab.training.devices import hardware
from normlab.training.recipes.grammar import describe

_TEXT: Final = ("tokenizers", "sentencepiece", "sacremoses", "sacrebleu")
PACKAGES: Final = ("torch", "numpy", *_TEXT, "safetensors")
VARIABLES: Final = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "RAYON_", "TOKENIZERS_", "MALLOC_", "LD_PRELOAD"),
    *("TORCH_", "PYTORCH_", "ATEN_", "ONEDNN_", "DNNL_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_TF32", "NCCL_", "GLOO_"),
    *("NORMLAB_", "PYTHONHASHSEED", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
)
"""Prefixes of environment variables that can change speed or numbers."""


@final
class Log(Callback):
    """Writes to ``log.txt`` of one run folder.

    The log names paths and the machine. It stays where the run was made: ``tools/keep.py`` leaves it behind.
    """

    def __init__(self, folder: RunFolder, facts: Callable[[], list[str]]) -> None:
        self._folder, self._facts = folder, facts

    def on_event(self, event: Event) -> None:
        if event.began:
            begun = f"goes on from step {event.step:,}" if event.step else "starts"
            self._write([f"=== {_now()} {self._folder.id()} {begun}", *self._facts()])
        for row in event.rows if event.validated else ():
            others = ("kind", "step", "seconds")
            scores = ", ".join(f"{name} {value:.4g}" for name, value in row.items() if name not in others)
            self._write([f"step {row['step']:,}: dev {scores}, after {duration(row['seconds'])}"])
        if event.ended:
            self._write([f"=== {_now()} {_end(self._folder.status())}"])

    def _write(self, lines: Sequence[str]) -> None:
        # a path may hold bytes that are not UTF-8
        with open(self._folder.log, "a", encoding="utf-8", errors="backslashreplace", opener=regular) as file:
            file.write("".join(f"{line}\n" for line in lines))


def _end(status: Status) -> str:
    outcome = status.outcome
    said = f"{outcome.state}: {outcome.evidence}" if outcome else "no outcome"
    stopped = f"; stopped because {status.stopped}" if status.stopped else ""
    return f"ended at step {status.step:,}, {said}{stopped}"


def facts(folder: RunFolder, config: Config, model: nn.Module, device: torch.device) -> list[str]:
    """The facts that are needed to repeat a run, one a line."""
    seeds, data = config.seeds, config.data
    texts = {field: spec for field in TASKS[config.task].texts if (spec := getattr(data, field))}
    packages = (*PACKAGES, *(["datasets"] if any(spec.startswith(HUB) for spec in texts.values()) else []))
    variables = sorted(name for name in os.environ if name.startswith(VARIABLES))
    found = {
        "repeat": folder.repeat_command(),
        "directory": str(Path.cwd()),
        "recipe": f"{config.recipe}: {describe(config)}",
        "forced": config.forced,
        "normlab": f"{version('normlab')}, semantics {SEMANTICS}{_commit()}",
        "python": f"{platform.python_version()}, {platform.platform()}",
        "packages": ", ".join(f"{name} {version(name)}" for name in packages),
        "hardware": f"{hardware(device)}; {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
        "precision": config.train.precision,
        "environment": " ".join(f"{name}={shlex.quote(os.environ[name])}" for name in variables),
        "seeds": f"init {seeds.init}, data {seeds.data}, dropout {seeds.dropout}",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
    }
    found |= {field: _file(spec) for field, spec in texts.items()}
    if data.tokenizer not in LEARNED:
        found["tokenizer"] = _file(data.tokenizer)
    if not texts:
        found["text"] = f"built-in {data.builtin}, {data.builtin_pairs:,} pairs, seed {data.builtin_seed}"
    found |= {"data digest": data.digest, "config": to_json(config)}
    return [f"{name}: {value}" for name, value in found.items() if value]


def _file(spec: str) -> str:
    """The location of a text, with size and SHA-256 of the file that holds it."""
    path = file_of(open_lines(spec))
    if path is None:
        return spec
    with path.open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{spec}, {path.stat().st_size:,} bytes, sha256 {sha}"


def _commit() -> str:
    """The commit of these sources, and whether they were changed since; empty outside a repository."""
    package = Path(__file__).parents[2]

    def git(*words: str) -> str:
        command = ["git", "-C", str(package), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no", ".") else ""
        return f", commit {git('rev-parse', 'HEAD')}{changed}"
    return ""


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")

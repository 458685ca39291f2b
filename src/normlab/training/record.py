"""A run's log: everything that is needed to repeat it, and a line for each validation."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from normlab.data.hub import HUB, HubColumn
from normlab.data.sources import open_lines
from normlab.data.text import located
from normlab.data.vocabulary import LEARNED
from normlab.recipes.grammar import describe
from normlab.spec.config import SEMANTICS, Config, run_id
from normlab.spec.serialise import to_json
from normlab.spec.units import duration
from normlab.store.folder import RunFolder
from normlab.tasks.registry import TASKS
from normlab.training.devices import hardware

_TEXT: Final = ("tokenizers", "sentencepiece", "sacremoses", "sacrebleu")
PACKAGES: Final = ("torch", "numpy", *_TEXT, "safetensors")
VARIABLES: Final = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "RAYON_", "TOKENIZERS_", "MALLOC_", "LD_PRELOAD"),
    *("TORCH_", "PYTORCH_", "ATEN_", "ONEDNN_", "DNNL_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_TF32", "NCCL_", "GLOO_"),
    *("NORMLAB_", "PYTHONHASHSEED", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
)
"""Beginnings of the names of environment variables that can change speed or numbers."""


@dataclass(frozen=True)
class Record:
    """Writes to ``log.txt`` of one run folder.

    The log names paths and the machine. It stays where the run was made: ``tools/keep.py`` leaves it behind.
    """

    folder: RunFolder

    def start(self, config: Config, model: nn.Module, device: torch.device, *, step: int) -> None:
        """One block: when, from which step, and what to repeat it takes."""
        begun = f"goes on from step {step:,}" if step else "starts"
        self._write([f"=== {_now()} {run_id(config)} {begun}", *facts(self.folder, config, model, device)])

    def metrics(self, row: Mapping[str, Any]) -> None:
        """A line where the row is a validation's."""
        if row["kind"] == "dev":
            scores = {k: v for k, v in row.items() if k not in ("kind", "step", "seconds")}
            self._write([f"step {row['step']:,}: dev {_named(scores)}, after {duration(row['seconds'])}"])

    def probes(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: they are too many for a log."""

    def saved(self) -> None:
        """Nothing: every line is written at once."""

    def end(self) -> None:
        """How the run ended."""
        status = self.folder.status()
        outcome = status.outcome
        said = f"{outcome.state}: {outcome.evidence}" if outcome else "no outcome"
        stopped = f"; stopped because {status.stopped}" if status.stopped else ""
        self._write([f"=== {_now()} ended at step {status.step:,}, {said}{stopped}"])

    def _write(self, lines: Sequence[str]) -> None:
        with self.folder.log.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))


def facts(folder: RunFolder, config: Config, model: nn.Module, device: torch.device) -> list[str]:
    """What it takes to repeat a run, a line a fact."""
    seeds, data = config.seeds, config.data
    texts = {field: spec for field in TASKS[config.task].texts if (spec := getattr(data, field))}
    packages = (*PACKAGES, *(["datasets"] if any(spec.startswith(HUB) for spec in texts.values()) else []))
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
        "environment": " ".join(f"{name}={shlex.quote(value)}" for name, value in _environment()),
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
    """Where a text is, with size and SHA-256 of the file that it is in."""
    text = open_lines(spec)
    if isinstance(text, HubColumn):
        return spec
    path = located(text.path)
    with path.open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{spec}, {path.stat().st_size:,} bytes, sha256 {sha}"


def _commit() -> str:
    """The commit of the sources that run, and whether they were changed since; empty without a repository."""
    package = Path(__file__).parents[1]

    def git(*words: str) -> str:
        command = ["git", "-C", str(package), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no", ".") else ""
        return f", commit {git('rev-parse', 'HEAD')}{changed}"
    return ""


def _environment() -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES))


def _named(scores: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items())


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")

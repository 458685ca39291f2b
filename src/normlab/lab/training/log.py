"""What a run reports as it trains: its log, with the facts needed to repeat it, and TensorBoard."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import torch
from torch import nn

from normlab.base.files import regular, sha256_of
from normlab.base.io import to_json
from normlab.base.units import duration, printable
from normlab.errors import UserError
from normlab.lab.config import SEMANTICS, Config
from normlab.lab.data.sources import HUB, file_of, open_lines
from normlab.lab.data.vocabulary import LEARNED
from normlab.lab.recipes.grammar import describe
from normlab.lab.runs.folder import Row, RunFolder
from normlab.lab.tasks import TASKS
from normlab.lab.training.devices import hardware
from normlab.lab.training.parts import RunContext, RunPart

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
class Log(RunPart):
    """Writes to ``log.txt`` of one run folder.

    The log names paths and the machine, so it stays where the run was made: ``tools/keep.py`` skips it.
    """

    def on_start(self, run: RunContext) -> None:
        self._folder = run.folder
        step = run.progress.step
        begun = f"goes on from step {step:,}" if step else "starts"
        lines = facts(run.folder, run.config, run.trainer.model, run.trainer.device)
        self._write([f"=== {_now()} {run.folder.id()} {begun}", *lines])

    def on_validation(self, row: Row) -> None:
        others = ("kind", "step", "seconds")
        scores = ", ".join(f"{name} {value:.4g}" for name, value in row.items() if name not in others)
        self._write([f"step {row['step']:,}: dev {scores}, after {duration(row['seconds'])}"])

    def on_end(self) -> None:
        status = self._folder.status()
        outcome = "no outcome"
        if status.outcome:
            outcome = f"{status.outcome.state}: {status.outcome.evidence}"
        stopped = f"; stopped because {status.stopped}" if status.stopped else ""
        self._write([f"=== {_now()} ended at step {status.step:,}, {outcome}{stopped}"])

    def _write(self, lines: Sequence[str]) -> None:
        # a path may hold bytes that are not UTF-8
        with open(self._folder.log, "a", encoding="utf-8", errors="backslashreplace", opener=regular) as file:
            file.write("".join(f"{line}\n" for line in lines))


def notice(folder: RunFolder, sentence: str) -> None:
    """Write a sentence to standard error and to the run's log; in a queue's worker, both are one file."""
    line = f"normlab: {printable(sentence)}\n"
    with contextlib.suppress(OSError):  # the terminal may be gone
        sys.stderr.write(line)
        sys.stderr.flush()
    with open(folder.log, "a", encoding="utf-8", errors="backslashreplace", opener=regular) as file:
        if not os.path.sameopenfile(file.fileno(), 2):
            file.write(line)


def facts(folder: RunFolder, config: Config, model: nn.Module, device: torch.device) -> list[str]:
    """Return the facts needed to repeat a run, one per line."""
    seeds, data = config.seeds, config.data
    fields = TASKS[config.task].texts
    texts = {field: getattr(data, field) for field in fields if getattr(data, field)}
    packages = list(PACKAGES)
    if any(spec.startswith(HUB) for spec in texts.values()):
        packages.append("datasets")
    variables = sorted(name for name in os.environ if name.startswith(VARIABLES))
    described = {
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
    described |= {field: _file(spec) for field, spec in texts.items()}
    if data.tokenizer not in LEARNED:
        described["tokenizer"] = _file(data.tokenizer)
    if not texts:
        described["text"] = f"built-in {data.builtin}, {data.builtin_pairs:,} pairs, seed {data.builtin_seed}"
    described |= {"data digest": data.digest, "config": to_json(config)}
    return [f"{name}: {value}" for name, value in described.items() if value]


def _file(spec: str) -> str:
    """Return the location of a text, with size and SHA-256 of the file that holds it."""
    path = file_of(open_lines(spec))
    if path is None or not path.is_file():
        return spec
    return f"{spec}, {path.stat().st_size:,} bytes, sha256 {sha256_of(path)}"


def _commit() -> str:
    """Return the commit of these sources and whether they have changed since; empty outside a repository."""
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


def require_tensorboard() -> None:
    """Raise UserError, with what to type, if the package is missing."""
    if find_spec("tensorboard") is None:
        raise UserError(
            "--tensorboard needs the package tensorboard, which is not installed; type: "
            "pip install 'normlab[tensorboard]', or leave --tensorboard out"
        )


@final
class TensorBoard(RunPart):
    """Writes scalars under ``runs/<id>/tensorboard``, at their steps: ``train/loss``, ``dev/nll`` and so on,
    and those of probes as ``<signal>.<statistic>/<module>``.

    A run that continues from a step begins a new file, which replaces the later scalars of the old one.
    """

    _writer: SummaryWriter | None = None

    def on_start(self, run: RunContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        step = run.progress.step
        self._writer = SummaryWriter(str(run.folder.tensorboard), purge_step=step + 1 if step else None)

    def on_row(self, row: Row) -> None:
        for name, value in row.items():
            if name not in ("kind", "step"):
                self._add(f"{row['kind']}/{name}", value, row["step"])

    on_validation = on_row

    def on_probes(self, rows: list[Row]) -> None:
        for row in rows:
            tag = f"{row['signal']}.{row['statistic']}/{row['module'] or 'model'}"
            self._add(tag, row["value"], row["step"])

    def on_checkpoint(self, step: int) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, tag: str, value: float, step: int) -> None:
        assert self._writer is not None
        self._writer.add_scalar(tag, float(value), int(step))

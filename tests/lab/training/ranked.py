"""Runs of the command line in processes of their own, under torchrun where the ranks are several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from normlab.base.io import to_json
from normlab.lab.config import Config
from normlab.lab.runs import RunFolder

TORCHRUN = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def command(config: Config, root: Path, ranks: int, *flags: str) -> list[str]:
    """``normlab train`` of a configuration, under torchrun where the ranks are several."""
    root.mkdir(parents=True, exist_ok=True)
    file = root / "config.json"
    file.write_text(to_json(config))
    starter = (*TORCHRUN, str(ranks), "-m") if ranks > 1 else (sys.executable, "-m")
    return [*starter, "normlab", "train", "--config", str(file), "--out", str(root), *flags]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def finish(config: Config, root: Path, ranks: int, *flags: str) -> RunFolder:
    """Train to the end; the run's folder."""
    words = command(config, root, ranks, *flags)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder_of(root)


def folder_of(root: Path) -> RunFolder:
    """The only run under a root."""
    (found,) = (RunFolder(path.parent) for path in root.glob("*/config.json"))
    return found

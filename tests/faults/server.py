"""A process that has everything ready, and does each task in a child that it forks and that may be killed.

A task is a JSON object a line, the answer one line: 0, the number of the signal, or another exit code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from faults.killing import Operations
from normlab.base.io import from_json
from normlab.lab.config import Config
from normlab.lab.training.checkpoint import save_checkpoint
from normlab.lab.training.parallel import SingleProcess
from normlab.lab.training.train import train
from zoo import Scalar


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        task = json.loads(line)
        if task.get("here"):  # so that all children have what is imported late
            _do(task)
            _answer(0)
        else:
            _answer(_forked(task))


def _answer(code: int) -> None:
    sys.stdout.write(f"{code}\n")
    sys.stdout.flush()


def _forked(task: dict[str, Any]) -> int:
    child = os.fork()
    if not child:
        _child(task)
    if "seconds" in task:
        time.sleep(task["seconds"])
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _child(task: dict[str, Any]) -> None:
    code = 1
    try:
        if "watch" in task:
            log = Path(task["log"]) if "log" in task else None
            Operations(Path(task["watch"]), at=task.get("at", -1), torn=task.get("torn", -1.0), log=log)
        _do(task)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _do(task: dict[str, Any]) -> None:
    if task["do"] == "train":
        train(from_json(Config, task["config"]), task["root"])
    else:
        _save(Path(task["root"]), task["step"])


def _save(run: Path, step: int) -> None:
    """A checkpoint of one number, which is its step."""
    model = Scalar(step)
    optimizer = torch.optim.Adam(model.parameters())
    model.x.sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.x.fill_(step)
    state = SingleProcess(model).state_dict(optimizer) | {"progress": {"step": step}}
    save_checkpoint(run / "last", state, run="it", previous=run / "previous")


if __name__ == "__main__":
    main()

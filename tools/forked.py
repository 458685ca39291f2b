"""Processes that begin with what takes seconds to import and with nothing of normlab's, forked from one."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    # torch imports its compiler when the first optimizer is made
    ["torch", "torch._dynamo", "scipy.stats", "transformers", "hypothesis", "pydantic", "tyro", "rich"]
)


def exit_code(
    target: Callable[..., None], *args: object, cwd: Path, env: Mapping[str, str], files: Sequence[Path]
) -> int | None:
    """How a process that calls a function ends; files are its standard input, output and error."""
    process = SERVER.Process(target=_call, args=(target, args, cwd, dict(env), files))
    process.start()
    process.join()
    return process.exitcode


def _call(
    target: Callable[..., None],
    args: Sequence[object],
    cwd: Path,
    env: Mapping[str, str],
    files: Sequence[Path],
) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    sys.stdin = os.fdopen(0)
    target(*args)

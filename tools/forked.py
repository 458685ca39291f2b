"""Processes forked from one that has imported what takes seconds to import, and nothing of normlab."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import subprocess
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
    """How a process that calls a function ends; files are its standard input, output and error.

    The process imports from where a fresh Python with this environment would, not from where its parent does.
    """
    path = _fresh_path(env.get("PYTHONPATH", ""))
    process = SERVER.Process(target=_call, args=(target, args, cwd, dict(env), path, files))
    process.start()
    process.join()
    return process.exitcode


@functools.cache
def _fresh_path(pythonpath: str) -> list[str]:
    """``sys.path`` of a fresh Python, without the entry of what it runs.

    A process that is forked gets its parent's, to which whatever the parent imported may have added folders:
    with ``benchmarks`` among them, ``import judging`` finds another module than in ``tests``.
    """
    environment = {**os.environ, "PYTHONPATH": pythonpath, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"]
    answer = subprocess.run(command, env=environment, capture_output=True, check=True)
    return json.loads(answer.stdout)


def _call(
    target: Callable[..., None],
    args: Sequence[object],
    cwd: Path,
    env: Mapping[str, str],
    path: Sequence[str],
    files: Sequence[Path],
) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:] = path
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    sys.stdin = os.fdopen(0)
    target(*args)

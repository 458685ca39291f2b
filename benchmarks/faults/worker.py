"""Judge one case after the other by one tool: a name comes in by line, its findings go out as JSON.

``run.py`` starts it by the Python of the environment in which the tool is installed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from dataclasses import asdict
from importlib import import_module, metadata
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch
from corpora import every_case

from corpus.public2.case import PublicCase

LIMIT_S = 120.0
"""Seconds of the processor that a tool has for one case; a machine that does much else takes none away."""


def too_slow(*_: object) -> None:
    """End a case whose time is over."""
    raise TimeoutError(f"not done in {LIMIT_S:.0f} s of the processor")


def judged(tool: Any, case: PublicCase) -> dict[str, Any]:
    """Return what a tool finds in a case, or the error that it ends with, and how long it took.

    ``seconds`` are the processor's, which a busy machine does not lengthen, ``wall`` those that passed.
    """
    found, error = [], ""
    begun, begun_wall = time.process_time(), time.perf_counter()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        found = [asdict(finding) for finding in tool.findings(case)]
    except Exception as raised:
        error = f"{type(raised).__name__}: {str(raised)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    seconds = round(time.process_time() - begun, 2)
    wall = round(time.perf_counter() - begun_wall, 2)
    return {"findings": found, "error": error, "seconds": seconds, "wall": wall}


def main(name: str) -> None:
    """Answer each name that comes in until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a tool prints is no reply
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, too_slow)
    warnings.simplefilter("ignore")
    tool, cases = import_module(f"adapters.{name}"), every_case()
    ready = {"version": metadata.version(tool.PACKAGE)}
    replies.write(json.dumps(ready) + "\n")
    replies.flush()
    for line in sys.stdin:
        replies.write(json.dumps(judged(tool, cases[line.strip()])) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])

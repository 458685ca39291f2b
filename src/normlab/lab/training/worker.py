"""The child process of a queue: it reads one configuration per line and answers each with a line.

Its arguments are the folder of the runs and, if it trains them, the files of the user's own setups.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from normlab.base.files import regular
from normlab.base.io import from_json
from normlab.errors import UserError
from normlab.lab.config import Config, run_id
from normlab.lab.recipes.plugins import load_plugins
from normlab.lab.runs import RunBusyError, RunFolder
from normlab.lab.training.train import train

_BUSY_SECONDS = 2.0
_WATCH_SECONDS = 0.5


def main() -> int:
    """Train until standard input closes, or the queue sends SIGTERM or is gone; return the exit code.

    SIGTERM counts even if the queue's own process ignores it, since here the queue is its sender.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_stop_with, args=(os.getppid(),), daemon=True).start()
    try:
        load_plugins()
        _serve()
    except KeyboardInterrupt:
        return 130
    return 0


def _stop_with(parent: int) -> None:
    """Send this process SIGTERM once its parent is gone: nobody might look for it here."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _serve() -> None:
    answers = os.dup(1)
    (root, *references) = sys.argv[1:]
    for line in sys.stdin:
        answer = _answer(from_json(Config, line), Path(root), references)
        try:
            os.write(answers, f"{answer}\n".encode(errors="backslashreplace"))
        except BrokenPipeError:  # the queue's process is gone: nobody waits for answers
            return


def _print_into(log: Path) -> None:
    """Send what this process and the programs that it calls print to a run's log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8", opener=regular) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _answer(config: Config, root: Path, references: Sequence[str]) -> str:
    """Return "done" or, in one line, why not. Wait for any process that is training the same run."""
    while True:
        try:
            _print_into(RunFolder(root / run_id(config)).log)
            if references:
                from normlab.lab.training.own_runs import train_own
                from normlab.lab.training.own_setups import files_of

                train_own(config, root, files_of(references))
            else:
                train(config, root)
        except RunBusyError:
            time.sleep(_BUSY_SECONDS)
        except Exception as error:
            traceback.print_exc()
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            return " ".join(f"{kind}{error}".split())
        else:
            return "done"


if __name__ == "__main__":
    sys.exit(main())

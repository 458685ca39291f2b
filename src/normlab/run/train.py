"""From a configuration to a finished run folder."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from normlab.run.checkpoint import load_checkpoint
from normlab.run.devices import autocast, prepare_process, resolved_precision
from normlab.run.loop import AnyTask, Loop, Row
from normlab.spec.config import Config, run_id
from normlab.store.folder import RunFolder, write_json_atomic, write_text_atomic
from normlab.tasks.registry import TASKS
from normlab.tasks.task import Prepared


def train(config: Config, root: str | Path, on_row: Callable[[Row], None] = lambda row: None) -> RunFolder:
    """Train one configuration under ``root`` and score it on its test text; the run's folder.

    A run that is done is returned as it is, an interrupted one goes on from its last checkpoint. ``on_row``
    sees every metrics row as it is written. Ctrl-C saves a checkpoint and raises KeyboardInterrupt.

    Raises ValueError for a task that nobody registered or that cannot do what the configuration asks for.
    """
    kind = TASKS[config.task]
    kind.check(config)
    device = prepare_process(config.machine)
    root = Path(root)
    data, corpus = kind.prepare(config.data, root / "data")
    config = replace(resolved_precision(config), data=data)
    kind.check_text(config, corpus)
    folder = RunFolder(root / run_id(config))
    if folder.status().state == "done":
        return folder
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.lock():
        if folder.status().state == "done":  # by another process, a moment ago
            return folder
        _furnish(folder, config, corpus)
        try:
            with _polite_interrupt() as interrupted:
                loop = Loop(kind(config, corpus, device), folder, on_row)
                loop.run(interrupted)
            score_test(loop.task, folder, loop.model)
            folder.set_status(replace(folder.status(), state="done"))
        except KeyboardInterrupt:
            folder.set_status(replace(folder.status(), state="interrupted"))
            raise
        except Exception as error:
            folder.set_status(
                replace(folder.status(), state="failed", error=f"{type(error).__name__}: {error}")
            )
            raise
    return folder


def score_test(task: AnyTask, folder: RunFolder, model: nn.Module) -> None:
    """The best weights on the test text: ``scores.json``, and what the model wrote, if it writes."""
    load_checkpoint(folder.best, model)
    with autocast(task.device, task.config.train.precision):
        tested = task.test(model)
    if tested.lines is not None:
        write_text_atomic(folder.translations, "".join(f"{line}\n" for line in tested.lines))
    write_json_atomic(folder.scores, dict(tested.scores))


def _furnish(folder: RunFolder, config: Config, corpus: Prepared) -> None:
    """Give a new run folder what it needs without its corpus, the configuration last."""
    if not (folder.path / "config.json").exists():
        corpus.tokenizer.save(folder.tokenizer)
        np.save(folder.target_types, corpus.target_types, allow_pickle=False)
        RunFolder.create(folder.path, config)


@contextmanager
def _polite_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C, or a closed terminal, sets an event, so that the step in progress ends and is saved.

    The second one is at once.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        with contextlib.suppress(OSError):
            sys.stderr.write("\nsaving after this step; once more stops at once\n")

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield event
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)

"""The flight recorder, asked about a run that is over or interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from normlab.errors import UserError
from normlab.recipes.grammar import require_known
from normlab.store.folder import RunFolder
from normlab.store.sealed import standing, unsealed
from normlab.tasks.registry import TASKS
from normlab.training.callbacks.flight import WATCHED, Trigger
from normlab.training.checkpoint import has_checkpoint
from normlab.training.devices import prepare_process
from normlab.training.progress import made_of
from normlab.training.trainer import Loop


def examine(path: str | Path, step: int | None = None, *, watched: int = WATCHED) -> dict[str, Any]:
    """Do a run's steps again up to ``step``, or to its last one, and say which module went wrong first.

    It begins at the run's last checkpoint where that lies before ``step``, else at the start; every module is
    watched in the last ``watched`` steps. Nothing of the run changes but its ``flight.json``, which gets the
    report that is returned. Where losses do not come out as they were, the report says so and blames nobody.
    Raises UserError for a step that the run has not made, and where another process works at the run.
    """
    folder = RunFolder(path)
    config, made = folder.config(), folder.status().step
    stop = made if step is None else step
    if not 1 <= stop <= made:
        raise UserError(
            f"step is {stop}, and the run {folder.path} has made {made}; give one from 1 to {made}"
        )
    require_known(config)
    kind = TASKS[config.task]
    device = prepare_process(config.machine)
    _, corpus = kind.prepare(config.data, folder.path.parent / "data")
    with folder.lock(), TemporaryDirectory() as scratch:
        again, last = RunFolder(scratch), standing(folder.last)
        again.lost.touch()  # its rows stay where they are
        if has_checkpoint(folder.last) and made_of(unsealed(last, run=folder.id()), last).step < stop:
            shutil.copytree(last, again.last)
            if has_checkpoint(folder.best):  # a run that goes on looks whether it has it
                shutil.copytree(standing(folder.best), again.best)
            shutil.copy(folder.path / "config.json", again.path)
        loop = Loop(kind(config, corpus, device), again, lambda row: None)
        asked = Trigger("asked", stop, stop, f"asked about step {stop}")
        report = loop.recorder.report(asked, watched=watched, most=stop, history=folder.metrics())
        folder.add_flight(report | {"step": stop})
    return report

"""Measure the papers' artefacts, each by its study, a function of a ``Lab`` and the settings."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from normlab.errors import UserError
from normlab.lab.recipes.plugins import load_plugins
from normlab.lab.training.devices import hardware
from normlab.lab.training.jobs import Queue, threads_each
from normlab.papers.artefact import Artefact, Reproduction
from normlab.papers.lab import Lab, quiet
from normlab.papers.planning import FoldersByCell
from normlab.papers.trainings import LAPTOP, Scale


def reproduce(
    artefact: Artefact,
    root: Path,
    log: Callable[[str], None] = quiet,
    *,
    scale: Scale = LAPTOP,
    runs: FoldersByCell | None = None,
    queue: Callable[[Path], Queue] = Queue,
) -> Reproduction:
    """Run the study of an artefact with its settings. Text is prepared below ``root``; ``log`` gets each step
    as it is done; ``runs`` are its finished trainings at that scale (see ``plan``); a study that trains
    others does so in a ``queue``.

    Raises UserError for an artefact that has no study yet.
    """
    if not artefact.study:
        raise UserError(f"{artefact.id} has no study yet; `normlab papers` lists those that have one")
    start = time.perf_counter()
    folders = (folder for cell in (runs or {}).values() for folder in cell)
    began = [time.time(), *((folder.path / "config.json").stat().st_mtime for folder in folders)]
    lab = Lab(root, log, runs or {}, scale, queue)
    measured = artefact.study(lab, **artefact.settings_at(scale))
    seconds = time.perf_counter() - start
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    facts = {**measured.facts, "machine": hardware(torch.device("cpu")), "versions": versions}
    return Reproduction(
        artefact.id,
        measured.measures,
        measured.tables,
        facts,
        seconds,
        lab.missing(),
        scale,
        datetime.fromtimestamp(min(began), UTC).isoformat(timespec="seconds"),
    )


def _prepare_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    load_plugins()


def each(
    artefacts: Sequence[Artefact],
    root: Path,
    log: Callable[[str], None] = quiet,
    *,
    jobs: int = 1,
    until: float = math.inf,
) -> Iterator[tuple[Artefact, Callable[[], Reproduction]]]:
    """Yield artefacts, each with a function that gives its reproduction or raises what its study raised.

    With several ``jobs``, that many processes measure side by side with a share of the cores each, and
    artefacts come as they are done; those that measure time come last, one by one in this process. None is
    started after ``until``, a time of ``time.monotonic``.
    """
    together = [a for a in artefacts if not a.alone] if jobs > 1 and time.monotonic() <= until else []
    if together:
        threads = threads_each(jobs)
        pool = ProcessPoolExecutor(
            jobs, get_context("spawn"), initializer=_prepare_worker, initargs=(threads,)
        )
        with pool:
            futures = {pool.submit(reproduce, artefact, root, log): artefact for artefact in together}
            for future in as_completed(futures):
                if time.monotonic() > until:
                    for waiting in futures:
                        waiting.cancel()
                if not future.cancelled():
                    yield futures[future], future.result
    for artefact in artefacts:
        if artefact not in together and time.monotonic() <= until:
            yield artefact, partial(reproduce, artefact, root, log)

"""The places where runs are trained, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from normlab.config.config import MachineConfig
from normlab.errors import UserError, nearest
from normlab.training.jobs.process import Process, Worker


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(jobs: int) -> int:
    """Return the threads of each of so many processes side by side: an equal share of the usable cores."""
    return max(1, usable_cores() // jobs)


class Place(Protocol):
    """Machines that train runs side by side."""

    def share(self, jobs: int, machine: MachineConfig) -> tuple[int, int]:
        """Return how many runs are trained at the same time, and the threads of each.

        A number that is given, and not 0, stays.
        """
        ...

    def start(self, root: Path) -> Worker:
        """Return a new worker, which trains below ``root``."""
        ...


class Local:
    """Processes of this machine."""

    def share(self, jobs: int, machine: MachineConfig) -> tuple[int, int]:
        """One run for each usable core, or a single one on a GPU; an equal share of the cores for each."""
        jobs = jobs or (usable_cores() if machine.device == "cpu" else 1)
        return jobs, machine.threads or threads_each(jobs)

    def start(self, root: Path) -> Worker:
        return Process(root)


def _ray() -> Place:
    try:
        from normlab.training.jobs.ray import Ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("--on ray needs Ray; type: pip install 'normlab[cluster]'") from error
    return Ray()


PLACES: Final[Mapping[str, Callable[[], Place]]] = {"local": Local, "ray": _ray}


def place(name: str) -> Place:
    """Return the place of a name. Raises UserError for an unknown one, or where a library is missing."""
    if name not in PLACES:
        raise UserError(f"--on is {name!r}{nearest(name, PLACES)}")
    return PLACES[name]()

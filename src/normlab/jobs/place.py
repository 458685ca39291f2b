"""The places where runs are trained, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from normlab.errors import UserError, nearest
from normlab.jobs.process import Process, Worker
from normlab.spec.config import MachineConfig
from normlab.spec.request import CompareRequest, threads_each, usable_cores


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
        from normlab.jobs.ray import Ray
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


def placed(request: CompareRequest) -> CompareRequest:
    """Return a request whose runs at the same time, and threads of each, are those of its place."""
    machine = request.base.machine
    jobs, threads = place(request.on).share(request.jobs, machine)
    return replace(request, jobs=jobs, base=replace(request.base, machine=replace(machine, threads=threads)))

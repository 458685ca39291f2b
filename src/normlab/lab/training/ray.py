"""Workers on a Ray cluster: each run is a worker process on the node that Ray chooses for it.

Moritz et al. 2018 (arXiv 1712.05889).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, final

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a run without a GPU asks for none

import ray
from ray.exceptions import RayError

from normlab.base.io import from_json, to_json
from normlab.errors import UserError
from normlab.lab.config import Config, MachineConfig, run_id
from normlab.lab.recipes.plugins import ENVIRONMENT
from normlab.lab.training.jobs import Backend, DiedError, Process, Worker

_POLL_SECONDS, _REACH_SECONDS = 0.25, 10.0
SENT: Final = (ENVIRONMENT, "PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE", "NORMLAB_DATA")
"""Variables that a run inherits from the process that asks for it; all others are its node's."""


class Ray(Backend):
    """The Ray cluster at ``RAY_ADDRESS``, else the one running on this machine, else one that is started here
    and ends with this process.
    """

    def share(self, jobs: int, machine: MachineConfig) -> tuple[int, int]:
        """Return one thread for each run, and as many runs as the nodes' CPUs or GPUs have room for."""
        connect()
        threads, on_gpu = machine.threads or 1, machine.device.startswith("cuda")
        room = 0
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            resources = node["Resources"]
            room += int(resources.get("GPU", 0) if on_gpu else resources.get("CPU", 0) // threads)
        return jobs or max(1, room), threads

    def start(self, root: Path) -> Worker:
        connect()
        root.mkdir(parents=True, exist_ok=True)
        return _OnRay(root.resolve())


def connect() -> None:
    """Connect to a cluster, unless this process is connected. Raises UserError if that is impossible."""
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        _join(address)
    except (RayError, RuntimeError, ValueError, OSError) as error:
        which = f"to the Ray cluster at {address}, which RAY_ADDRESS names" if address else "to a Ray cluster"
        raise UserError(
            f"cannot connect {which}: {error}; start one with `ray start --head`, or unset RAY_ADDRESS for "
            "the one that runs here, or else a new one"
        ) from error


def _join(address: str) -> None:
    """Connect to the cluster; raise OSError at once if nobody answers at ``host:port``, where Ray itself
    would keep trying for many minutes.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), _REACH_SECONDS).close()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's handler ends the process


@final
class _OnRay(Worker):
    """Trains each configuration in an actor of its own, so that between two runs Ray can give its CPUs and
    GPU to others, and a run that waits for room does not hold resources.
    """

    def __init__(self, root: Path) -> None:
        self.root, self._stopped = root, threading.Event()

    def train(self, config: Config) -> str:
        """Train as a ``Worker`` does. Raises UserError if the node cannot train as this machine would."""
        sent = {name: os.environ[name] for name in SENT if name in os.environ}
        actor: Any = ray.remote(Host)
        host = actor.options(
            num_cpus=config.machine.threads or 1,
            num_gpus=1.0 if config.machine.device.startswith("cuda") else 0.0,
            max_concurrency=2,  # so that it can be interrupted while it trains
            max_restarts=0,
        ).remote(self.root, Path.cwd(), sent)
        try:
            with tempfile.NamedTemporaryFile(prefix=".shared-", dir=self.root) as mark:
                answer = host.refusal.remote(mark.name, to_json(config), run_id(config))
                refusal = self._wait(answer, self._give_up)
            if refusal:
                raise UserError(refusal)
            answered, reply = self._wait(host.train.remote(to_json(config)), host.interrupt.remote)
        except RayError as error:
            lines = str(error).strip().splitlines()
            raise DiedError(f"its node or its process was lost: {lines[0] if lines else error!r}") from error
        finally:
            ray.kill(host)
        if not answered:
            raise DiedError(reply)
        return reply

    def interrupt(self) -> None:
        self._stopped.set()

    def _wait(self, answer: Any, stop: Callable[[], object]) -> Any:
        """Wait for an answer; call ``stop`` again and again once this worker is interrupted."""
        while not ray.wait([answer], timeout=_POLL_SECONDS)[0]:
            if self._stopped.is_set():
                stop()
        return ray.get(answer)

    def _give_up(self) -> NoReturn:
        raise DiedError("it was stopped before the cluster had room for it")


class Host:
    """The actor on a node: it starts a worker process there, and passes on requests and answers.

    One method trains while another can interrupt it.
    """

    def __init__(self, root: Path, cwd: Path, sent: Mapping[str, str]) -> None:
        self._root, self._cwd, self._sent = root, cwd, sent
        self._lock, self._stopped = threading.Lock(), False
        self._process: Process | None = None

    def refusal(self, mark: str, config: str, run: str) -> str:
        """Return why this node cannot train a run as the process that asks for it would; empty if it can."""
        node = f"the node {socket.gethostname()} of the Ray cluster"
        if not Path(mark).exists():
            return f"{node} does not see {self._root}; put the runs on a file system that all nodes share"
        if not self._cwd.is_dir():
            return f"{node} has no {self._cwd}; type the command in a folder that all nodes share"
        if run_id(from_json(Config, config)) != run:
            return f"{node} has another version of normlab; install the same one on all nodes"
        return ""

    def train(self, config: str) -> tuple[bool, str]:
        """Return whether the worker process answered, and its answer or how it ended."""
        with self._lock:
            environment = {**os.environ, **self._sent}
            process = self._process = Process(self._root, cwd=self._cwd, environment=environment)
            if self._stopped:
                process.interrupt()
        try:
            return True, process.train(from_json(Config, config))
        except DiedError as died:
            return False, str(died)
        finally:
            process.close()

    def interrupt(self) -> None:
        with self._lock:
            if self._process and not self._stopped:
                self._process.interrupt()
            self._stopped = True

"""Ray as a place for the runs of ``normlab judge``: each is a shell on the node that Ray chooses for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError

from normlab.errors import UserError
from normlab.judging.runner import PATIENCE_SECONDS, PLACES, LocalProcess, Process, RunFolder
from normlab.lab.training.ray import SENT, connect

STOPPED_SECONDS: Final = 4 * PATIENCE_SECONDS
"""How long a node may take to say that its run has stopped."""


@PLACES.register("ray")
class RayProcess(Process):
    """A run on a cluster. It asks for one CPU, and for one GPU if the cluster has any."""

    def __init__(self, words: Sequence[str], folder: RunFolder) -> None:
        connect()
        gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
        sent = {name: os.environ[name] for name in SENT if name in os.environ}
        actor: Any = ray.remote(Node).options(num_cpus=1, num_gpus=gpus, max_concurrency=2, max_restarts=0)
        self._node = actor.remote(Path.cwd(), sent)
        self._answer = self._node.train.remote(list(words), folder.path.resolve(), folder.seed)

    def wait(self) -> None:
        """Return once it has ended. Raises UserError if its node cannot run it, or is lost."""
        try:
            refused = ray.get(self._answer)
        except RayError as error:
            raise UserError(
                f"a node of the Ray cluster was lost while it trained: {error}; the same command continues"
            ) from error
        finally:
            ray.kill(self._node)
        if refused:
            raise UserError(refused)

    def stop(self) -> None:
        with suppress(RayError, GetTimeoutError):
            ray.get(self._node.stop.remote(), timeout=STOPPED_SECONDS)
        ray.kill(self._node)


class Node:
    """The actor on a node; one method trains while another can stop it."""

    def __init__(self, here: Path, sent: Mapping[str, str]) -> None:
        self._here = here
        self._process: LocalProcess | None = None
        os.environ.update(sent)

    def train(self, words: Sequence[str], path: Path, seed: int) -> str:
        """Run a command in the folder of a run; return why this node cannot, empty if it can."""
        node = f"the node {os.uname().nodename} of the Ray cluster"
        if not path.is_dir() or not self._here.is_dir():
            return f"{node} does not see {path} and {self._here}; type the command in a folder that all share"
        os.chdir(self._here)
        self._process = LocalProcess(words, RunFolder(path, seed))
        self._process.wait()
        return ""

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

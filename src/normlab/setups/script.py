"""Setups from a training script, which runs unchanged until its first steps were seen."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from normlab.base.libraries import is_library
from normlab.errors import UserError
from normlab.setups.ending import EnoughSeen
from normlab.setups.files import KeptFileError
from normlab.setups.from_recording import setup_from_recording
from normlab.setups.harvest import Harvester
from normlab.setups.named import NamedSetup
from normlab.setups.patches import recorded
from normlab.setups.process import same_process
from normlab.setups.withheld import saving_withheld
from normlab.trace.restore import same_random_state

OFFLINE: Final = {
    "WANDB_MODE": "offline",
    "WANDB_DIR": "{folder}",
    "TRACKIO_OFFLINE": "1",
    "TRACKIO_DIR": "{folder}",
    "MLFLOW_TRACKING_URI": "file://{folder}",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables of the environment by which trackers that a script starts send nothing, and write to a folder
that is removed afterwards.
"""


@dataclass(frozen=True)
class Script:
    """A script as it is typed: its file, or its module, and its own arguments."""

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Put the script's folder first on ``sys.path`` in this block; then the process is as before."""
        with same_process():
            sys.path.insert(0, str(Path.cwd() if self.is_module else Path(self.name).resolve().parent))
            yield

    def run(self) -> None:
        """Run it as ``__main__`` with its own ``sys.argv``, inside its surroundings.

        Raises UserError for a script that is not there, that raises, or that exits with an error.
        """
        if not self.is_module and not Path(self.name).is_file():
            raise UserError(f"there is no file {self.name}; name your training script, as in train.py")
        sys.argv[:] = [self.name, *self.arguments]
        try:
            if self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.name, run_name="__main__")
        except SystemExit as ended:
            self._require_success(ended.code)
        except UserError:
            raise
        except KeptFileError as error:
            raise UserError(str(error)) from error
        except Exception as error:
            raise UserError(f"{self.name} raised {_in_one_line(error)}") from error

    def _require_success(self, code: Any) -> None:
        if code in (None, 0):
            return
        how = f"on {' '.join(self.arguments)}" if self.arguments else "without arguments"
        raise UserError(
            f"{self.name} exits with {code!r} {how}; type what it needs after --, as in "
            f"{self.name} -- --lr 3e-4"
        )


@contextmanager
def setup_from_script(
    name: str,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    batches: int = 1,
    seconds: float = float("inf"),
    seed: int | None = None,
    optimizer: int = 1,
) -> Iterator[NamedSetup]:
    """Run a script in its surroundings, and yield the setup that it shows, see ``recorded_setup``."""
    script = Script(name, arguments, module)
    with script.surroundings():
        yield recorded_setup(script, batches=batches, seconds=seconds, seed=seed, optimizer=optimizer)


def recorded_setup(
    script: Script,
    *,
    batches: int = 1,
    seconds: float = float("inf"),
    seed: int | None = None,
    optimizer: int = 1,
) -> NamedSetup:
    """Run a script up to its first steps, and return the setup that it shows.

    What the script prints goes to standard error, and what it saves is withheld.

    Args:
        script: The script, inside of its surroundings.
        batches: How many of its batches are wanted. For more than one it goes on after its first steps, with
            its optimizers' steps left out.
        seconds: For how long it goes on at most.
        seed: Where random states begin, if that is given.
        optimizer: Of several optimizers that step after passes of their own, as in a GAN, the one whose step
            is shown, by its number in the order of their first steps.

    Raises UserError for a script that raises, or that ends without a step.
    """
    harvester = Harvester(batches, seconds, optimizer)
    with (
        trackers_offline(),
        redirect_stdout(sys.stderr),
        same_random_state(seed),
        saving_withheld() as withheld,
        recorded(harvester),
    ):
        try:
            script.run()
        except EnoughSeen:
            pass
        except UserError as error:
            may_end = batches > 1 or isinstance(error.__cause__, KeptFileError)
            if not may_end or not harvester.recording.first_window:
                raise
            harvester.ended_by = str(error)  # what it gave until then is of use
    named = setup_from_recording(harvester.recording, script.name, harvester.proven, optimizer=optimizer)
    return with_batches(replace(named, facts={**named.facts, **withheld.facts}), harvester, batches)


def with_batches(named: NamedSetup, harvester: Harvester, wanted: int) -> NamedSetup:
    """Return a setup with the batches that were harvested, if more than one was wanted."""
    if wanted == 1:
        return named
    batches = harvester.batches_like(named.setup)
    fact = f"{len(batches)} of the script's"
    if harvester.ended_by:
        fact += f" ({wanted} were asked for, but {harvester.ended_by})"
    setup = replace(named.setup, batches=batches)
    return replace(named, setup=setup, facts={**named.facts, "batches": fact})


@contextmanager
def trackers_offline() -> Iterator[None]:
    """Tell trackers by their environment variables to stay offline inside this block, unless the user has set
    them.
    """
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        variables = {
            name: value.format(folder=folder) for name, value in OFFLINE.items() if name not in os.environ
        }
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in variables.items():
                if os.environ.get(name) == value:  # the block may have set another one
                    del os.environ[name]


def _in_one_line(error: Exception) -> str:
    """Return the class and message of an exception, and where in the user's code it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"

"""One process of a check of ranks: it runs the user's script once, and saves what its first step was."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final

import numpy
import torch

from normlab.errors import UserError
from normlab.parallel import plans
from normlab.parallel.devices import OnTheCpu, leave_cuda_out
from normlab.parallel.job import Job, Role, SerialStep, load, save
from normlab.parallel.observed import StepObserver
from normlab.parallel.roles import injected, observed_again, observed_rank, serial_step
from normlab.setups.ending import EnoughSeen
from normlab.setups.harvest import Harvester
from normlab.setups.patches import recorded
from normlab.setups.recorder import Recorder
from normlab.setups.script import Script, trackers_offline
from normlab.setups.withheld import saving_withheld
from normlab.trace.restore import same_random_state

FAILED: Final = 2
"""The exit code where a sentence says why there is no result."""


def do(job: Job) -> int:
    """Do one job, and return the exit code of its process."""
    try:
        with OnTheCpu():
            result = _done(job)
        save(result, job.result)
    except UserError as error:
        job.error.write_text(str(error), encoding="utf-8")
        return FAILED
    except Exception:
        job.error.write_text(traceback.format_exc(), encoding="utf-8")
        return 1
    return 0


def _done(job: Job) -> dict[str, Any]:
    """Run the script on the CPU, and return what it showed."""
    plans.use_one_kind_of_process()
    leave_cuda_out()
    plans.drop_nothing()
    if job.is_double:
        torch.set_default_dtype(torch.float64)
    return ROLES[job.role](job, Script(job.script, job.arguments, job.is_module))


def _as_rank(job: Job, script: Script) -> dict[str, Any]:
    observer = StepObserver()
    plans.note_norms(observer)
    plans_made = plans.Plans(observer, keep_precision=not job.is_double)
    plans_made.watch()
    with script.surroundings():
        _run(job, script, observer)
        return observed_rank(job, observer, plans_made)


def _in_one_process(job: Job, script: Script) -> dict[str, Any]:
    harvester = Harvester()
    plans.leave_plans_out(harvester)
    with script.surroundings():
        _run(job, script, harvester)
        return serial_step(job, harvester)


def _once_more(job: Job, script: Script) -> dict[str, Any]:
    if SerialStep.of(load(Path(job.folder) / "serial.pt")).cannot:
        return {}  # there are no gradients to go on from
    observer = StepObserver(injected(job))
    plans.note_norms(observer)
    plans.leave_plans_out(observer)
    with script.surroundings():
        _run(job, script, observer)
        return observed_again(job, observer)


ROLES: Final[dict[Role, Callable[[Job, Script], dict[str, Any]]]] = {
    "rank": _as_rank,
    "serial": _in_one_process,
    "again": _once_more,
}
"""What a process does, by its role."""


def _run(job: Job, script: Script, recorder: Recorder) -> None:
    """Run the script until its recorder ends it."""
    with (
        trackers_offline(),
        redirect_stdout(sys.stderr),
        same_random_state(job.seed),
        saving_withheld(),
        recorded(recorder),
    ):
        # torch begins with the same numbers in every process, Python and numpy do not
        random.seed(job.seed + job.rank)
        numpy.random.seed(job.seed + job.rank)  # noqa: NPY002
        with suppress(EnoughSeen):
            script.run()

"""Setups from a training script, which runs unchanged until its first optimizer step."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from normlab.errors import UserError
from normlab.setups.flow import Flow, flow_of
from normlab.setups.named import NamedSetup
from normlab.setups.recorder import EnoughSeen, parameters_of, recorded
from normlab.setups.recording import Number, Recording
from normlab.setups.setup import Setup, StepFunction
from normlab.trace.restore import same_random_state
from normlab.trace.tensors import unwrap

OFFLINE: Final = {
    "WANDB_MODE": "offline",
    "TRACKIO_OFFLINE": "1",
    "MLFLOW_TRACKING_URI": "file:///dev/null",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""What tells trackers that a script starts to send nothing, unless the user has set these variables."""


def setup_from_recording(recording: Recording, title: str) -> NamedSetup:
    """Return the setup that a recording shows.

    Raises UserError if no step was seen, and NotRepeatableError if the step cannot be computed again.
    """
    window = recording.first_window
    if not window:
        raise UserError(
            f"{title} ended without a step of an optimizer after a backward pass, so there is no training "
            "step to look at; name a script that trains, with the arguments that it needs after --"
        )
    flows = [flow_of(micro_batch) for micro_batch in window]
    # a count over the whole window reads the labels of its other micro-batches, which stay as they are
    others = set[Number]().union(*(flow.entering_modules for flow in flows[1:]))
    flow = flows[0].holding(others - flows[0].entering_modules)
    flow.prove(window[0])
    trained = {id(p) for p in flow.model.parameters()}
    optimizers = [o for o in recording.optimizers if any(id(p) in trained for p in parameters_of(o))]
    groups = [id(o.param_groups) for o in optimizers]
    # a wrapper around an optimizer, such as Accelerate's, shows the groups of what it wraps
    schedulers = [s for s in recording.schedulers if id(getattr(s.optimizer, "param_groups", None)) in groups]
    setup = Setup(
        flow.model,
        flow.batch,
        loss=flow.loss_of,
        optimizer=(optimizers[0] if len(optimizers) == 1 else optimizers) if optimizers else None,
        scheduler=schedulers[0] if len(schedulers) == 1 else None,
        step=_step_of(recording, flow) if len(window) == 1 else None,
    )
    facts = {"recorded": f"{len(window)} micro-batch{'es' * (len(window) > 1)} of {title}"}
    return NamedSetup(f"{type(flow.model).__name__} of {title}", setup, facts)


def _step_of(recording: Recording, flow: Flow) -> StepFunction:
    """Return the whole step as the script makes it: backward, clipping, optimizers, schedules."""
    names = {id(p): path for path, p in flow.model.named_parameters()}
    clips = [
        ([names[id(p)] for p in event.subject if id(p) in names], event.largest_norm)
        for event in recording.events_of_first_step
        if event.largest_norm is not None
    ]
    scheduled = any(event.kind == "schedule" for event in recording.events_of_first_step)

    def step(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> Tensor:
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        for each in optimizers:
            each.zero_grad()
        loss = flow.loss_of(model, batch)
        (loss * flow.factor).backward()
        parameters = dict(unwrap(model).named_parameters())
        for clipped, largest_norm in clips:
            nn.utils.clip_grad_norm_([parameters[name] for name in clipped], largest_norm)
        for each in optimizers:
            each.step()
        if scheduled and scheduler is not None:
            scheduler.step()
        return loss

    return step


@contextmanager
def setup_from_script(
    file: str, arguments: Sequence[str] = (), *, module: bool = False
) -> Iterator[NamedSetup]:
    """Run a script as ``__main__`` with these arguments up to its first optimizer step, and yield the setup
    that it showed.

    The script has its own ``sys.argv`` and its folder first on ``sys.path``; what it prints goes to standard
    error. Raises UserError for a script that raises, or that ends without a step.
    """
    with ExitStack() as stack:
        stack.callback(_restore, list(sys.path), list(sys.argv), dict(os.environ))
        sys.argv[:] = [file, *arguments]
        os.environ.update({name: value for name, value in OFFLINE.items() if name not in os.environ})
        with recorded() as recorder, redirect_stdout(sys.stderr), same_random_state():
            try:
                if module:
                    runpy.run_module(file, run_name="__main__", alter_sys=True)
                else:
                    sys.path.insert(0, str(Path(file).resolve().parent))
                    runpy.run_path(file, run_name="__main__")
            except EnoughSeen:
                pass
        yield setup_from_recording(recorder.recording, file)


def _restore(path: list[str], argv: list[str], environment: Mapping[str, Any]) -> None:
    sys.path[:], sys.argv[:] = path, argv
    os.environ.clear()
    os.environ.update(environment)

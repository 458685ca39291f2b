"""Setups from a training script, which runs unchanged until its first optimizer step."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.base.units import count
from normlab.errors import UserError
from normlab.setups.flow import Flow, flow_of
from normlab.setups.named import NamedSetup
from normlab.setups.patches import recorded
from normlab.setups.recorder import EnoughSeen, parameters_of
from normlab.setups.recording import Event, Number, Recording
from normlab.setups.setup import Setup
from normlab.trace.restore import same, same_random_state
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
    for i, flow in enumerate(flows):
        # a count over the whole window reads the labels of its other micro-batches, which stay as they are
        others = set[Number]().union(*(other.entering_modules for other in flows if other is not flow))
        flows[i] = flow.holding(others - flow.entering_modules)
    flows[0].prove(window[0])
    model, step = flows[0].model, WindowStep(flows, recording.events_of_first_step)
    trained = {id(p) for p in model.parameters()}
    optimizers = [o for o in recording.optimizers if any(id(p) in trained for p in parameters_of(o))]
    groups = [id(o.param_groups) for o in optimizers]
    # a wrapper around an optimizer, such as Accelerate's, shows the groups of what it wraps
    schedulers = [s for s in recording.schedulers if id(getattr(s.optimizer, "param_groups", None)) in groups]
    joined = step.joined_batch()
    setup = Setup(
        model,
        flows[0].batch if joined is None else joined,
        loss=flows[0].loss_of,
        optimizer=(optimizers[0] if len(optimizers) == 1 else optimizers) if optimizers else None,
        scheduler=schedulers[0] if len(schedulers) == 1 else None,
        step=None if joined is None else step,
    )
    return NamedSetup(f"{type(model).__name__} of {title}", setup, _facts(recording, len(window), joined))


def _facts(recording: Recording, micro_batches: int, joined: Any) -> dict[str, str]:
    facts = {"recorded": count(micro_batches, "micro-batch")}
    if joined is None:
        facts["recorded"] += ", of which the first is examined, since they differ in shape"
    if recording.compiled:
        facts["compiled"] = "run as it was written"
    return facts


class WindowStep:
    """The whole step as a script makes it: a backward pass for each micro-batch, clipping, optimizers,
    schedules.

    It takes the batch of all micro-batches, and divides it into rows as the script did.
    """

    def __init__(self, flows: Sequence[Flow], events: Sequence[Event]) -> None:
        self.flows = flows
        self.rows = [_rows_of(flow.batch) for flow in flows]
        paths = {id(p): path for path, p in flows[0].model.named_parameters()}
        self.after: list[tuple[str, list[str], float]] = []
        """What follows the backward passes, in order: the kind, the parameters of a clip, and its norm."""
        for event in events:
            clipped = event.subject if event.kind == "clip" else []
            names = [paths[id(p)] for p in clipped if id(p) in paths]
            self.after.append((event.kind, names, event.largest_norm or 0.0))

    def joined_batch(self) -> dict[str, Tensor] | None:
        """Return the rows of all micro-batches as one batch; None if they cannot be joined, or if the loss of
        a micro-batch cannot be computed of all of them at once.
        """
        first = self.flows[0]
        if len(self.flows) == 1:
            return first.batch
        shapes = [{name: x.shape[1:] for name, x in flow.batch.items()} for flow in self.flows]
        if any(shape != shapes[0] for shape in shapes):
            return None
        batch = {name: torch.cat([flow.batch[name] for flow in self.flows]) for name in first.batch}
        with torch.no_grad(), same(first.model, batch, parameters=False), same_random_state():
            try:
                first.loss_of(first.model, batch)
            except Exception:  # the script's own functions may insist on a number of rows
                return None
        return batch

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Tensor], optimizer: Any, scheduler: Any
    ) -> Tensor:
        """Make the step; return the mean of the losses."""
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        for each in optimizers:
            each.zero_grad()
        losses = []
        for flow, part, weight in self._parts(batch):
            loss = flow.loss_of(model, part)
            (loss * (flow.factor * flow.scale * weight)).backward()
            losses.append(loss.detach())
        self._finish(unwrap(model), optimizers, scheduler)
        return torch.stack(losses).mean()

    def _finish(self, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any) -> None:
        """Do what the script did after its backward passes, in its order."""
        parameters = dict(model.named_parameters())
        for kind, clipped, norm in self.after:
            if kind == "clip":
                nn.utils.clip_grad_norm_([parameters[name] for name in clipped], norm)
            elif kind == "unscale":
                for p in parameters.values():
                    if p.grad is not None:
                        p.grad /= self.flows[0].scale
            elif kind == "step":
                for optimizer in optimizers:
                    optimizer.step()
            elif kind == "schedule" and scheduler is not None:
                scheduler.step()

    def _parts(self, batch: Mapping[str, Tensor]) -> Iterator[tuple[Flow, Mapping[str, Tensor], float]]:
        """Yield each flow with its rows and a weight. A batch of another size is one part, with the weight of
        the whole window.
        """
        if _rows_of(batch) != sum(self.rows):
            total = sum(flow.factor for flow in self.flows)
            yield self.flows[0], batch, total / self.flows[0].factor
            return
        begin = 0
        for flow, rows in zip(self.flows, self.rows, strict=True):
            yield flow, {name: x[begin : begin + rows] for name, x in batch.items()}, 1.0
            begin += rows


def _rows_of(batch: Mapping[str, Tensor]) -> int:
    return next(iter(batch.values())).shape[0]


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

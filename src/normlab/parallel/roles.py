"""What each process makes of the step that its script shows, by its role in the check.

A rank saves its step and its batches. The script in one process gives the gradients of the union of these
batches. When it is run in one process once more, it makes its step with these gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normlab.errors import NoStepError, UserError, in_one_line
from normlab.parallel.job import Job, Named, RankStep, SerialStep, Step, load
from normlab.parallel.observed import StepObserver, gathered, names_and_ties
from normlab.parallel.plans import Plans
from normlab.parallel.union import Union, union_of
from normlab.setups.flow import Flow, NotRepeatableError
from normlab.setups.harvest import Harvester
from normlab.setups.optimizers import ids_held_by
from normlab.setups.proof import ProvenFlow, proven_window
from normlab.setups.recording import MicroBatch
from normlab.setups.setup import Ability
from normlab.setups.window import WindowStep

# ------------------------------------------------------------------------------------------- one rank


def observed_rank(job: Job, observer: StepObserver, plans: Plans) -> dict[str, Any]:
    """Return what a rank saves. Raises UserError if its script made no step."""
    if observer.step is None:
        raise NoStepError(f"{job.script} ended on rank {job.rank} without a step of an optimizer")
    unseen, batches, inputs = "", list[Named](), list[Tensor]()
    try:
        for micro_batch in observer.window:
            flow = observer.flow(micro_batch)
            batches.append(_whole_batch(flow, micro_batch, plans))
            inputs += _inputs(flow)
    except NotRepeatableError as error:
        unseen = str(error)
    rank = RankStep(
        rank=job.rank,
        step=observer.step,
        batches=batches,
        inputs=inputs,
        tensors=plans.tensors,
        contexts=plans.contexts,
        kinds=[*plans.kinds],
        unseen=unseen,
    )
    return asdict(rank)


def _whole_batch(flow: Flow, micro_batch: MicroBatch, plans: Plans) -> Named:
    """Return the batch that a rank read, before a plan left this rank its part of each sequence."""
    batch: Named = {}
    for number, name in flow.leaves.items():
        whole = plans.whole.get(id(micro_batch.tensors[number]), flow.tensors[number])
        batch[name] = whole.detach().clone()
    return batch


def _inputs(flow: Flow) -> list[Tensor]:
    """Return the data that calls of the model take, and what meets the model's results."""
    with torch.no_grad():
        calls_on_data = tuple(call for call in flow.calls if not flow.depends_on_model(call))
        values = replace(flow, calls=calls_on_data, escapes=()).values(flow.model, flow.batch)
    calls_of_model = [call for call in flow.calls if flow.depends_on_model(call)]
    numbers = dict.fromkeys(n for call in calls_of_model for n in call.reads if n in values)
    taken = [values[n] for n in numbers if n not in flow.parameters]
    return [x.detach().clone() for x in taken if isinstance(x, Tensor)]


# ------------------------------------------------------------------------------------- in one process


def serial_step(job: Job, harvester: Harvester) -> dict[str, Any]:
    """Return the step that the union of all batches gives, as one process computes it.

    Raises UserError if the script made no step.
    """
    recording = harvester.recording
    window = recording.first_window
    if not window:
        raise NoStepError(f"{job.script} ended without a step of an optimizer in one process")
    held = ids_held_by(recording.optimizers_of_first_step)
    proven = proven_window(window, recording.first_of_next_step(window), held, {})
    flows = [each.flow for each in proven]
    ranks = [RankStep.of(load(path)) for path in sorted(Path(job.folder).glob("rank-*.pt"))]
    model = flows[0].model
    named, ties = names_and_ties(model, held)
    gradients: Named = {}
    union = Union([], "", _why_no_union(ranks, proven))
    if not union.cannot:
        union = union_of(ranks, [flow.batch for flow in flows])
    if not union.cannot:
        _take_weights(named, ranks[0].step)
        gradients, union = _gradients_of_union(flows, named, union)
    first_parameter = next(iter(named.values()))
    serial = SerialStep(
        gradients=gradients,
        ties=ties,
        passes=sum(event.kind == "backward" for event in recording.events_of_first_step),
        dtype=str(first_parameter.dtype).removeprefix("torch."),
        title=type(model).__name__,
        union=union.described,
        is_of_parts=union.is_of_parts,
        cannot=union.cannot,
    )
    return asdict(serial)


def _why_no_union(ranks: Sequence[RankStep], proven: Sequence[ProvenFlow]) -> str:
    """Return why nothing can be computed from the batches of all ranks; empty if something can."""
    for rank in ranks:
        if rank.unseen:
            return rank.unseen
    abilities: tuple[Ability, ...] = ("loss", "gradient", "batch")
    for each in proven:
        for ability in abilities:
            if ability in each.cannot:
                return each.cannot[ability]
    return ""


def _take_weights(named: Mapping[str, Tensor], step: Step) -> None:
    """Give a model the weights that the ranks began with."""
    with torch.no_grad():
        for name, p in named.items():
            if name in step.before and step.before[name].shape == p.shape:
                p.copy_(step.before[name])


def _with_batch(flow: Flow, batch: Named) -> Flow:
    """Return a flow as if this were the batch that was recorded."""
    return replace(flow, tensors={**flow.tensors, **{n: batch[name] for n, name in flow.leaves.items()}})


def _gradients_of_union(
    flows: Sequence[Flow], named: Mapping[str, Tensor], union: Union
) -> tuple[Named, Union]:
    """Return the gradients of the loss of all batches, scaled as the script scales it in one step; and the
    union, which says why if there are none.
    """
    parts = [_with_batch(flows[0], batch) for batch in union.batches]
    step = WindowStep(parts, [], [], never_zeroed=())
    factor = sum(flow.factor for flow in flows)
    try:
        loss = step.loss(flows[0].model, step.batch) * factor
    except Exception as error:  # the script's own functions may insist on a number of rows
        return {}, replace(union, cannot=f"the step does not run on {union.described}: {in_one_line(error)}")
    gradients = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
    by_name = zip(named, gradients, strict=True)
    return gathered({name: x for name, x in by_name if x is not None}), union


# ------------------------------------------------------------------------------------ with given gradients


def injected(job: Job) -> Callable[[StepObserver, int], None]:
    """Return what an observer calls after each backward pass: after the last one of a step, weights, rates
    and gradients become those of the ranks and of the union.
    """
    serial = SerialStep.of(load(Path(job.folder) / "serial.pt"))
    rank = RankStep.of(load(Path(job.folder) / "rank-0.pt"))

    def after_pass(observer: StepObserver, passes: int) -> None:
        if passes != serial.passes:
            return
        named, _ = observer.parameters()
        _take_weights(named, rank.step)
        for name, p in named.items():
            gradient = serial.gradients.get(name)
            p.grad = None if gradient is None else gradient.to(p.dtype).clone()
        for optimizer in observer.recording.optimizers:
            for group in optimizer.param_groups:
                names = [name for name, p in named.items() if _holds(group, p)]
                rates = [rank.step.rates[name] for name in names if name in rank.step.rates]
                if rates and not isinstance(group["lr"], Tensor):
                    group["lr"] = rates[0]

    return after_pass


def _holds(group: Mapping[str, Any], parameter: Tensor) -> bool:
    return any(parameter is held for held in group["params"])


def observed_again(job: Job, observer: StepObserver) -> dict[str, Any]:
    """Return the step that one process makes of the gradients of the union.

    Raises UserError if it makes none.
    """
    if observer.step is None:
        raise UserError(f"{job.script} ended without a step when it was run once more in one process")
    return asdict(observer.step)

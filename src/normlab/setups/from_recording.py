"""Make a setup from a recording: the model that its first step trains, its batch, its loss, and the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose
from typing import Any

from torch import nn
from torch.optim import Optimizer

from normlab.base.memory import gibibytes
from normlab.base.units import count
from normlab.errors import NoStepError, UserError
from normlab.private_torch import schedulers_in
from normlab.setups.added import losses_of_own_passes
from normlab.setups.arguments import Number
from normlab.setups.flow import Flow
from normlab.setups.micro_batch_flow import loss_factor
from normlab.setups.named import NamedSetup
from normlab.setups.optimizers import ids_held_by, parameters_of
from normlab.setups.proof import ProvenFlow, proven_window
from normlab.setups.rates import RatesByHand, rates_by_hand, with_rates
from normlab.setups.recording import Event, MicroBatch, Recording, sources
from normlab.setups.setup import Ability, Declaration, Setup
from normlab.setups.window import SchedulersTogether, ShorterWindow, WindowStep


def setup_from_recording(
    recorded: Recording,
    title: str,
    known: Mapping[MicroBatch, ProvenFlow] | None = None,
    *,
    optimizer: int = 1,
) -> NamedSetup:
    """Return the setup that a recording shows. Its ``cannot`` says what cannot be repeated.

    Args:
        recorded: What a script showed of its first steps.
        title: What to call that in the setup's title, and in errors.
        known: Micro-batches whose flow was proven before, and is not proven once more.
        optimizer: If there are several, the number of the one whose step it is.

    Raises NoStepError if no step was seen, UserError if none of this optimizer was or if the script changes
    weights without one, and NotRepeatableError if no module took part in its loss.
    """
    recording = recorded.of_optimizer(optimizer)
    window = _window_of(recording, title)
    recording.put_back(window)
    stepped = recording.optimizers_of_first_step
    next_pass = recording.first_of_next_step(window)
    proven = proven_window(window, next_pass, ids_held_by(stepped), {} if known is None else known)
    window, proven, cannot = _of_one_model(window, proven)
    flows = _each_with_its_own_batch([each.flow for each in proven], window)
    model = flows[0].model
    optimizers = _optimizers_of(model, recording.events_of_first_step)
    events, unrepeatable_change = _with_clips_by_hand(recording, stepped)
    if why := _why_the_step_is_lost(recording, model, optimizers, unrepeatable_change):
        cannot["step"] = why
    rates = [rates_by_hand(recording, optimizer) for optimizer in optimizers]
    step = WindowStep(
        flows,
        events,
        optimizers,
        never_zeroed=recording.never_zeroed,
        joins="batch" not in cannot,
        warms_up=any(of_optimizer is not None and of_optimizer.rise for of_optimizer in rates),
        shorter=_shorter_window(recording),
    )
    is_step_lost = not cannot.keys().isdisjoint(("loss", "gradient", "step"))
    gradients_at_step = recording.gradients_at_step[id(stepped[0])]
    if not is_step_lost and not step.leads_to(gradients_at_step, [each.gradients for each in proven]):
        cannot["step"] = "something that was not seen changes the gradients before the optimizer gets them"
        is_step_lost = True
    scheduler, schedule_facts = _scheduler(recording, optimizers)
    facts = _facts(recording, step, cannot, stepped) | schedule_facts | _other_optimizers(recorded, stepped)
    setup = Setup(
        model,
        flows[0].batch if step.joined is None else step.joined,
        loss=flows[0].loss_of,
        optimizer=_at_their_peak(optimizers, rates),
        scheduler=scheduler,
        step=None if is_step_lost else step,
        declare=Declaration(frozen=_held_elsewhere(recording, model)),  # left alone here on purpose
        cannot=cannot | _unknown_rate(rates),
        added=_losses_added(flows[0], cannot),
    )
    return NamedSetup(f"{type(model).__name__} of {title}", setup, facts)


def _held_elsewhere(recording: Recording, model: nn.Module) -> tuple[str, ...]:
    """Return the parameters that only optimizers without a step here hold, by path."""
    held = recording.held_elsewhere
    return tuple(path for path, p in model.named_parameters() if id(p) in held)


def _losses_added(flow: Flow, cannot: Mapping[Ability, str]) -> list[Setup]:
    """Return the losses that are added up to that of a flow and come from passes of their own, as setups."""
    if "loss" in cannot:
        return []
    flows = losses_of_own_passes(flow)
    return [Setup(flow.model, each.batch, loss=each.loss_of, cannot=dict(cannot)) for each in flows]


# --------------------------------------------------------------------------------------- the micro-batches


def _window_of(recording: Recording, title: str) -> list[MicroBatch]:
    """Return the micro-batches of the first step. Raises NoStepError if there is none, or if nothing says
    where its gradients come from, and UserError if the script changes weights without an optimizer.
    """
    if recording.unseen_step:
        raise NoStepError(
            f"step in {recording.unseen_step} has gradients that no backward pass gave; compute them by "
            "loss.backward(), torch.autograd.grad(loss, parameters) or torch.func.grad of parameters"
        )
    if recording.step_by_hand:
        raise UserError(
            f"{recording.step_by_hand} changes weights by itself, and no optimizer of torch holds them; use "
            "one, such as torch.optim.SGD, or write a function setup() that returns normlab.Setup(model, "
            "batch, loss=…)"
        )
    window = recording.first_window
    if not window:
        raise NoStepError(
            f"{title} ended without a step of an optimizer after a backward pass, so there is no training "
            "step to look at; name a script that trains, with the arguments that it needs after --"
        )
    return window


def _of_one_model(
    window: Sequence[MicroBatch], proven: Sequence[ProvenFlow]
) -> tuple[list[MicroBatch], list[ProvenFlow], dict[Ability, str]]:
    """Return the micro-batches of the model that the first one trains, their flows, and what cannot be done
    with them.
    """
    model = proven[0].flow.model
    micro_batches, proven_flows = list[MicroBatch](), list[ProvenFlow]()
    cannot: dict[Ability, str] = {}
    for micro_batch, each in zip(window, proven, strict=True):
        if each.flow.model is model:
            micro_batches.append(micro_batch)
            proven_flows.append(each)
            cannot = {**each.cannot, **cannot}  # the reasons of the first micro-batch win
    if len(micro_batches) < len(window):
        cannot.setdefault("step", "its passes train several models in turn, of which the first one is tested")
    return micro_batches, proven_flows, cannot


def _each_with_its_own_batch(flows: Sequence[Flow], window: Sequence[MicroBatch]) -> list[Flow]:
    """Return the flows with what belongs to the other micro-batches as constants, and what is computed with
    it: a count over the whole window stays what it is, whatever becomes of the rows of one micro-batch.
    """
    calls = [call for micro_batch in window for call in micro_batch.calls]
    separate: list[Flow] = []
    for flow, micro_batch in zip(flows, window, strict=True):
        of_others = set[Number]()
        for other in flows:
            if other is not flow:
                of_others |= sources(calls, other.leaves)
        separate.append(flow.holding(of_others - flow.own_leaves(micro_batch)))
    return separate


def _shorter_window(recording: Recording) -> ShorterWindow | None:
    """Return the window of the next step of the same optimizer, if it has fewer micro-batches, and their
    losses are multiplied by numbers whose sum is no longer 1.
    """
    windows = recording.windows
    optimizer, first_window = windows[0]
    later = [window for other, window in windows[1:] if other is optimizer]
    is_changed_by_hand = any(event.kind in ("scale", "assign", "edit") for event in recording.events)
    if not later or len(later[0]) >= len(first_window) or is_changed_by_hand:
        return None
    first_weight = sum(map(loss_factor, first_window))
    weight = sum(map(loss_factor, later[0]))
    if not isclose(first_weight, 1) or isclose(weight, 1):
        return None
    return ShorterWindow(len(later[0]), weight)


# ------------------------------------------------------------------------------------- gradients and the step


def _with_clips_by_hand(recording: Recording, stepped: Sequence[Optimizer]) -> tuple[list[Event], str]:
    """Return the events of the first step, with a ``clip`` in place of what clips gradients by the script's
    own code; and why the step cannot be repeated, if they are changed by hand in a way that nothing explains.
    """
    held = [p for optimizer in stepped for p in parameters_of(optimizer)]
    events, reason = list[Event](), ""
    for event in recording.events_of_first_step:
        scaling = recording.scaling_of(event) if event.kind in ("scale", "assign") else ""
        if scaling == "clip":
            events.append(Event("clip", held, largest_norm=event.norm))
            continue
        events.append(event)
        if event.kind == "edit":
            reason = f"gradients are changed by hand before {event.subject}, in a way that was not seen"
        elif event.kind in ("scale", "assign") and not scaling:
            reason = (
                f"gradients are changed by hand before {event.subject}, by a factor that differs from "
                "step to step"
            )
    return events, reason


def _why_the_step_is_lost(
    recording: Recording, model: nn.Module, optimizers: Sequence[Optimizer], unrepeatable_change: str
) -> str:
    """Return why the step as such cannot be computed again; empty if it can.

    ``unrepeatable_change`` says what the script does to gradients by hand that cannot be repeated.
    """
    if not optimizers:
        return "the optimizer that is stepped holds none of the parameters of the model"
    if recording.steps_in_backward:
        return "optimizers are stepped inside of the backward pass, as each gradient arrives"
    return _weights_changed_within_step(recording, model) or unrepeatable_change


def _weights_changed_within_step(recording: Recording, model: nn.Module) -> str:
    """Return what of a model the script changes by hand within a step, and where; empty if nothing."""
    paths = {id(p): path for path, p in model.named_parameters()}
    lines = {
        paths[parameter]: weight.line
        for parameter, weight in recording.changed_weights.items()
        if weight.is_within_step and parameter in paths
    }
    if not lines:
        return ""
    path, line = next(iter(lines.items()))
    changed = f"{count(len(lines), 'weight')} by hand within the step, such as {path}"
    return f"{line} changes {changed}; its loss and gradient are tested at the weights before that"


# ------------------------------------------------------------------- optimizers, their rates and schedules


def _optimizers_of(model: nn.Module, events: Sequence[Event]) -> list[Optimizer]:
    """Return the optimizers of a step that hold parameters of the model; if none does, those whose parameters
    have no gradients. An optimizer of other parameters with gradients trains something else, such as copies
    of the model's to which the script gives gradients.
    """
    of_model = {id(p) for p in model.parameters()}
    steps = [event for event in events if event.kind == "step"]
    holding = [e.subject for e in steps if any(id(p) in of_model for p in parameters_of(e.subject))]
    return holding or [event.subject for event in steps if not event.has_gradients]


def _at_their_peak(
    optimizers: Sequence[Optimizer], rates: Sequence[RatesByHand | None]
) -> Optimizer | list[Optimizer] | None:
    """Return the optimizers as a setup holds them, with the largest rates that the loop sets by hand."""
    at_peak = [
        optimizer if of_optimizer is None else with_rates(optimizer, of_optimizer.peaks)
        for optimizer, of_optimizer in zip(optimizers, rates, strict=True)
    ]
    if not at_peak:
        return None
    return at_peak[0] if len(at_peak) == 1 else at_peak


def _unknown_rate(rates: Sequence[RatesByHand | None]) -> dict[Ability, str]:
    """Return why the rate of the training is not known, as an entry of ``cannot``; empty if it is known."""
    for of_optimizer in rates:
        if of_optimizer is not None and not of_optimizer.have_a_known_peak:
            return {"rate": of_optimizer.unknown}
    return {}


def _scheduler(recording: Recording, optimizers: Sequence[Optimizer]) -> tuple[Any, dict[str, str]]:
    """Return the schedule of these optimizers, None if there is none, and as a fact what is left out of it:
    of several, those that this step does not step, such as one that follows after each epoch.
    """
    # a schedule that is made of others steps them itself
    inner = {id(part) for outer in recording.schedulers for part in schedulers_in(outer)}
    outermost = [scheduler for scheduler in recording.schedulers if id(scheduler) not in inner]
    # by their groups: a wrapper around an optimizer, such as Accelerate's, shows those of what it wraps
    groups = [id(optimizer.param_groups) for optimizer in optimizers]
    steering = [s for s in outermost if id(getattr(s.optimizer, "param_groups", None)) in groups]
    scheduled = [event.subject for event in recording.events_of_first_step if event.kind == "schedule"]
    stepped = [scheduler for scheduler in steering if any(scheduler is other for other in scheduled)]
    used = stepped or steering
    facts = dict[str, str]()
    left_out = [type(s).__name__ for s in steering if all(s is not other for other in used)]
    if left_out:
        facts["schedule"] = f"without {' and '.join(left_out)}, which this step does not step"
    if len(used) > 1:
        return SchedulersTogether(used), facts
    return (used[0] if used else None), facts


# -------------------------------------------------------------------------------------- what is said of it


def _facts(
    recording: Recording, step: WindowStep, cannot: Mapping[Ability, str], stepped: Sequence[Optimizer]
) -> dict[str, str]:
    facts = {"recorded": count(len(step.flows), "micro-batch")}
    if step.joined is None:
        facts["recorded"] += " of several shapes; what does not concern the whole step is tested on the first"
    rates = [rates_by_hand(recording, optimizer) for optimizer in stepped]
    rate_facts = [of_optimizer.fact for of_optimizer in rates if of_optimizer is not None]
    if rate_facts:
        facts["rates"] = "; ".join(dict.fromkeys(rate_facts))
    if recording.compiled:
        facts["compiled"] = "run as it was written"
    if left_out := recording.micro_batches[0].module_state.left_out:
        facts["not put back"] = ", ".join(f"{name} ({gibibytes(size)})" for name, size in left_out.items())
    if cannot:
        facts["not repeated"] = "; ".join(dict.fromkeys(cannot.values()))
    return facts


def _other_optimizers(recorded: Recording, stepped: Sequence[Optimizer]) -> dict[str, str]:
    """Return what is said of the optimizers that make no step here, and how to check them."""
    held = ids_held_by(stepped)
    calls = [call for micro_batch in recorded.micro_batches for call in micro_batch.calls]
    called = {id(p) for call in calls if call.module is not None for p in call.module.parameters()}
    sentences = list[str]()
    for optimizer in recorded.optimizers:
        # one that holds nothing more steps here, or wraps what does; others in the process train other models
        if called.isdisjoint(ids_held_by([optimizer]) - held):
            continue
        name = type(optimizer).__name__
        numbers = [i for i, other in enumerate(recorded.stepped, 1) if other is optimizer]
        if numbers:
            sentences.append(f"{name} steps after passes of its own, which --optimizer {numbers[0]} checks")
        else:
            sentences.append(f"{name} has not stepped so far")
    return {"not examined": "; ".join(sentences)} if sentences else {}

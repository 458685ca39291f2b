"""A setup from a recording: the flows of one step's micro-batches, and the step that they make together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.base.memory import gibibytes
from normlab.base.units import count
from normlab.errors import NoStepError, UserError
from normlab.private_torch import schedulers_in
from normlab.setups.added import losses_of_own_passes
from normlab.setups.arguments import Number
from normlab.setups.flow import MOST_APART, Flow
from normlab.setups.gradients import parameters_of
from normlab.setups.named import NamedSetup
from normlab.setups.proof import ProvenFlow, proven_window
from normlab.setups.rates import rates_by_hand, with_rates
from normlab.setups.recording import Event, MicroBatch, Recording, sources
from normlab.setups.setup import Ability, Declaration, Setup
from normlab.setups.shown import loss_factor
from normlab.setups.step import needs_closure
from normlab.trace.awake import awake_in_place
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.restore import restored
from normlab.trace.tensors import unwrap
from normlab.trace.trace import Trace


def setup_from_recording(
    seen: Recording, title: str, known: Mapping[MicroBatch, ProvenFlow] | None = None, *, optimizer: int = 1
) -> NamedSetup:
    """Return the setup that a recording shows, of one ``optimizer`` by its number if there are several. Its
    ``cannot`` says what cannot be repeated. Micro-batches whose flow is ``known`` are not proven once more.

    Raises NoStepError if no step was seen, UserError if not that of this optimizer, and NotRepeatableError if
    no module took part in its loss.
    """
    recording = seen.of_optimizer(optimizer)
    window = _window_of(recording, title)
    recording.put_back(window)
    events = recording.events_of_first_step
    stepped = [event.subject for event in events if event.kind == "step"]
    held = {id(p) for optimizer in stepped for p in parameters_of(optimizer)}
    proven = proven_window(window, recording.again(window), held, {} if known is None else known)
    window, proven, cannot = _of_one_model(window, proven)
    flows = _each_with_its_own_batch([each.flow for each in proven], window)
    model = flows[0].model
    optimizers = _optimizers_of(model, events)
    events, by_hand = _with_clips_by_hand(recording, events, stepped)
    if why := _why_the_step_is_lost(recording, model, optimizers, by_hand):
        cannot["step"] = why
    by_loop = [rates_by_hand(recording, optimizer) for optimizer in optimizers]
    step = WindowStep(
        flows,
        events,
        optimizers,
        never_zeroed=recording.never_zeroed,
        joins="batch" not in cannot,
        warms_up=any(rates is not None and rates.rise for rates in by_loop),
        shorter=_shorter_window(recording),
    )
    is_step_lost = not cannot.keys().isdisjoint(("loss", "gradient", "step"))
    given = recording.gradients_at_step[id(stepped[0])]
    if not is_step_lost and not step.leads_to(given, [each.gradients for each in proven]):
        cannot["step"] = "something that was not seen changes the gradients before the optimizer gets them"
        is_step_lost = True
    scheduler, of_schedule = _scheduler(recording.schedulers, optimizers, events)
    facts = {**_facts(recording, step, cannot, stepped), **of_schedule, **_other_optimizers(seen, stepped)}
    held_elsewhere = [path for path, p in model.named_parameters() if id(p) in recording.held_elsewhere]
    unknown = [rates.unknown for rates in by_loop if rates is not None and not rates.have_a_known_peak]
    at_peak = [
        optimizer if rates is None else with_rates(optimizer, rates.peaks)
        for optimizer, rates in zip(optimizers, by_loop, strict=True)
    ]
    frozen = Declaration(frozen=tuple(held_elsewhere))  # this step leaves them alone on purpose
    parts: list[Flow] = [] if "loss" in cannot else losses_of_own_passes(flows[0])
    setup = Setup(
        model,
        flows[0].batch if step.joined is None else step.joined,
        loss=flows[0].loss_of,
        optimizer=(at_peak[0] if len(at_peak) == 1 else at_peak) if at_peak else None,
        scheduler=scheduler,
        step=None if is_step_lost else step,
        declare=frozen,
        cannot={**cannot, "rate": unknown[0]} if unknown else cannot,
        added=[Setup(model, part.batch, loss=part.loss_of, cannot=cannot) for part in parts],
    )
    return NamedSetup(f"{type(model).__name__} of {title}", setup, facts)


def _of_one_model(
    window: Sequence[MicroBatch], proven: Sequence[ProvenFlow]
) -> tuple[list[MicroBatch], list[ProvenFlow], dict[Ability, str]]:
    """Return the micro-batches of the model that the first one trains, their flows, and what cannot be done
    with them.
    """
    cannot: dict[Ability, str] = {}
    pairs = zip(window, proven, strict=True)
    own = [(each, flow) for each, flow in pairs if flow.flow.model is proven[0].flow.model]
    for _, each in own:
        cannot = {**each.cannot, **cannot}  # the reasons of the first micro-batch win
    if len(own) < len(window):
        cannot.setdefault("step", "its passes train several models in turn, of which the first one is tested")
    return [each for each, _ in own], [flow for _, flow in own], cannot


class ShorterWindow(NamedTuple):
    """The window of a later step that has fewer micro-batches than the first one, as the last of an epoch."""

    micro_batches: int
    weight: float
    """The sum of what their losses are multiplied by, which is 1 for the first window."""


def _shorter_window(recording: Recording) -> ShorterWindow | None:
    """Return the window of the next step of the same optimizer, if it has fewer micro-batches, and their
    losses are multiplied by numbers whose sum is no longer 1.
    """
    windows = recording.windows
    later = [window for optimizer, window in windows[1:] if optimizer is windows[0][0]]
    changed_by_hand = any(event.kind in ("scale", "assign", "edit") for event in recording.events)
    if not later or len(later[0]) >= len(windows[0][1]) or changed_by_hand:
        return None
    first, weight = (sum(map(loss_factor, window)) for window in (windows[0][1], later[0]))
    return ShorterWindow(len(later[0]), weight) if isclose(first, 1) and not isclose(weight, 1) else None


def _window_of(recording: Recording, title: str) -> list[MicroBatch]:
    """Return the micro-batches of the first step. Raises NoStepError if there is none, or if nothing says
    where its gradients come from.
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


def _optimizers_of(model: nn.Module, events: Sequence[Event]) -> list[Optimizer]:
    """Return the optimizers of a step that hold parameters of the model, or those that hold nothing that
    trains: their parameters may be copies that the script gives gradients.
    """
    of_model = {id(p) for p in model.parameters()}
    steps = [event for event in events if event.kind == "step"]
    holding = [e.subject for e in steps if any(id(p) in of_model for p in parameters_of(e.subject))]
    return holding or [event.subject for event in steps if not event.has_gradients]


def _why_the_step_is_lost(
    recording: Recording, model: nn.Module, optimizers: Sequence[Optimizer], by_hand: str
) -> str:
    """Return why the step as such cannot be computed again; empty if it can. ``by_hand`` says what a script
    does to gradients that cannot be repeated.
    """
    if not optimizers:
        return "the optimizer that is stepped holds none of the parameters of the model"
    if recording.steps_in_backward:
        return "optimizers are stepped inside of the backward pass, as each gradient arrives"
    return _weights_changed_within_step(recording, model) or by_hand


def _weights_changed_within_step(recording: Recording, model: nn.Module) -> str:
    """Return what of a model the script changes by hand within a step, and where; empty if nothing."""
    paths = {id(p): path for path, p in model.named_parameters()}
    changes = {
        paths[key]: weight.line
        for key, weight in recording.changed_weights.items()
        if weight.is_within_step and key in paths
    }
    if not changes:
        return ""
    path, line = next(iter(changes.items()))
    changed = f"{count(len(changes), 'weight')} by hand within the step, such as {path}"
    return f"{line} changes {changed}; its loss and gradient are tested at the weights before that"


def _with_clips_by_hand(
    recording: Recording, events: Sequence[Event], stepped: Sequence[Optimizer]
) -> tuple[list[Event], str]:
    """Return the events of a step with clips in place of what clips by the script's own code, and why it
    cannot be repeated if gradients are changed in another way.
    """
    held = [p for optimizer in stepped for p in parameters_of(optimizer)]
    seen, reason = list[Event](), ""
    for event in events:
        scaling = recording.scaling_of(event) if event.kind in ("scale", "assign") else ""
        if scaling == "clip":
            seen.append(Event("clip", held, largest_norm=event.norm))
            continue
        seen.append(event)
        if event.kind == "edit":
            reason = f"gradients are changed by hand before {event.subject}, in a way that was not seen"
        elif event.kind in ("scale", "assign") and not scaling:
            reason = (
                f"gradients are changed by hand before {event.subject}, by a factor that is another one in "
                "each step"
            )
    return seen, reason


class SchedulersTogether:
    """Several schedules, stepped as one: each optimizer of a step may have its own, or one of them two."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self.schedulers = list(schedulers)

    def step(self) -> None:
        """Step each of them."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each."""
        return [scheduler.state_dict() for scheduler in self.schedulers]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the state of each."""
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(state)


def _scheduler(
    schedulers: Sequence[Any], optimizers: Sequence[Optimizer], events: Sequence[Event]
) -> tuple[Any, dict[str, str]]:
    """Return the schedule of these optimizers, None if there is none, and as a fact what is left out of it:
    of several, those that this step does not step, such as one that follows after each epoch.
    """
    # a schedule that is made of others steps them itself
    inner = {id(s) for outer in schedulers for s in schedulers_in(outer)}
    schedulers = [scheduler for scheduler in schedulers if id(scheduler) not in inner]
    groups = [id(optimizer.param_groups) for optimizer in optimizers]
    # a wrapper around an optimizer, such as Accelerate's, shows the groups of what it wraps
    steering = [s for s in schedulers if id(getattr(s.optimizer, "param_groups", None)) in groups]
    moved = [s for s in steering if any(e.kind == "schedule" and e.subject is s for e in events)]
    used = moved or steering
    facts = dict[str, str]()
    if others := [type(s).__name__ for s in steering if all(s is not other for other in used)]:
        facts["schedule"] = f"without {' and '.join(others)}, which this step does not step"
    if len(used) > 1:
        return SchedulersTogether(used), facts
    return (used[0] if used else None), facts


def _each_with_its_own_batch(flows: Sequence[Flow], window: Sequence[MicroBatch]) -> list[Flow]:
    """Return the flows with what belongs to the other micro-batches as constants, and what is computed with
    it: a count over the whole window stays what it is, whatever becomes of the rows of one micro-batch.
    """
    calls = [call for micro_batch in window for call in micro_batch.calls]
    parted: list[Flow] = []
    for flow, micro_batch in zip(flows, window, strict=True):
        of_others = set[Number]()
        for other in flows:
            if other is not flow:
                of_others |= sources(calls, other.leaves)
        parted.append(flow.holding(of_others - flow.own_leaves(micro_batch)))
    return parted


def _facts(
    recording: Recording, step: WindowStep, cannot: Mapping[Ability, str], stepped: Sequence[Optimizer]
) -> dict[str, str]:
    facts = {"recorded": count(len(step.flows), "micro-batch")}
    if step.joined is None:
        facts["recorded"] += " of several shapes; what does not concern the whole step is tested on the first"
    by_hand = [rates for optimizer in stepped if (rates := rates_by_hand(recording, optimizer)) is not None]
    if by_hand:
        facts["rates"] = "; ".join(dict.fromkeys(rates.fact for rates in by_hand))
    if recording.compiled:
        facts["compiled"] = "run as it was written"
    if left_out := recording.micro_batches[0].found.left_out:
        sizes = [f"{name} ({gibibytes(size)})" for name, size in left_out.items()]
        facts["not put back"] = ", ".join(sizes)
    if cannot:
        facts["not repeated"] = "; ".join(dict.fromkeys(cannot.values()))
    return facts


def _other_optimizers(seen: Recording, stepped: Sequence[Optimizer]) -> dict[str, str]:
    """Return what is said of the optimizers that make no step here, and how to check them."""
    held = {id(p) for optimizer in stepped for p in parameters_of(optimizer)}
    calls = [call for micro_batch in seen.micro_batches for call in micro_batch.calls]
    called = {id(p) for call in calls if call.module is not None for p in call.module.parameters()}
    others = list[str]()
    for optimizer in seen.optimizers:
        # one that holds nothing more steps here, or wraps what does; others in the process train other models
        if called.isdisjoint({id(p) for p in parameters_of(optimizer)} - held):
            continue
        name, numbers = type(optimizer).__name__, [i for i, o in enumerate(seen.stepped, 1) if o is optimizer]
        if numbers:
            others.append(f"{name} steps after passes of its own, which --optimizer {numbers[0]} checks")
        else:
            others.append(f"{name} has not stepped so far")
    return {"not examined": "; ".join(others)} if others else {}


@dataclass(frozen=True)
class Operation:
    """One thing that a loop does in a step; parameters by their paths, optimizers by their numbers."""

    kind: str
    parameters: Sequence[str] = ()
    optimizer: int | None = None
    largest_norm: float = 0.0
    factor: float = 1.0

    @classmethod
    def of(cls, event: Event, paths: Mapping[int, str], optimizers: Sequence[Optimizer]) -> Operation:
        """Return what an event stands for."""
        changed = event.subject if event.kind in ("clip", "zero") else []
        numbers = [i for i, optimizer in enumerate(optimizers) if optimizer is event.subject]
        return cls(
            event.kind,
            [paths[id(p)] for p in changed if id(p) in paths],
            numbers[0] if numbers else None,
            event.largest_norm or 0.0,
            1.0 if event.factor is None else event.factor,
        )

    def change_gradients(self, parameters: Mapping[str, nn.Parameter], scale: float) -> None:
        """Do to the gradients of these parameters what the script did to them."""
        if self.kind == "clip":
            nn.utils.clip_grad_norm_([parameters[path] for path in self.parameters], self.largest_norm)
        elif self.kind == "zero":
            for path in self.parameters:
                parameters[path].grad = None
        else:
            factor = 1 / scale if self.kind == "unscale" else self.factor
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad *= factor


class WindowStep:
    """The whole step as a script makes it: a backward pass for each micro-batch, clipping, optimizers,
    schedules.

    It takes the batch of all micro-batches. If they have one shape, that is one batch with all their rows,
    which the step divides as the script did. If not, it holds the tensors of each micro-batch under names of
    their own, and ``loss`` says what the loss of all of them is.
    """

    def __init__(
        self,
        flows: Sequence[Flow],
        events: Sequence[Event],
        optimizers: Sequence[Optimizer],
        *,
        never_zeroed: Collection[int],
        joins: bool = True,
        warms_up: bool = False,
        shorter: ShorterWindow | None = None,
    ) -> None:
        self.flows = flows
        self.rows = [_rows_of(flow.batch) for flow in flows]
        self.joined = self._joined_batch() if joins or len(flows) == 1 else None
        """The rows of all micro-batches as one batch; None if they cannot be joined."""
        self.batch: dict[str, Tensor] = (
            side_by_side([flow.batch for flow in flows]) if self.joined is None else self.joined
        )
        """What the step takes."""
        self.shares = [1.0] if self.joined is not None else self._shares()
        """What to multiply the loss of each micro-batch by; none if nothing says what the loss of all is."""
        self.warms_up = warms_up
        """Whether the loop raises its rates by hand, which the step does not do."""
        self.shorter = shorter
        """The window of the next step, if it has fewer micro-batches, weighed as those of the first one."""
        paths = {id(p): path for path, p in flows[0].model.named_parameters()}
        self.never_zeroed = {paths[key] for key in never_zeroed if key in paths}
        """The parameters whose gradients are kept from one step to the next."""
        self.operations = [Operation.of(event, paths, optimizers) for event in events]
        """What the loop does, in order, until its optimizers have stepped and its schedules are set."""
        before_step = list(takewhile(lambda operation: operation.kind != "step", self.operations))
        self._operations_on_gradients = [each for each in before_step if each.kind != "schedule"]
        """Those that make the gradients of the first optimizer's step, which may ask for them again."""
        schedules = [each for each in before_step if each.kind == "schedule"]
        self._operations_after_gradients = [*schedules, *self.operations[len(before_step) :]]

    def _joined_batch(self) -> dict[str, Tensor] | None:
        """Return the rows of all micro-batches as one batch; None if they cannot be joined, or if the loss of
        a micro-batch cannot be computed of all of them at once.
        """
        first = self.flows[0]
        if len(self.flows) == 1:
            return first.batch
        batch = joined([flow.batch for flow in self.flows])
        return batch if batch is not None and _runs([first], [batch]) else None

    # ------------------------------------------------------------------------------------- its loss

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of the whole batch: a mean over the targets that its micro-batches count.

        Raises Unknown if the losses of micro-batches of several shapes are no means or sums over targets.
        """
        if not self.shares:
            raise Unknown("targets weigh differently: nothing says what the loss of all micro-batches is")
        if self.joined is not None:
            return self.flows[0].loss_of(model, batch)
        losses = [flow.loss_of(model, part) for flow, part, _ in self._parts(batch)]
        if len(losses) == 1:
            return losses[0]
        return torch.stack([share * loss for share, loss in zip(self.shares, losses, strict=True)]).sum()

    def _shares(self) -> list[float]:
        r"""What to multiply the loss of each micro-batch by, so that every counted target weighs the same.

        A micro-batch counts :math:`n_i` targets of the :math:`N` of the window, and their weights in its loss
        add up to :math:`W_i`: 1 if the loss is a mean over them, :math:`n_i` if it is their sum, :math:`n_i /
        N` if it is divided by the count of the whole window. In a mean over all, they add up to :math:`n_i /
        N`, so the factor is :math:`n_i / (N W_i)`. None are returned if targets of a micro-batch weigh
        differently.
        """
        counts, weights, roundings = list[int](), list[float](), list[float]()
        for flow in self.flows:
            # in float64: gradients in bfloat16 hide which targets weigh the same
            try:
                trace = awake_in_place(Trace(flow.model, flow.batch, flow.loss_of))
                targets = Facts(trace, Declaration()).targets
            except Exception:  # the script's own functions may insist on a mode or a number of rows
                return []
            weight = targets.weight[targets.counted]
            if not len(weight) or float(weight.max() - weight.min()) > targets.rounding * float(weight.max()):
                return []
            counts.append(len(weight))
            weights.append(float(weight.sum()))
            roundings.append(targets.rounding)
        total = sum(counts)
        shares: list[float] = []
        for n, weight, rounding in zip(counts, weights, roundings, strict=True):
            share = n / (total * weight)
            for exact in (1.0, 1 / total, n / total):  # a weight is read off a gradient, and rounded
                if isclose(share, exact, rel_tol=rounding):
                    share = exact
            shares.append(share)
        return shares

    # ------------------------------------------------------------------------------------- the step

    def part_of_each(self, part: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the first two rows of each micro-batch of the joined batch, as wide as this part of it is;
        all of it if the script does not run on them.
        """
        whole, rows = self.batch, min(2, *self.rows)
        if len(self.flows) == 1:
            return part
        begins = [sum(self.rows[:place]) for place in range(len(self.rows))]
        narrowed: dict[str, Tensor] = {}
        for name, x in whole.items():
            columns = tuple(slice(length) for length in part[name].shape[1:])
            narrowed[name] = torch.cat([x[begin : begin + rows][(slice(None), *columns)] for begin in begins])
        parts = [each for _, each, _ in self._parts(narrowed)]
        return narrowed if _runs(self.flows, parts) else whole

    def leads_to(self, recorded: Mapping[int, Tensor], proven: Sequence[Mapping[str, Tensor]]) -> bool:
        """Return whether the operations make the recorded gradients at the optimizer's step, by ``id`` of the
        parameter, out of those of the backward passes, by path.
        """
        model = self.flows[0].model
        of_model = dict(model.named_parameters())
        # stand-ins: the user's own gradients stay as they are
        stand_ins = {path: nn.Parameter(torch.empty_like(p)) for path, p in of_model.items()}
        passes = iter(proven)
        for operation in self.operations:
            if operation.kind == "backward":
                for path, gradient in next(passes).items():
                    held = stand_ins[path]
                    held.grad = gradient.clone() if held.grad is None else held.grad + gradient
            elif operation.kind == "step":
                break
            else:
                operation.change_gradients(stand_ins, self.flows[0].scale)
        for path, p in of_model.items():
            made, seen = stand_ins[path].grad, recorded.get(id(p))
            if made is not None and seen is not None:
                apart = float((made.double() - seen.double()).norm())
                if apart > MOST_APART * float(seen.double().norm()):
                    return False
        return True

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Tensor], optimizer: Any, scheduler: Any
    ) -> Tensor:
        """Make the step; return the mean of the losses."""
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        own = dict(unwrap(model).named_parameters())

        def closure() -> Tensor:
            self._zero(optimizers, own)
            return self._compute_gradients(model, batch, own)

        loss, scheduled = closure(), False
        for operation in self._operations_after_gradients:
            if operation.kind == "step" and operation.optimizer is not None:
                stepped = optimizers[operation.optimizer]
                stepped.step(closure) if needs_closure(stepped) else stepped.step()
            elif operation.kind == "schedule":
                if scheduler is not None and not scheduled:
                    scheduler.step()
                scheduled = isinstance(scheduler, SchedulersTogether)  # which steps all of them at once
            else:
                operation.change_gradients(own, self.flows[0].scale)
        return loss

    def _zero(self, optimizers: Sequence[Optimizer], own: Mapping[str, nn.Parameter]) -> None:
        """Zero the gradients that the script does not keep from one step to the next."""
        kept = {path: own[path].grad for path in self.never_zeroed}
        for path in kept:
            own[path].grad = None  # out of the way of what zeroes in place
        for each in optimizers:
            each.zero_grad()
        for path, gradient in kept.items():
            own[path].grad = gradient

    def _compute_gradients(
        self, model: nn.Module, batch: Mapping[str, Tensor], own: Mapping[str, nn.Parameter]
    ) -> Tensor:
        """Do what comes before the first optimizer's step; return the mean of the losses."""
        parts, losses = self._parts(batch), list[Tensor]()
        for operation in self._operations_on_gradients:
            if operation.kind == "backward":
                part = next(parts, None)
                if part is not None:  # there is only one in a batch that is not that of the whole window
                    losses.append(self._backward(model, *part))
            else:
                operation.change_gradients(own, self.flows[0].scale)
        return torch.stack(losses).mean()

    @staticmethod
    def _backward(model: nn.Module, flow: Flow, part: Mapping[str, Tensor], weight: float) -> Tensor:
        loss = flow.loss_of(model, part)
        (loss * (flow.factor * flow.scale * weight)).backward()
        return loss.detach()

    def _parts(self, batch: Mapping[str, Tensor]) -> Iterator[tuple[Flow, Mapping[str, Tensor], float]]:
        """Yield each flow with its part of the batch and a weight. A batch of another size is one part, with
        the weight of the whole window, unless it has the rows of ``part_of_each``.
        """
        if self.joined is None and batch.keys() == self.batch.keys():
            for place, flow in enumerate(self.flows):
                yield flow, {name: batch[_name_in(place, name)] for name in flow.batch}, 1.0
        elif self.joined is not None and (of_each := self._rows_of_each(_rows_of(batch))):
            begin = 0
            for flow, rows in zip(self.flows, of_each, strict=True):
                yield flow, {name: x[begin : begin + rows] for name, x in batch.items()}, 1.0
                begin += rows
        else:
            total = sum(flow.factor for flow in self.flows)
            yield self.flows[0], batch, total / self.flows[0].factor

    def _rows_of_each(self, rows: int) -> list[int]:
        """Return how many rows of a batch with so many belong to each micro-batch; none if nothing says."""
        few = [min(2, *self.rows)] * len(self.flows) if len(self.flows) > 1 else []
        return next((each for each in (self.rows, few) if sum(each) == rows), [])


def _runs(flows: Sequence[Flow], batches: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether flows run on these batches: a script's own functions may insist on a size."""
    for flow, batch in zip(flows, batches, strict=True):
        with restored(Setup(flow.model, dict(batch), loss=flow.loss_of)), torch.no_grad():
            try:
                flow.loss_of(flow.model, batch)
            except Exception:
                return False
    return True


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor] | None:
    """Return the rows of all micro-batches as one batch; None if they differ in shape."""
    shapes = [{name: x.shape[1:] for name, x in part.items()} for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        return None
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def side_by_side(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of every micro-batch; those of the first have its own names."""
    return {_name_in(place, name): x for place, part in enumerate(parts) for name, x in part.items()}


def _name_in(place: int, name: str) -> str:
    """Return the name of a micro-batch's tensor in the batch of all of them."""
    return f"{name} of {place + 1}" if place else name


def _rows_of(batch: Mapping[str, Tensor]) -> int:
    return next(iter(batch.values())).shape[0]

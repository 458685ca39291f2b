"""The whole training step of a recording: ``WindowStep`` repeats what the script's loop does in it.

A window is what a loop does until its optimizer steps: one backward pass or, where gradients are
accumulated, one for each of several micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.setups.flow import MOST_APART, Flow
from normlab.setups.recording import Event
from normlab.setups.setup import Declaration, Setup
from normlab.setups.step import needs_closure
from normlab.trace.awake import awake_in_place
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.restore import restored
from normlab.trace.tensors import unwrap
from normlab.trace.trace import Trace


class ShorterWindow(NamedTuple):
    """The window of a later step with fewer micro-batches than the first, such as the last of an epoch."""

    micro_batches: int
    weight: float
    """The sum of what their losses are multiplied by, which is 1 for the first window."""


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


@dataclass(frozen=True)
class Operation:
    """An ``Event`` that can be repeated on another model, with other optimizers: parameters are named by
    their paths, optimizers by their numbers.
    """

    kind: str
    """That of the event."""
    parameters: Sequence[str] = ()
    """For ``clip`` and ``zero``."""
    optimizer: int | None = None
    """For ``step``: its number among the optimizers of the setup; None if it is none of them."""
    largest_norm: float = 0.0
    norm_type: float = 2.0
    factor: float = 1.0

    @classmethod
    def of(cls, event: Event, paths: Mapping[int, str], optimizers: Sequence[Optimizer]) -> Operation:
        """Return what an event stands for."""
        changed = event.subject if event.kind in ("clip", "zero") else []
        numbers = [i for i, optimizer in enumerate(optimizers) if optimizer is event.subject]
        return cls(
            kind=event.kind,
            parameters=[paths[id(p)] for p in changed if id(p) in paths],
            optimizer=numbers[0] if numbers else None,
            largest_norm=event.largest_norm or 0.0,
            norm_type=event.norm_type,
            factor=1.0 if event.factor is None else event.factor,
        )

    def change_gradients(self, parameters: Mapping[str, nn.Parameter], scale: float) -> None:
        """Do to gradients what the script did to them.

        Args:
            parameters: All parameters of the model, by path.
            scale: What a ``GradScaler`` has multiplied the loss by.
        """
        if self.kind == "clip":
            clipped = [parameters[path] for path in self.parameters]
            nn.utils.clip_grad_norm_(clipped, self.largest_norm, self.norm_type)
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
    schedules. It is called as the ``step`` of a ``Setup``.

    It takes the batch of all micro-batches. If they have one shape, that is one batch with all their rows,
    which the step divides as the script did. If not, it holds the tensors of each micro-batch under names of
    their own, and ``loss`` says what the loss of all of them is.

    Args:
        flows: The flow of each micro-batch; all train one model.
        events: What the loop did in its first step.
        optimizers: Those of the setup, in its order.
        never_zeroed: By ``id``, the parameters whose gradients are kept from one step to the next.
        joins: Whether micro-batches may be joined into one batch at all.
        warms_up: Whether the loop raises its rates by hand, which the step does not do.
        shorter: The window of the next step, if it has fewer micro-batches, weighed as those of the first
            one.
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
        """How many rows each micro-batch has."""
        self.joined = self._joined_batch() if joins or len(flows) == 1 else None
        """The rows of all micro-batches as one batch; None if they cannot be joined."""
        self.batch: dict[str, Tensor] = (
            side_by_side([flow.batch for flow in flows]) if self.joined is None else self.joined
        )
        """What the step takes."""
        self.shares = [1.0] if self.joined is not None else self._shares()
        """What to multiply the loss of each micro-batch by; none if nothing says what the loss of all is."""
        self.warms_up = warms_up
        self.shorter = shorter
        paths = {id(p): path for path, p in flows[0].model.named_parameters()}
        self.never_zeroed = {paths[key] for key in never_zeroed if key in paths}
        """The parameters whose gradients are kept from one step to the next."""
        self.operations = [Operation.of(event, paths, optimizers) for event in events]
        """What the loop does, in order, until its optimizers have stepped and its schedules are set."""
        before_step = list(takewhile(lambda operation: operation.kind != "step", self.operations))
        self._operations_on_gradients = [each for each in before_step if each.kind != "schedule"]
        """Those that make the gradients of the first optimizer's step, which may ask for them again: LBFGS
        does so in its closure.
        """
        schedules = [each for each in before_step if each.kind == "schedule"]
        self._operations_after_gradients = [*schedules, *self.operations[len(before_step) :]]

    def _joined_batch(self) -> dict[str, Tensor] | None:
        """Return the rows of all micro-batches as one batch; None if they cannot be joined, or if the loss of
        a micro-batch cannot be computed from all of them at once.
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
            # a weight is read off a gradient, and rounded: one of the usual shares is meant to be exact
            for exact in (1.0, 1 / total, n / total):
                if isclose(share, exact, rel_tol=rounding):
                    share = exact
            shares.append(share)
        return shares

    # ------------------------------------------------------------------------------------- the step

    def part_of_each(self, part: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the first two rows of each micro-batch of the joined batch, cut to the width of ``part``;
        the whole joined batch if the script does not run on them.
        """
        if len(self.flows) == 1:
            return part
        rows = min(2, *self.rows)
        begins = [sum(self.rows[:place]) for place in range(len(self.rows))]
        narrowed: dict[str, Tensor] = {}
        for name, x in self.batch.items():
            columns = tuple(slice(length) for length in part[name].shape[1:])
            narrowed[name] = torch.cat([x[begin : begin + rows][(slice(None), *columns)] for begin in begins])
        parts = [each for _, each, _ in self._parts(narrowed)]
        return narrowed if _runs(self.flows, parts) else self.batch

    def leads_to(self, recorded: Mapping[int, Tensor], proven: Sequence[Mapping[str, Tensor]]) -> bool:
        """Return whether the operations make the recorded gradients out of those of the backward passes.

        Args:
            recorded: The gradients at the optimizer's step, by ``id`` of the parameter.
            proven: The gradients of each backward pass, by path.
        """
        parameters = dict(self.flows[0].model.named_parameters())
        # stand-ins: the user's own gradients stay as they are
        stand_ins = {path: nn.Parameter(torch.empty_like(p)) for path, p in parameters.items()}
        passes = iter(proven)
        for operation in self.operations:
            if operation.kind == "backward":
                for path, gradient in next(passes).items():
                    stand_in = stand_ins[path]
                    stand_in.grad = gradient.clone() if stand_in.grad is None else stand_in.grad + gradient
            elif operation.kind == "step":
                break
            else:
                operation.change_gradients(stand_ins, self.flows[0].scale)
        for path, p in parameters.items():
            computed, at_step = stand_ins[path].grad, recorded.get(id(p))
            if computed is not None and at_step is not None:
                apart = float((computed.double() - at_step.double()).norm())
                if apart > MOST_APART * float(at_step.double().norm()):
                    return False
        return True

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Tensor], optimizer: Any, scheduler: Any
    ) -> Tensor:
        """Make the step; return the mean of the losses."""
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        parameters = dict(unwrap(model).named_parameters())

        def closure() -> Tensor:
            self._zero(optimizers, parameters)
            return self._compute_gradients(model, batch, parameters)

        loss, has_scheduled_all = closure(), False
        for operation in self._operations_after_gradients:
            if operation.kind == "step" and operation.optimizer is not None:
                stepped = optimizers[operation.optimizer]
                if needs_closure(stepped):
                    stepped.step(closure)
                else:
                    stepped.step()
            elif operation.kind == "schedule":
                if scheduler is not None and not has_scheduled_all:
                    scheduler.step()
                has_scheduled_all = isinstance(scheduler, SchedulersTogether)
            else:
                operation.change_gradients(parameters, self.flows[0].scale)
        return loss

    def _zero(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
        """Zero the gradients that the script does not keep from one step to the next."""
        kept = {path: parameters[path].grad for path in self.never_zeroed}
        for path in kept:
            parameters[path].grad = None  # out of the way of what zeroes in place
        for optimizer in optimizers:
            optimizer.zero_grad()
        for path, gradient in kept.items():
            parameters[path].grad = gradient

    def _compute_gradients(
        self, model: nn.Module, batch: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
    ) -> Tensor:
        """Do what comes before the first optimizer's step; return the mean of the losses."""
        parts, losses = self._parts(batch), list[Tensor]()
        for operation in self._operations_on_gradients:
            if operation.kind == "backward":
                part = next(parts, None)
                if part is not None:  # a batch that is not that of the whole window has one part alone
                    losses.append(self._backward(model, *part))
            else:
                operation.change_gradients(parameters, self.flows[0].scale)
        return torch.stack(losses).mean()

    @staticmethod
    def _backward(model: nn.Module, flow: Flow, part: Mapping[str, Tensor], weight: float) -> Tensor:
        loss = flow.loss_of(model, part)
        (loss * (flow.factor * flow.scale * weight)).backward()
        return loss.detach()

    def _parts(self, batch: Mapping[str, Tensor]) -> Iterator[tuple[Flow, Mapping[str, Tensor], float]]:
        """Yield each flow with its part of the batch, and with a weight of its loss in the step.

        A batch of another size is one part, with the weight of the whole window, unless it has the rows of
        ``part_of_each``.
        """
        if self.joined is None and batch.keys() == self.batch.keys():
            for place, flow in enumerate(self.flows):
                yield flow, {name: batch[_name_in(place, name)] for name in flow.batch}, 1.0
        elif self.joined is not None and (rows_of_each := self._rows_of_each(_rows_of(batch))):
            begin = 0
            for flow, rows in zip(self.flows, rows_of_each, strict=True):
                yield flow, {name: x[begin : begin + rows] for name, x in batch.items()}, 1.0
                begin += rows
        else:
            total = sum(flow.factor for flow in self.flows)
            yield self.flows[0], batch, total / self.flows[0].factor

    def _rows_of_each(self, rows: int) -> list[int]:
        """Return how many of a batch's ``rows`` belong to each micro-batch; an empty list if nothing says."""
        if sum(self.rows) == rows:
            return self.rows
        if len(self.flows) == 1:
            return []
        of_part = [min(2, *self.rows)] * len(self.flows)
        return of_part if sum(of_part) == rows else []


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

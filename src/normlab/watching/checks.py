"""The properties that a watched training shows: those of ``check`` on its first step, and of its loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor, nn

from normlab.checks.check import examine, properties
from normlab.checks.property import Violation
from normlab.trace.prepared import LARGE_MODEL, Step
from normlab.trace.setup import Loss, Setup
from normlab.trace.tensors import call_model, map_tensors, tensors_in
from normlab.trace.untouched import same_globals, same_random_state, untouched
from normlab.watching.fault import Fault
from normlab.watching.loop import Finding, Loop, Rates, Scored
from normlab.watching.losses import Losses
from normlab.watching.optimizer_hooks import OptimizerSteps
from normlab.watching.recorder import Recorder, Reports, Trigger, report_of

TESTED: Final = ("targets", "causality", "gradients")
BUDGET_S: Final = 20.0
Batch = tuple[tuple[Any, ...], dict[str, Any]]


def first_violations(
    model: nn.Module, batch: Batch, scored: Sequence[Scored], own: object
) -> list[Violation]:
    """Test a copy of a model before its first step; ``own`` holds hooks on it, which the copy has not.

    The loss asks of the outputs what backward asked. A parameter that backward reached in another way is no
    violation. Empty for a model whose copy in float64 would take gigabytes, or of which ranks hold parts.
    """
    parameters = list(model.parameters())
    spread = any(hasattr(p, "to_local") for p in parameters)
    if spread or sum(p.numel() for p in parameters) > LARGE_MODEL:
        return []
    with same_globals(), same_random_state(0):
        twin = copy.deepcopy(model, {id(own): own})
        for hooks in (twin._forward_hooks, twin._forward_pre_hooks):
            for key in [k for k, hook in hooks.items() if getattr(hook, "__self__", None) is own]:
                hooks.pop(key)
        args, kwargs = batch
        given: Any = kwargs if not args else args if not kwargs else {"args": args, "kwargs": kwargs}
        setup = Setup(twin, given, _loss_of(scored, batch))
        with untouched(setup):
            tests = [one for one in properties() if one.name in TESTED]
            failures = examine(Step(setup, budget_s=BUDGET_S), tests).failures
    reached = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    return [v for v in failures if v.property != "gradients" or v.module not in reached]


def _loss_of(scored: Sequence[Scored], batch: Batch) -> Loss:
    mixed = all(batch)
    largest = max(map(_size, scored)) or 1.0  # a scaler's factor, among others
    asked = [(one.place, _asked(one, largest)) for one in scored]

    def loss(model: nn.Module, given: Any) -> Tensor:
        output = model(*given["args"], **given["kwargs"]) if mixed else call_model(model, given)
        outputs = dict(tensors_in(output))
        first, *others = (loss_of(outputs[place]) for place, loss_of in asked)
        return sum(others, first)

    return loss


def _size(scored: Scored) -> float:
    """The sum of the weights of a cross-entropy, else the largest entry of the gradient."""
    if scored.targets is not None:
        return float(scored.targets.weight.sum())
    return float(scored.gradient.abs().max())


def _asked(scored: Scored, unit: float) -> Callable[[Tensor], Tensor]:
    """A loss with the gradient that backward brought, in units: a cross-entropy, else a linear one."""
    targets, gradient = scored.targets, scored.gradient / unit
    if targets is None:
        return lambda x: (x * gradient.to(x)).sum()
    ids, counted, weight = targets.ids, targets.counted, targets.weight[targets.counted] / unit

    def cross_entropy(x: Tensor) -> Tensor:
        here = counted.to(x.device)
        each = F.cross_entropy(x[here], ids.to(x.device)[here].long(), reduction="none")
        return (each * weight.to(each)).sum()

    return cross_entropy


SILENT: Final = ("recovered", "flat", "idle")
"""Kinds of reports that are for the page alone."""


class Warned:
    """Collects the reports of a watch, and warns about each that is more than a note."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._reports: list[dict[str, Any]] = []

    def flights(self) -> list[dict[str, Any]]:
        """The reports so far."""
        return self._reports

    def add_flight(self, report: Mapping[str, Any]) -> None:
        """Add a report."""
        trigger, fault = report["trigger"], report["verdict"]
        self._reports.append(dict(report))
        if trigger["kind"] not in SILENT:
            lines = (f"flight recorder: {trigger['words']}; {fault['sentence']}", *fault["evidence"])
            self._warn("; ".join(lines))


class Checks:
    """The checks of one training, whose findings become reports, each once.

    ``own`` is whose hooks a model has that is not to be copied with them.
    """

    def __init__(
        self, reports: Reports, own: object, step: int = 0, rates: Mapping[int, float] | None = None
    ) -> None:
        self._reports, self._own = reports, own
        self._loop, self._rates = Loop(self._found), Rates(rates or {})
        self._begins = step == 0
        self._fresh = True
        """Whether no step was taken yet."""
        self._model: nn.Module | None = None
        self._taken: list[tuple[int, float]] = []
        self._advised: set[str] = set()

    def attach(self, model: nn.Module) -> None:
        """Follow the first steps of a model."""
        self._model = model
        self._loop.attach(dict(model.named_parameters()))

    def detach(self) -> None:
        """Take all hooks off."""
        self._loop.detach()

    def saw_loss(self, loss: Any) -> None:
        """Note a loss that the loop gave."""
        if isinstance(loss, Tensor):
            self._loop.saw_loss(loss, "loop")

    def saw_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, losses: Losses) -> None:
        """Note a call of the model in training, and the loss that it puts out."""
        loss = losses.see(output, kwargs)
        if self._loop.left:
            if loss is not None:
                self._loop.saw_loss(loss, "output")
            copied = (
                map_tensors((args, dict(kwargs)), lambda _, x: x.detach().clone()) if self._fresh else None
            )
            self._loop.saw_output(output, copied)

    def before(self, step: int, one: OptimizerSteps) -> None:
        """Look at the gradients that an optimizer is given, and before the first step at the model."""
        self._loop.before(step, one.parameters, one.optimizer)
        if not self._fresh:
            return
        self._fresh = False
        if self._begins and not one.optimizer.state:  # else the optimizer goes on
            self._rates = Rates({})
        scored, self._loop.scored = self._loop.scored, list[Scored]()
        if self._model is not None and scored:
            for v in first_violations(self._model, scored[0].batch, scored, self._own):
                self._found(step, Finding(v.property, v.evidence, v.advice, v.module))

    def after(self, parameters: Iterable[Tensor]) -> None:
        """Keep what the gradients are after the step of an optimizer."""
        self._loop.after(parameters)

    def took(self, step: int, lr: float) -> None:
        """Note a step that was taken."""
        self._taken.append((step, lr))
        self._loop.end_step()

    def look(self, recorder: Recorder) -> None:
        """Fetch the steps that are pending, and look at their rates, losses and norms."""
        recorder.fetch()
        taken, self._taken = self._taken, list[tuple[int, float]]()
        for step, lr in taken:
            if (one := self._rates.add(step, lr, recorder.numbers[step]["update norm"])) is not None:
                self._found(step, one)
        if taken:
            recorder.check_steps(taken[-1][0])

    def conclude(self, recorder: Recorder) -> None:
        """Look at the last steps, and at the training as a whole."""
        self.look(recorder)
        recorder.close()
        idle, steps = len(self._rates.idle), self._rates.steps
        step = recorder.ring[-1].step if recorder.ring else 0
        if idle > 2:
            self._note(step, "idle", f"the learning rate was 0 in {idle} of {steps} steps: no weight moved")
        if not recorder.curve.fell and not recorder.curve.diverged:
            self._note(step, "flat", f"the loss did not fall: {recorder.curve.words}")

    def _note(self, step: int, kind: str, words: str) -> None:
        self._reports.add_flight(
            report_of(step, Trigger(kind, step, step, words), Fault(words, kind, step=step), ())
        )

    def _found(self, step: int, finding: Finding) -> None:
        name, words, advice, module = finding
        if advice not in self._advised:
            self._advised.add(advice)
            where = f"{name} at {module}" if module else name
            fault = Fault(f"{where}: {advice or words}", name, module or name, step)
            self._reports.add_flight(report_of(step, Trigger(name, step, step, words), fault, ()))

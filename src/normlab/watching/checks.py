"""The properties of a watched training: those of ``check`` on its first step, and those of its loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor, nn

from normlab.checks.check import examine, properties
from normlab.checks.property import Violation
from normlab.errors import UserError
from normlab.private_torch import tables_of_forward_hooks
from normlab.setups.setup import Loss, Setup
from normlab.trace.copies import copied_model, uses_of_copy
from normlab.trace.passes import LARGE_MODEL
from normlab.trace.restore import restored, same_globals, same_random_state
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import call_model, map_tensors, tensors_in
from normlab.watching import NOTES
from normlab.watching.fault import Fault
from normlab.watching.flight import Reports, Trigger, report_of
from normlab.watching.loop import Loop, Scored
from normlab.watching.losses import Losses
from normlab.watching.meter import OptimizerSteps
from normlab.watching.rates import RateHistory
from normlab.watching.recorder import Recorder

TESTED: Final = ("targets", "causality", "gradients")
"""The properties of ``check`` that a copy is tested for: they need no more than the arguments of one call."""
BUDGET_S: Final = 20.0
Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call."""


def _first_violations(
    model: nn.Module, batch: Batch, scored: Sequence[Scored], watch: object
) -> list[Violation]:
    """Test a copy of a model before its first step; ``watch`` holds hooks on the model that the copy lacks.

    The loss gives the outputs the gradient that backward gave them. A parameter that backward reached some
    other way is not a violation. Empty if a float64 copy would take gigabytes, if ranks hold parts, or if the
    copy uses the model in training, so that nothing may be concluded from it.
    """
    parameters = list(model.parameters())
    spread = any(hasattr(p, "to_local") for p in parameters)
    if spread or sum(p.numel() for p in parameters) > LARGE_MODEL:
        return []
    with same_globals(), same_random_state(0):
        model_copy = _copied_without_hooks(model, watch)
        given = _as_one(batch)
        setup = Setup(model_copy, given, _loss_of(scored, batch))
        with restored(setup):
            strayed, _ = uses_of_copy(model_copy, model, given, setup.loss_of)
            if strayed.paths:
                return []
            tests = [test for test in properties() if test.name in TESTED]
            try:
                failures = examine(StepUnderTest(setup, budget_s=BUDGET_S), tests).failures
            except UserError:  # a pass takes longer than the time that is spent on this
                return []
    reached = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    return [v for v in failures if v.property != "gradients" or v.module not in reached]


def _copied_without_hooks(model: nn.Module, watch: object) -> nn.Module:
    """Return a copy of a model without the hooks of a watch, and without a copy of the watch behind them."""
    model_copy = copied_model(model, {id(watch): watch})
    for hooks in tables_of_forward_hooks(model_copy):
        of_watch = [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is watch]
        for key in of_watch:
            hooks.pop(key)
    return model_copy


def _as_one(batch: Batch) -> Any:
    """Return the arguments of a call in the form of a batch that ``_loss_of`` calls the model with."""
    args, kwargs = batch
    if not kwargs:
        return args if args else kwargs
    return {"args": args, "kwargs": kwargs} if args else kwargs


def _loss_of(scored: Sequence[Scored], batch: Batch) -> Loss:
    """Return a loss that gives the outputs the gradients that backward gave them, up to one factor."""
    has_both = all(batch)
    unit = max(map(_size, scored)) or 1.0  # a scaler's factor, among others
    parts = [(output.place, _loss_of_output(output, unit)) for output in scored]

    def loss(model: nn.Module, given: Any) -> Tensor:
        output = model(*given["args"], **given["kwargs"]) if has_both else call_model(model, given)
        outputs = dict(tensors_in(output))
        first, *others = (loss_of(outputs[place]) for place, loss_of in parts)
        return sum(others, first)

    return loss


def _size(scored: Scored) -> float:
    """Return the sum of the weights of a cross-entropy, else the largest entry of the gradient."""
    if scored.targets is not None:
        return float(scored.targets.weight.sum())
    return float(scored.gradient.abs().max())


def _loss_of_output(scored: Scored, unit: float) -> Callable[[Tensor], Tensor]:
    """Return a loss with the gradient that backward gave, in units: a cross-entropy, else a linear one."""
    targets, gradient = scored.targets, scored.gradient / unit
    if targets is None:
        return lambda x: (x * gradient.to(x)).sum()
    ids, counted, weight = targets.ids, targets.counted, targets.weight[targets.counted] / unit

    def cross_entropy(x: Tensor) -> Tensor:
        here = counted.to(x.device)
        losses = F.cross_entropy(x[here], ids.to(x.device)[here].long(), reduction="none")
        return (losses * weight.to(losses)).sum()

    return cross_entropy


class WatchReports:
    """Collects the reports of a watch, and warns about each one that is more than a note."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._reports: list[dict[str, Any]] = []

    def flights(self) -> list[dict[str, Any]]:
        return self._reports

    def add_flight(self, report: Mapping[str, Any]) -> None:
        trigger, fault = report["trigger"], report["verdict"]
        self._reports.append(dict(report))
        if trigger["kind"] not in NOTES:
            parts = [trigger["words"], fault["sentence"], *fault["evidence"]]
            self._warn(f"flight recorder: {'; '.join(parts)}")


class Checks:
    """The checks of one training; each finding becomes one report.

    ``watch`` is the object whose hooks are on the model and must not be copied with it.
    """

    def __init__(
        self, reports: Reports, watch: object, step: int = 0, rates: Mapping[int, float] | None = None
    ) -> None:
        self._reports, self._watch = reports, watch
        self.loop, self._rates = Loop(self._add), RateHistory(rates or {})
        self._begins = step == 0
        self._fresh = True
        """Whether no step has been taken yet."""
        self._model: nn.Module | None = None
        self._advised: set[str] = set()

    def attach(self, model: nn.Module) -> None:
        self._model = model
        self.loop.attach(dict(model.named_parameters()))

    def saw_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, losses: Losses) -> None:
        """Look at a call of the model in training, and at the loss in its output."""
        loss = losses.see(output, kwargs)
        if not self.loop.left:
            return
        if loss is not None:
            self.loop.saw_loss(loss, "output")
        given = (args, dict(kwargs)) if self._fresh else None
        self.loop.saw_output(output, map_tensors(given, lambda _, x: x.detach().clone()))

    def before(self, step: int, steps: OptimizerSteps) -> None:
        """Look at the gradients that an optimizer gets and, before the first step, at the model."""
        self.loop.before(step, steps.parameters, steps.optimizer)
        if not self._fresh:
            return
        self._fresh = False
        if self._begins and not steps.optimizer.state:  # else the optimizer was resumed
            self._rates = RateHistory({})
        scored = self.loop.take_scored()
        if self._model is not None and scored:
            for violation in _first_violations(self._model, scored[0].batch, scored, self._watch):
                self._add(step, violation)

    def look(self, recorder: Recorder) -> None:
        """Fetch the pending steps, and look at their rates, losses and norms."""
        taken = recorder.fetch()
        for record in taken:
            moved = recorder.numbers[record.step]["update norm"]
            violation = self._rates.add(record.step, record.lr, moved)
            if violation is not None:
                self._add(record.step, violation)
        if taken:
            recorder.check_steps(taken[-1].step)

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
        trigger, fault = Trigger(kind, step, step, words), Fault(words, kind, step=step)
        self._reports.add_flight(report_of(step, trigger, fault, ()))

    def _add(self, step: int, violation: Violation) -> None:
        """Report a violation, once for each advice."""
        if violation.advice in self._advised:
            return
        self._advised.add(violation.advice)
        where = violation.property
        if violation.module:
            where = f"{violation.property} at {violation.module}"
        sentence = f"{where}: {violation.advice or violation.evidence}"
        trigger = Trigger(violation.property, step, step, violation.evidence)
        fault = Fault(sentence, violation.property, violation.module or violation.property, step)
        self._reports.add_flight(report_of(step, trigger, fault, ()))

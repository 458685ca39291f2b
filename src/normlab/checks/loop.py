"""Properties of the loop: the user's own step, the schedule of its rates, and whether it learns."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, Final

import torch
from torch.optim import SGD, Optimizer

from normlab.checks.property import Answers, Untestable, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.optimizers import Rates, rates_of, resumed
from normlab.trace.rehearsal import Rehearsal, Seen, fit, learnt, plain_step, splits, written

SMALL: Final = 2.0**-40
"""Factor of gradients that no clipping touches; powers of two round nothing."""
LARGE: Final = 2.0**20
"""Factor of gradients that every clipping touches."""


def rehearsal(step: Step, *, exact: bool = False, whole: Any = None) -> Rehearsal:
    """Copies of model, optimizers and scheduler, and the user's step to run on them, or a plain one."""
    parts = step.together()
    whole = whole or step.setup.step or plain_step(step.loss_of)
    several = isinstance(step.setup.optimizer, (list, tuple)) or len(parts[1]) > 1
    return Rehearsal(*parts, whole, several, exact)


def twice(step: Step) -> tuple[Rehearsal, Seen, Seen]:
    """Run the step two times from equal weights, in float64 where that can be had, without clipping."""
    if "twice" not in step.kept:
        _ = step.exact
        for exact in (True, False) if step.is_exact and not step.large else (False,):
            with suppress(Exception) if exact else nullcontext():
                run = rehearsal(step, exact=exact)
                first = run.run(step.stepped, scale=SMALL)
                step.kept["twice"] = exact, first, run.run(first.batch, scale=SMALL)
                break
    exact, first, again = step.kept["twice"]
    return rehearsal(step, exact=exact), first, again


def rates(step: Step) -> Rates:
    """The rates that the schedule will give, simulated once."""
    if "rates" not in step.kept:
        step.kept["rates"] = rates_of(step.setup)
    return step.kept["rates"]


def _floor(step: Step, run: Rehearsal) -> float:
    """The share of a gradient that rounding may change."""
    if not run.exact and "gradient" not in step.kept:
        step.kept["gradient"] = run.rounding(step.stepped, step.loss_of)
    return step.rounding if run.exact else step.kept["gradient"]


@property_of("loop", explains=["repeats", "overfit"], passes=12)
def step(step: Step) -> Answers:
    """The optimizer sees the gradient of the loss on the whole batch: fresh, averaged, clipped, once a step.

    The user's step runs on copies, in float64 and without dropout. Its gradients are made so small that no
    clipping acts, when they are compared with those of the loss, and so large that every clipping acts, when
    that is looked at.
    """
    if step.setup.step is None:
        raise Untestable("no step was handed over: pass step=, of model, batch, optimizer and scheduler")
    run, seen, _ = twice(step)
    tests = (_steps_once, _is_fresh, _clips, _averages, _trains)
    yield from chain.from_iterable(test(step, run, seen) for test in tests)


def _steps_once(step: Step, run: Rehearsal, seen: Seen) -> Answers:
    counts = [seen.calls.count(i) for i in range(len(run.optimizers))]
    if not any(counts):
        if any(any(c != "scheduler" for c in run.run(step.stepped).calls) for _ in range(7)):
            raise Untestable("it steps the optimizer in some calls only; hand over the step of a whole batch")
        yield fail("step", "it never calls step() of the optimizer that it is given", "call it")
    elif max(counts) > 1:
        evidence = f"it steps the optimizer {max(counts)} times in one batch of {len(seen.training)} passes"
        yield fail("step", evidence, "step once, after the last backward")
    elif min(counts) < 1:
        yield fail("step", f"optimizer {counts.index(0) + 1} of {len(counts)} is never stepped", "step each")


def _is_fresh(step: Step, run: Rehearsal, seen: Seen) -> Answers:
    other = fit(step.kept["twice"][2].gradients, seen.gradients)
    if other.apart > _floor(step, run) and written(step.stepped, seen.batch) is None:
        evidence = f"from the same weights the second gradient is {other.factor:.3g} times the first"
        yield fail("step", evidence, "zero the gradients once in each step; keep nothing for the next")


def _clips(step: Step, run: Rehearsal, seen: Seen) -> Answers:
    if not seen.clips:
        return
    seen = run.run(step.stepped, scale=LARGE)
    spared = sorted(seen.nonzero - {run.names.get(i) for i in seen.clipped})
    advice = "clip all parameters after the last backward, and after unscaling, right before the step"
    if seen.late:
        yield fail("step", "gradients grow in a backward after they were clipped", advice)
    elif seen.undone:
        left, norm = seen.undone
        yield fail("step", f"the norm is clipped to {left:.4g}, and is {norm:.4g} in the optimizer", advice)
    elif spared:
        yield fail("step", f"{len(spared)} parameters are not clipped ({', '.join(spared[:3])})", advice)


def _averages(step: Step, run: Rehearsal, seen: Seen) -> Answers:
    want = run.gradients(step.stepped, step.loss_of, training=not seen.training or any(seen.training))
    own, floor, passes = fit(seen.gradients, want, SMALL), _floor(step, run), len(seen.training)
    if not any(bool(g.any()) for g in want.values()):
        raise Untestable("the loss has no gradient in what the optimizer holds")
    if own.apart <= floor:
        return
    if not seen.nonzero:
        yield fail("step", "every gradient is zero in the optimizer", "zero them before backward")
        return
    if seen.moved:
        raise Untestable("the step writes to the weights between its passes, so that no gradient is right")
    if fit(run.run(step.stepped, scale=SMALL, seed=1).gradients, seen.gradients).rest > floor:
        raise Untestable("the step draws numbers of its own, so that no two of its gradients are the same")
    if own.rest <= floor:
        evidence = f"the gradient is {own.factor:.4g} times that of the whole batch, in {passes} passes"
        yield fail("step", evidence, "divide by the number of micro-batches; unscale before the step")
        return
    if passes > 1 and not splits(step.exact.again(training=True), step.facts, step.rounding):
        raise Untestable("the loss is no mean over rows: micro-batches have another than the whole batch")
    evidence = f"{own.rest:.1%} of the gradient is not that of the whole batch, in {passes} passes"
    yield fail("step", evidence, "weigh micro-batches by the targets that they count; use the same loss")


def _trains(step: Step, run: Rehearsal, seen: Seen) -> Answers:
    """Whether dropout, if there is any, acts in it."""
    if not seen.training or any(seen.training):
        return
    if distance(step.logits(step.plain), step.logits(step.plain.again(training=True))) > step.rounding:
        evidence = "its model is in evaluation mode, and would differ in training mode: no dropout acts"
        yield fail("step", evidence, "call model.train() at the start of the step")


@property_of("loop", explains=["overfit"], passes=4)
def schedule(step: Step) -> Answers:
    """The rate reaches what is asked, stays above zero, and moves once in each step, also when it is resumed.

    It is simulated on copies, whose optimizers are not stepped, over the steps that are declared.
    """
    scheduler, optimizer = step.setup.scheduler, step.setup.optimizer
    for name in ("scheduler", "optimizer"):
        if getattr(step.setup, name) is None:
            raise Untestable(f"no {name} was handed over: pass it")
    mine = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    steered = getattr(scheduler, "optimizer", None)
    if isinstance(steered, Optimizer) and all(steered is not o for o in mine):
        if not all(isinstance(o, Optimizer) for o in mine):
            raise Untestable("the scheduler has an optimizer of its own: pass that, or a function for each")
        yield fail("scheduler", "it sets the rates of another optimizer", "build it with this optimizer")
        return
    course = rates(step)
    if isinstance(course.ended, TypeError) and len(course.steps) == 1:
        raise Untestable("its rates follow what step() is given, and cannot be foretold")
    tests = (_peak, _planned, _moves_once, _resumes)
    yield from chain.from_iterable(test(step, course) for test in tests)


def _peak(step: Step, course: Rates) -> Answers:
    asked, peak, count = step.declare.peak_lr or step.setup.lr, max(course.top), course.steps[-1] + 1
    if peak <= 0:
        yield fail("scheduler", f"the rate is never above 0 in {count} steps", "count steps, not epochs")
    elif asked is not None and not course.reaches(asked):
        more = "" if step.declare.steps else "; declare steps= if more are planned"
        evidence = f"the peak is {peak:.4g} in {count} steps, and {asked:.4g} is asked{more}"
        yield fail("scheduler", evidence, "a LambdaLR multiplies the optimizer's rate; count steps")


def _planned(step: Step, course: Rates) -> Answers:
    """Over the steps that are planned, the schedule goes on, and is at 0 at its ends at most."""
    if (planned := step.declare.steps) is None:
        return
    lowest, zeros = min(map(min, course.rates)), sum(a == b == 0 for a, b in pairwise(course.top))
    share = zeros / len(course.top)
    evidence = f"the rate stays 0 in {share:.2%} of the {planned} steps that are planned"
    if course.ended is not None:
        evidence = f"step() raises after {course.steps[-1]} of {planned} steps: {course.ended}"
        yield fail("scheduler", evidence, "make it as long as the training")
    elif lowest < 0:
        yield fail("scheduler", f"a rate falls to {lowest:.3g}, and drives the loss up", "end it at 0")
    elif course.rises_again and not course.periodic:
        evidence = f"it is over before the {planned} planned steps: the rate falls, and rises again"
        yield fail("scheduler", evidence, "make it as long as the training; use warm restarts to begin anew")
    elif zeros > 2:
        advice = "count its steps as the optimizer's are counted"
        yield fail("scheduler", evidence, advice) if share > 0.01 else note("scheduler", evidence)
    elif course.rises_again:
        yield note("scheduler", f"the rate falls and rises again and again in the {planned} planned steps")


def _moves_once(step: Step, course: Rates) -> Answers:
    if step.setup.step is None:
        return
    run = rehearsal(step)
    calls = [*run.run(step.stepped).calls, *run.run(step.stepped).calls]
    moved, steps = calls.count("scheduler"), calls.count(0)
    if not moved:
        yield note("scheduler", "the step does not step it")
    elif moved > steps > 0:
        evidence = f"it is stepped {moved / steps:.3g} times for each step of the optimizer"
        yield fail("scheduler", evidence, "step it once, after the optimizer")
    elif steps and calls[0] == "scheduler":
        yield fail("scheduler", "it is stepped before the optimizer: its first rate is lost", "step it after")


def _resumes(step: Step, course: Rates) -> Answers:
    if not hasattr(course.scheduler, "state_dict"):
        yield note("scheduler", "it has no state_dict, so that no checkpoint can hold it")
        return
    own, loaded = resumed(step.setup)
    if own != loaded:
        evidence = f"loaded after 3 steps it goes on with the rate {loaded[0]:.4g}, not {own[0]:.4g}"
        yield fail("scheduler", evidence, "keep all that it counts in its state_dict")


@property_of("loop", explains=["overfit"], passes=7)
def repeats(step: Step) -> Answers:
    """The same batch gives the same step twice, from the same weights and seeds, and is left as it was."""
    place = "step" if step.setup.optimizer is not None else "loss"
    if step.setup.optimizer is None:
        step = copy.copy(step)
        step.setup = replace(step.setup, optimizer=lambda model: SGD(model.parameters()), step=None)
    run, first, again = twice(step)
    if (where := written(step.stepped, first.batch)) is not None:
        yield fail(where, "the step writes into the batch, which is another from then on", "change a copy")
    elif fit(again.gradients, first.gradients).apart > _floor(step, run):
        evidence = "the same weights get another gradient from the same batch and seeds"
        yield fail(place, evidence, "look for what outlives a step: globals, counters, own generators")


@property_of("learns", passes=30)
def overfit(step: Step) -> Answers:
    """A small batch is learnt by the user's own step: its loss falls below where it began, and stays there.

    Dropout is off and the seeds are the same in each step, so that at a rate of 0 the loss would not change.
    Rates are those of the schedule's peak, reached in ten steps.
    """
    if step.setup.optimizer is None:
        raise Untestable("no optimizer was handed over: pass optimizer=")
    batch, peaks = step.stepped, rates(step).peaks
    if step.facts.rows > 4:
        with suppress(Exception):
            small = step.facts.with_rows(torch.arange(4))
            rehearsal(step).run(small)
            batch = small
    by_hand = step.setup.scheduler is None and step.setup.step is not None
    losses = rehearsal(step).losses(batch, step.loss_of, () if by_hand else peaks)
    if learnt(losses):
        return
    plain = rehearsal(step, whole=plain_step(step.loss_of))
    own = step.setup.step is not None and learnt(plain.losses(batch, step.loss_of, peaks))
    place = "step" if own else "optimizer"
    evidence = f"{len(losses) - 1} steps on one batch bring its loss from {losses[0]:.4g} to {losses[-1]:.4g}"
    with suppress(Unknown):
        if step.facts.trained and math.isfinite(losses[-1]):
            yield note(place, evidence)
            return
    yield fail(place, evidence, "lower the rate if the loss grows, raise it if it stays")

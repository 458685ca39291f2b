"""Properties of the schedule: its peak, its course over the planned steps, and how it resumes."""

from __future__ import annotations

from itertools import chain, pairwise

from torch.optim import Optimizer

from normlab.checks.property import Answers, fail, needs, note, property_of
from normlab.trace.facts import Unknown
from normlab.trace.optimizers import Rates, resumed
from normlab.trace.step_under_test import StepUnderTest


@property_of("loop", explains=["overfit"], passes=4)
def schedule(step: StepUnderTest) -> Answers:
    """The learning rate reaches its intended peak, stays above 0 and moves once a step, even on resuming."""
    needs(step.setup.scheduler, "there is no scheduler: pass scheduler=")
    mine, steered = step.setup.optimizers, getattr(step.setup.scheduler, "optimizer", None)
    # by its groups: a wrapper around an optimizer, such as Accelerate's, steers what it wraps
    steers_mine = any(
        group is other
        for o in mine
        if isinstance(o, Optimizer)
        for group in o.param_groups
        for other in getattr(steered, "param_groups", ())
    )
    if isinstance(steered, Optimizer) and not steers_mine:
        why = "the scheduler has an optimizer of its own: pass that, or a function for each"
        needs(all(isinstance(o, Optimizer) for o in mine), why)
        yield fail("scheduler", "it sets the rates of another optimizer", "build it with this optimizer")
    course = step.rates
    if isinstance(course.ended, TypeError) and len(course.steps) == 1:
        raise Unknown("its rates depend on what step() is given, and cannot be known in advance")
    yield from chain(_peak(step, course), _planned(step, course), _moves_once(step), _resumes(step, course))


def _peak(step: StepUnderTest, course: Rates) -> Answers:
    asked, peak, count = step.declare.peak_lr or step.setup.lr, max(course.top), course.steps[-1] + 1
    if peak <= 0:
        yield fail("scheduler", f"the rate is never above 0 in {count} steps", "count steps, not epochs")
    elif asked is not None and not course.reaches(asked):
        more = "" if step.declare.steps else "; declare steps= if more are planned"
        say = f"the peaks are {sorted({*course.peaks})} in {count} steps, but {asked:.4g} was asked for{more}"
        yield fail("scheduler", say, "a LambdaLR multiplies the optimizer's rate; count steps")


def _planned(step: StepUnderTest, course: Rates) -> Answers:
    """Over the planned steps, the schedule does not end, and is at 0 only at its ends."""
    if (planned := step.declare.steps) is None:
        return
    lowest, zeros = min(map(min, course.rates)), sum(a == b == 0 for a, b in pairwise(course.top))
    share, length = zeros / len(course.top), "make it as long as the run"
    if course.ended is not None:
        say = f"step() raises after {course.steps[-1]} of {planned} steps: {course.ended}"
        yield fail("scheduler", say, length)
    elif lowest < 0:
        yield fail("scheduler", f"a rate falls to {lowest:.3g}, and drives the loss up", "end it at 0")
    elif course.rises_again and not course.periodic:
        say = f"it is over before the {planned} planned steps: the rate falls, and rises again"
        yield fail("scheduler", say, f"{length}; use warm restarts to start again")
    elif zeros > 2:
        say = f"the rate stays 0 in {share:.2%} of the {planned} planned steps"
        advice = "count its steps in the same way as the optimizer's"
        yield fail("scheduler", say, advice) if share > 0.01 else note("scheduler", say)
    elif course.rises_again:
        yield note("scheduler", f"the rate falls and rises again and again in the {planned} planned steps")


def _moves_once(step: StepUnderTest) -> Answers:
    if step.setup.step is None:
        return
    run = step.rehearsal()
    calls = [*run.run(step.stepped).calls, *run.run(step.stepped).calls]
    moved, steps = calls.count("scheduler"), calls.count(0)
    if not moved:
        yield note("scheduler", "the step does not step it")
    elif moved > steps > 0:
        say = f"it is stepped {moved / steps:.3g} times for each step of the optimizer"
        yield fail("scheduler", say, "step it once, after the optimizer")
    elif steps and calls[0] == "scheduler":
        yield fail("scheduler", "it is stepped before the optimizer: its first rate is lost", "step it after")


def _resumes(step: StepUnderTest, course: Rates) -> Answers:
    if not hasattr(course.scheduler, "state_dict"):
        yield note("scheduler", "it has no state_dict, so no checkpoint can hold it")
        return
    own, loaded = resumed(step.setup)
    if own != loaded:
        say = f"loaded after 3 steps it continues with the rate {loaded[0]:.4g}, not {own[0]:.4g}"
        yield fail("scheduler", say, "keep all that it counts in its state_dict")

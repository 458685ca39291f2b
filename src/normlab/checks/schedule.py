"""Properties of the schedule: its peak, its course over the planned steps, and how it resumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain, pairwise

from torch.optim import Optimizer

from normlab.base.units import told_apart
from normlab.checks.property import AT_REST, WHOLE_STEP, Answers, fail, needs, note, property_of
from normlab.trace.dry_run import LEARNT
from normlab.trace.facts import Unknown
from normlab.trace.optimizers import steps_taken
from normlab.trace.rates import Rates, factor_of_each, resumed
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.updates import FOLLOWED, rates_by_themselves, rates_in_own_step


@property_of("loop", explains=["overfit"], passes=1, steps=3, uses=AT_REST)
def schedule(step: StepUnderTest) -> Answers:
    """The learning rate reaches its intended peak, stays above 0 and moves once a step, even on resuming.

    Nothing but the schedule moves it: a step that multiplies its own rates is a mistake if that halves or
    doubles one within the steps that a test of learning takes.
    """
    yield from _compounds(step)
    needs(step.setup.scheduler, "no scheduler changes the rates")
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
    course = step.whole_step.rates
    if isinstance(course.ended, TypeError) and len(course.steps) == 1:
        raise Unknown("its rates depend on what step() is given, and cannot be known in advance")
    yield from chain(_peak(step, course), _planned(step, course), _moves_once(step), _resumes(step, course))


def _compounds(step: StepUnderTest) -> Answers:
    """Rates that each step multiplies once more, such as factors by layer that are applied in every step."""
    ways: dict[str, Callable[[StepUnderTest], Iterator[list[float]]]] = {"optimizer": rates_by_themselves}
    by_hand = step.setup.scheduler is None and step.setup.step is not None
    if by_hand and step.setup.cannot.keys().isdisjoint(WHOLE_STEP):
        ways["step"] = rates_in_own_step
    for place, taken in ways.items():
        by_group = list(zip(*taken(step), strict=True))
        factors = [factor_of_each(shares) for shares in by_group]
        moved = [factor for factor in factors if factor != 1]
        if not moved:
            continue
        worst = max(moved, key=lambda factor: abs(math.log(factor)))
        first = step.whole_step.rates.rates[0][factors.index(worst)]
        say = (
            f"each step multiplies the rates of {len(moved)} of {len(factors)} groups by a factor of its own"
        )
        say += f", one of them by {worst:.4g}: {FOLLOWED} steps take it from {first:.4g} "
        say += f"to {first * by_group[factors.index(worst)][-1]:.4g}"
        if 0.5 < worst**LEARNT < 2:
            yield note(place, say)
        else:
            yield fail(place, say, "multiply the rates once, where the groups are made; or use a scheduler")


def _peak(step: StepUnderTest, course: Rates) -> Answers:
    asked, whole = step.declare.peak_lr or step.setup.lr, course.from_the_first
    peak, count = max(whole.top), whole.steps[-1] + 1
    if max(course.top) <= 0:
        say = f"the rate is 0 at all {len(course.steps)} steps that were looked at, up to step {count}"
        yield fail("scheduler", say, "count steps, not epochs")
    elif asked is not None and not whole.reaches(asked):
        more = "" if step.declare.steps else "; declare steps= if more are planned"
        say = f"the peaks are {sorted({*whole.peaks})} in {count} steps, but {asked:.4g} was asked for"
        if peak < asked and course.taken and not course.past:
            why = f"its peak may lie in the {course.taken} steps that it has taken, whose rates are not known"
            yield note("scheduler", f"{say}; {why}")
            return
        yield fail("scheduler", say + more, "a LambdaLR multiplies the optimizer's rate; count steps")
    elif course.top[0] == 0 and not course.taken:
        yield note("scheduler", "its first rate is 0: that step changes nothing")


def _planned(step: StepUnderTest, course: Rates) -> Answers:
    """Over the planned steps, the schedule does not end, and is at 0 only at its ends."""
    if (planned := step.declare.steps) is None:
        return
    lowest, zeros = min(map(min, course.rates)), sum(a == b == 0 for a, b in pairwise(course.top))
    share, length = zeros / len(course.top), "make it as long as the run"
    if course.ended is not None:
        say = f"step() raises after {course.taken + course.steps[-1]} of {planned} steps: {course.ended}"
        yield fail("scheduler", say, length)
    elif lowest < 0:
        yield fail("scheduler", f"a rate falls to {lowest:.3g}: a step goes uphill", "end it at 0")
    elif course.rises_again and not course.periodic:
        say = f"the rate falls and rises again within the {planned} planned steps: it is over too soon"
        yield fail("scheduler", say, f"{length}; use warm restarts to start again")
    elif course.rises_to_the_end and not course.periodic:
        before, last = told_apart(course.top[-2], course.top[-1])
        say = f"the rate rises up to the last of {planned} planned steps, from {before} to {last}"
        yield fail("scheduler", say, "let it fall: a share of steps done rises, 1 minus that share falls")
    elif zeros > 2:
        say = f"the rate stays 0 in {share:.2%} of the {planned} planned steps"
        advice = "count its steps in the same way as the optimizer's"
        yield fail("scheduler", say, advice) if share > 0.01 else note("scheduler", say)
    elif course.rises_again:
        yield note("scheduler", f"the rate falls and rises again and again in the {planned} planned steps")


def _moves_once(step: StepUnderTest) -> Answers:
    if step.setup.step is None:
        return
    run = step.whole_step.dry_run()
    calls = [*run.run(step.stepped).calls, *run.run(step.stepped).calls]
    moved, steps = calls.count("scheduler"), calls.count(0)
    if not moved:
        yield note("scheduler", "the step does not step it")
    elif moved > steps > 0:
        say = f"it is stepped {moved / steps:.3g} times for each step of the optimizer"
        yield fail("scheduler", say, "step it once, after the optimizer")
    elif steps and calls[0] == "scheduler":
        yield fail("scheduler", "it is stepped before the optimizer: its first rate is lost", "step it after")
    elif moved == steps:
        yield from _keeps_up(step)


def _keeps_up(step: StepUnderTest) -> Answers:
    """Where each step moves both, a schedule of fewer steps than the optimizer's was not loaded with it, or
    begins a new phase of the training on purpose.
    """
    counted = getattr(step.setup.scheduler, "last_epoch", None)
    taken = steps_taken(step.setup.optimizers)
    # what was recorded may be as it is after the optimizer's step, and before the schedule's
    if isinstance(counted, int) and taken > counted + 1:
        say = f"the optimizer's state holds {taken} steps, and the schedule {counted}: it begins anew"
        yield note("scheduler", f"{say}; to resume, load its state with that of the optimizer")


def _resumes(step: StepUnderTest, course: Rates) -> Answers:
    if not hasattr(course.scheduler, "state_dict"):
        yield note("scheduler", "it has no state_dict, so no checkpoint can hold it")
        return
    own, loaded = resumed(step.setup)
    if own != loaded:
        say = f"loaded after 3 steps it continues with the rate {loaded[0]:.4g}, not {own[0]:.4g}"
        yield fail("scheduler", say, "keep all that it counts in its state_dict")

"""Test the schedule of the rates: its peak, its course over the planned steps, and how it resumes."""

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

    What peak and how many steps are intended, only the user can say: by ``lr``, or by what is declared.
    """
    yield from _compounds(step)
    needs(step.setup.scheduler, "no scheduler changes the rates")
    yield from _steers_another(step)
    course = step.whole_step.rates
    if isinstance(course.ended, TypeError) and len(course.steps) == 1:
        raise Unknown("its rates depend on what step() is given, and cannot be known in advance")
    yield from chain(_peak(step, course), _planned(step, course), _moves_once(step), _resumes(step, course))


def _steers_another(step: StepUnderTest) -> Answers:
    """A scheduler that was built with an optimizer which is none of the step's."""
    optimizers = step.setup.optimizers
    steered = getattr(step.setup.scheduler, "optimizer", None)
    if not isinstance(steered, Optimizer):
        return
    # by its groups: a wrapper around an optimizer, such as Accelerate's, steers what it wraps
    groups = {id(group) for o in optimizers if isinstance(o, Optimizer) for group in o.param_groups}
    if any(id(group) in groups for group in steered.param_groups):
        return
    why = "the scheduler has an optimizer of its own: pass that, or a function for each"
    needs(all(isinstance(o, Optimizer) for o in optimizers), why)
    yield fail("scheduler", "it sets the rates of another optimizer", "build it with this optimizer")


def _compounds(step: StepUnderTest) -> Answers:
    """Rates that each step multiplies once more, such as factors by layer that are applied in every step."""
    rates_at: dict[str, Callable[[StepUnderTest], Iterator[list[float]]]] = {"optimizer": rates_by_themselves}
    by_hand = step.setup.scheduler is None and step.setup.step is not None
    if by_hand and step.setup.cannot.keys().isdisjoint(WHOLE_STEP):
        rates_at["step"] = rates_in_own_step
    for place, rates_after_steps in rates_at.items():
        # as shares of the scheduled rates: one sequence over the steps for each group
        shares_by_group = list(zip(*rates_after_steps(step), strict=True))
        factors = [factor_of_each(shares) for shares in shares_by_group]
        moved = [factor for factor in factors if factor != 1]
        if not moved:
            continue
        worst = max(moved, key=lambda factor: abs(math.log(factor)))
        group = factors.index(worst)
        first = step.whole_step.rates.rates[0][group]
        last = first * shares_by_group[group][-1]
        evidence = f"each step multiplies the rates of {len(moved)} of {len(factors)} groups by a factor of "
        evidence += f"its own, one of them by {worst:.4g}: {FOLLOWED} steps take it from {first:.4g} "
        evidence += f"to {last:.4g}"
        # what leaves a rate within a factor of 2 for that long may be a decay of the user's own
        if 0.5 < worst**LEARNT < 2:
            yield note(place, evidence)
        else:
            advice = "multiply the rates once, where the groups are made; or use a scheduler"
            yield fail(place, evidence, advice)


def _peak(step: StepUnderTest, course: Rates) -> Answers:
    """The highest rate is the one that was asked for, and the rate is not 0 throughout."""
    intended = step.declare.peak_lr or step.setup.lr
    whole_course = course.from_the_first  # with the steps that a resumed schedule has behind it
    peak, steps = max(whole_course.top), whole_course.steps[-1] + 1
    if max(course.top) <= 0:
        evidence = f"the rate is 0 at all {len(course.steps)} steps that were looked at, up to step {steps}"
        yield fail("scheduler", evidence, "count steps, not epochs")
    elif intended is not None and not whole_course.reaches(intended):
        peaks = sorted({*whole_course.peaks})
        evidence = f"the peaks are {peaks} in {steps} steps, but {intended:.4g} was asked for"
        if peak < intended and course.taken and not course.past:
            why = f"its peak may lie in the {course.taken} steps that it has taken, whose rates are not known"
            yield note("scheduler", f"{evidence}; {why}")
            return
        more = "" if step.declare.steps else "; declare steps= if more are planned"
        advice = "a LambdaLR multiplies the optimizer's rate; count steps"
        yield fail("scheduler", evidence + more, advice)
    elif course.top[0] == 0 and not course.taken:
        yield note("scheduler", "its first rate is 0: that step changes nothing")


def _planned(step: StepUnderTest, course: Rates) -> Answers:
    """Over the planned steps, the schedule does not end, and is at 0 only at its ends."""
    if (planned := step.declare.steps) is None:
        return
    lowest = min(map(min, course.rates))
    # of pairs, since a schedule may begin and end with one rate of 0
    zeros = sum(before == after == 0 for before, after in pairwise(course.top))
    as_long = "make it as long as the run"
    if course.ended is not None:
        evidence = f"step() raises after {course.taken + course.steps[-1]} of {planned} steps: {course.ended}"
        yield fail("scheduler", evidence, as_long)
    elif lowest < 0:
        yield fail("scheduler", f"a rate falls to {lowest:.3g}: a step goes uphill", "end it at 0")
    elif course.rises_again and not course.periodic:
        evidence = f"the rate falls and rises again within the {planned} planned steps: it is over too soon"
        yield fail("scheduler", evidence, f"{as_long}; use warm restarts to start again")
    elif course.rises_to_the_end and not course.periodic:
        before, last = told_apart(course.top[-2], course.top[-1])
        evidence = f"the rate rises up to the last of {planned} planned steps, from {before} to {last}"
        advice = "let it fall: a share of steps done rises, 1 minus that share falls"
        yield fail("scheduler", evidence, advice)
    elif zeros > 2:
        share = zeros / len(course.top)
        evidence = f"the rate stays 0 in {share:.2%} of the {planned} planned steps"
        if share > 0.01:
            yield fail("scheduler", evidence, "count its steps in the same way as the optimizer's")
        else:
            yield note("scheduler", evidence)
    elif course.rises_again:
        yield note("scheduler", f"the rate falls and rises again and again in the {planned} planned steps")


def _moves_once(step: StepUnderTest) -> Answers:
    """The user's own step moves the schedule once, after the optimizer."""
    if step.setup.step is None:
        return
    run = step.whole_step.dry_run()
    calls = [*run.run(step.step_batch).calls, *run.run(step.step_batch).calls]
    moved, steps = calls.count("scheduler"), calls.count(0)  # 0 is the first optimizer
    if not moved:
        yield note("scheduler", "the step does not step it")
    elif moved > steps > 0:
        evidence = f"it is stepped {moved / steps:.3g} times for each step of the optimizer"
        yield fail("scheduler", evidence, "step it once, after the optimizer")
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
        evidence = f"the optimizer's state holds {taken} steps, and the schedule {counted}: it begins anew"
        yield note("scheduler", f"{evidence}; to resume, load its state with that of the optimizer")


def _resumes(step: StepUnderTest, course: Rates) -> Answers:
    """A schedule that is saved and loaded goes on as the one that was saved."""
    if not hasattr(course.scheduler, "state_dict"):
        yield note("scheduler", "it has no state_dict, so no checkpoint can hold it")
        return
    uninterrupted, loaded = resumed(step.setup)
    if uninterrupted != loaded:
        evidence = f"loaded after 3 steps it continues with the rate {loaded[0]:.4g}, "
        evidence += f"not {uninterrupted[0]:.4g}"
        yield fail("scheduler", evidence, "keep all that it counts in its state_dict")

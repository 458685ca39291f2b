"""Properties of the loop: the user's own step, the schedule of its rates, and whether it learns."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR

from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.compare import distance
from normlab.trace.facts.unknown import Unknown
from normlab.trace.rates import Rates, bare, rates_of
from normlab.trace.rehearsal import Rehearsal, Seen, fit, groups_of, plain_step
from normlab.trace.tensors import tensors_in
from normlab.trace.trace import Trace

SMALL: Final = 2.0**-40
"""Factor of gradients that no clipping touches; powers of two round nothing."""
LARGE: Final = 2.0**20
"""Factor of gradients that every clipping touches."""
LEARNT: Final = 10
"""Steps in a row below the first loss that show a batch to be learnt; as many are the warm-up."""
TRIED: Final = 40


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
        for exact in (True, False) if step.is_exact else (False,):
            with suppress(Exception) if exact else nullcontext():
                run = rehearsal(step, exact=exact)
                first = run.run(step.batch, scale=SMALL)
                step.kept["twice"] = exact, first, run.run(first.batch, scale=SMALL)
                return run, *step.kept["twice"][1:]
    exact, first, again = step.kept["twice"]
    return rehearsal(step, exact=exact), first, again


def _written(step: Step, seen: Seen) -> str | None:
    """The entry of the batch that the step wrote to."""
    before = dict(tensors_in(step.batch))
    for place, x in tensors_in(seen.batch):
        if distance(x, before[place]) > torch.finfo(torch.float32).eps * x.is_floating_point():
            return ".".join(map(str, place)) or "step"
    return None


def rates(step: Step) -> Rates:
    """The rates that the schedule will give, simulated once."""
    if "rates" not in step.kept:
        step.kept["rates"] = rates_of(step.setup)
    return step.kept["rates"]


def _floor(step: Step, run: Rehearsal) -> float:
    """The share of a gradient that rounding may change."""
    if run.exact:
        return step.rounding
    if "gradient" not in step.kept:
        step.kept["gradient"] = run.rounding(step.batch, step.loss_of)
    return step.kept["gradient"]


# -------------------------------------------------------------------------------------------------- the step
@property_of("loop", explains=["repeats", "overfit"], passes=12)
def step(step: Step) -> Iterator[Violation | Note]:
    """The optimizer sees the gradient of the loss on the whole batch: fresh, averaged, clipped, once a step.

    The user's step runs on copies, in float64 and without dropout. Its gradients are made so small that no
    clipping acts, when they are compared with those of the loss, and so large that every clipping acts, when
    that is looked at.
    """
    if step.setup.step is None:
        raise Untestable(
            "no step was handed over: pass step=, a function of model, batch, optimizer, scheduler"
        )
    run, seen, _ = twice(step)
    tests = (_steps_once, _is_fresh, _clips_well, _averages, _trains)
    yield from [found for found in (test(step, run, seen) for test in tests) if found is not None][:1]


def _steps_once(step: Step, run: Rehearsal, seen: Seen) -> Violation | None:
    counts = [seen.calls.count(i) for i in range(len(run.optimizers))]
    if not any(counts):
        if any(any(c != "scheduler" for c in run.run(step.batch).calls) for _ in range(7)):
            raise Untestable("it steps the optimizer in some calls only; hand over the step of a whole batch")
        return fail("step", "it never calls optimizer.step() of the optimizer that it is given", "call it")
    if max(counts) > 1:
        evidence = f"it steps the optimizer {max(counts)} times in one batch of {len(seen.training)} passes"
        return fail("step", evidence, "step once, after the last backward")
    if min(counts) < 1:
        return fail("step", f"optimizer {counts.index(0) + 1} of {len(counts)} is never stepped", "step each")
    return None


def _is_fresh(step: Step, run: Rehearsal, seen: Seen) -> Violation | None:
    k, rest = fit(step.kept["twice"][2].gradients, seen.gradients)
    if max(rest, abs(k - 1)) <= _floor(step, run) or _written(step, seen) is not None:
        return None
    evidence = f"called again with the same weights, it gives another gradient, {k:.3g} times the first"
    return fail("step", evidence, "zero the gradients once in each step; keep nothing for the next")


def _clips_well(step: Step, run: Rehearsal, seen: Seen) -> Violation | None:
    if not seen.clips:
        return None
    seen = run.run(step.batch, scale=LARGE)
    advice = "clip all parameters after the last backward, and after unscaling, right before the step"
    if seen.late:
        return fail("step", "gradients grow in a backward after they were clipped", advice)
    covered = frozenset[int]()
    for clip, norm in reversed(list(zip(seen.clips, seen.norms, strict=False))):
        if abs(norm - clip.left) > 1e-3 * clip.left and not covered & clip.held:
            evidence = (
                f"the norm is clipped to {clip.left:.4g}, and is {norm:.4g} when the optimizer is called"
            )
            return fail("step", evidence, advice)
        covered |= clip.held
    left_out = [n for i, n in run.names.items() if i not in covered and n in seen.gradients]
    if any(bool(seen.gradients[n].any()) for n in left_out):
        names = ", ".join(left_out[:3])
        return fail("step", f"{len(left_out)} parameters are not clipped as the others are ({names})", advice)
    return None


def _averages(step: Step, run: Rehearsal, seen: Seen) -> Violation | None:
    want = run.gradients(step.batch, step.loss_of, training=not seen.training or any(seen.training))
    (k, rest), floor, passes = fit(seen.gradients, want, SMALL), _floor(step, run), len(seen.training)
    if not any(g is not None and bool(g.any()) for g in want.values()):
        raise Untestable("the loss has no gradient in what the optimizer holds")
    if max(rest, abs(k - 1)) <= floor:
        return None
    if not any(bool(g.any()) for g in seen.gradients.values()):
        return fail(
            "step", "every gradient is zero when the optimizer is called", "zero them before backward"
        )
    if seen.moved:
        raise Untestable(
            "the step writes to the weights between its passes, so that no one gradient is right"
        )
    if fit(run.run(step.batch, scale=SMALL, seed=1).gradients, seen.gradients)[1] > floor:
        raise Untestable("the step draws numbers of its own, so that no two of its gradients are the same")
    if rest <= floor:
        evidence = f"the gradient is {k:.4g} times that of the loss on the whole batch, in {passes} passes"
        return fail(
            "step", evidence, "divide the loss by the number of micro-batches; unscale before the step"
        )
    if passes > 1 and not _splits(step):
        raise Untestable(
            "the loss is no mean over rows, so that micro-batches have another than the whole batch"
        )
    evidence = f"{rest:.1%} of the gradient is not that of the loss on the whole batch, in {passes} passes"
    return fail("step", evidence, "weigh micro-batches by the targets that they count; use the same loss")


def _splits(step: Step) -> bool:
    """Whether the loss of the whole batch is the mean, or the sum, of those of its rows."""
    trace, facts = step.exact.again(training=True), step.facts
    try:
        counts = facts.targets.counted.reshape(facts.rows, -1).sum(1).tolist()
    except (Unknown, RuntimeError):
        counts = [1] * facts.rows
    losses = [
        n * float(trace.again(batch=facts.with_rows(torch.tensor([i]))).loss) if n else 0.0
        for i, n in enumerate(counts)
    ]
    sums = sum(loss / max(n, 1) for loss, n in zip(losses, counts, strict=True))
    return any(
        abs(float(trace.loss) - x) <= step.rounding * abs(x) for x in (sum(losses) / sum(counts), sums)
    )


def _trains(step: Step, run: Rehearsal, seen: Seen) -> Violation | None:
    if not seen.training or any(seen.training):
        return None
    if distance(step.logits(step.plain), step.logits(step.plain.again(training=True))) <= step.rounding:
        return None
    evidence = "the model is in evaluation mode in it, and would differ in training mode: no dropout acts"
    return fail("step", evidence, "call model.train() at the start of the step")


# ---------------------------------------------------------------------------------------------- the schedule
@property_of("loop", explains=["overfit"], passes=4)
def schedule(step: Step) -> Iterator[Violation | Note]:
    """The rate reaches what is asked, stays above zero, and moves once in each step, also when it is resumed.

    It is simulated on copies, whose optimizers are not stepped, over the steps that are declared.
    """
    given, optimizer = step.setup.scheduler, step.setup.optimizer
    if given is None or optimizer is None:
        raise Untestable(f"no {'optimizer' if given is not None else 'scheduler'} was handed over: pass it")
    mine = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    steered = getattr(given, "optimizer", None)
    if isinstance(steered, Optimizer) and all(steered is not o for o in mine):
        if not all(isinstance(o, Optimizer) for o in mine):
            raise Untestable(
                "the scheduler has an optimizer of its own: pass that one, or a function for each"
            )
        yield fail("scheduler", "it sets the rates of another optimizer", "build it with this optimizer")
        return
    course = rates(step)
    if isinstance(course.ended, TypeError) and len(course.steps) == 1:
        raise Untestable("its rates follow what step() is given, and cannot be foretold")
    tests: tuple[Callable[[], Violation | Note | None], ...] = (
        lambda: _peak(step, course),
        lambda: _planned(step, course),
        lambda: _moves_once(step),
        lambda: _resumes(step),
    )
    yield from [answer for answer in (test() for test in tests) if answer is not None][:1]


def _peak(step: Step, course: Rates) -> Violation | None:
    """The peak is the rate asked, up to one step of the warm-up and to what the decay takes meanwhile."""
    top, numbers, planned = course.top, course.steps, step.declare.steps
    peak = max(top)
    at = top.index(peak)
    if peak <= 0:
        return fail(
            "scheduler", f"the rate is never above 0 in {numbers[-1] + 1} steps", "count steps, not epochs"
        )
    asked = step.declare.peak_lr or step.setup.lr
    if asked is None:
        return None
    rise = max((b - a for a, b in pairwise(top[: at + 1])), default=0.0)
    after = min(at + 1, len(top) - 1)
    fall = (peak - top[after]) / max(numbers[after] - numbers[at], 1) * (numbers[at] + 1)
    if asked - rise - fall <= peak * (1 + 1e-6) and peak <= asked * (1 + 1e-6) + rise:
        return None
    more = "" if planned else "; declare steps= if more are planned"
    evidence = f"the peak is {peak:.4g} in {numbers[-1] + 1} steps, and {asked:.4g} is asked{more}"
    return fail("scheduler", evidence, "a LambdaLR multiplies the optimizer's rate; warm-up counts steps")


def _planned(step: Step, course: Rates) -> Violation | Note | None:
    """Over the steps that are planned, the schedule goes on, and is at 0 at its ends at most."""
    planned, zeros = step.declare.steps, sum(rate == 0 for rate in course.top)
    if planned is None:
        return None
    if course.ended is not None:
        return fail("scheduler", f"step() raises after {course.steps[-1]} of {planned} steps: {course.ended}")
    if (lowest := min(min(row) for row in course.rates)) < 0:
        return fail(
            "scheduler", f"a rate falls to {lowest:.3g}, and drives the loss up", "end the schedule at 0"
        )
    if _bounces(course.top) and not isinstance(step.setup.scheduler, CyclicLR):
        evidence = f"it is over before the {planned} steps that are planned: the rate falls, and rises again"
        return fail("scheduler", evidence, "make it as long as the training; use warm restarts to begin anew")
    share = zeros / len(course.top)
    evidence = f"the rate is 0 in {share:.2%} of the {planned} steps that are planned"
    if zeros > 2 and share > 0.01:
        return fail("scheduler", evidence, "count its steps as the optimizer's are counted")
    return note("scheduler", evidence) if zeros > 2 else None


def _bounces(top: list[float]) -> bool:
    """Whether the rate, after its peak, falls and then rises little by little; a restart is one jump."""
    tail = top[top.index(max(top)) :]
    low = tail.index(min(tail))
    rise = max(tail[low:]) - tail[low]
    return low > 0 and rise > 1e-6 * tail[0] and max(b - a for a, b in pairwise(tail[low:])) < rise / 2


def _moves_once(step: Step) -> Violation | Note | None:
    if step.setup.step is None:
        return None
    run = rehearsal(step)
    calls = [*run.run(step.batch).calls, *run.run(step.batch).calls]
    moved, steps = calls.count("scheduler"), calls.count(0)
    if not moved:
        return note("scheduler", "the step does not step it")
    if moved > steps > 0:
        evidence = f"it is stepped {moved / steps:.3g} times for each step of the optimizer"
        return fail("scheduler", evidence, "step it once, after the optimizer")
    if steps and calls[0] == "scheduler":
        return fail(
            "scheduler",
            "it is stepped before the optimizer, which leaves its first rate out",
            "step it after",
        )
    return None


def _resumes(step: Step) -> Violation | Note | None:
    """Whether a schedule goes on with the same rates when it is saved and loaded."""
    (optimizers, scheduler), (others, loaded) = bare(step.setup), bare(step.setup)
    if not hasattr(scheduler, "state_dict"):
        return note("scheduler", "it has no state_dict, so that no checkpoint can hold it")
    own, new = list[float](), list[float]()
    with suppress(Exception):
        for _ in range(3):
            scheduler.step()
        for a, b in zip(optimizers, others, strict=True):
            b.load_state_dict(a.state_dict())
        loaded.load_state_dict(copy.deepcopy(scheduler.state_dict()))
        for _ in range(3):
            for rows, s, held in ((own, scheduler, optimizers), (new, loaded, others)):
                s.step()
                rows += [float(g["lr"]) for g in groups_of(held)]
    if own == new:
        return None
    evidence = f"loaded after 3 steps it goes on with the rate {new[0]:.4g}, not {own[0]:.4g}"
    return fail("scheduler", evidence, "keep all that it counts in its state_dict")


# ---------------------------------------------------------------------------------------- repeats, learning
@property_of("loop", explains=["overfit"], passes=7)
def repeats(step: Step) -> Iterator[Violation | Note]:
    """The same batch gives the same step twice, from the same weights and seeds, and is left as it was."""
    if step.setup.optimizer is None:
        trace = step.exact.again(training=True)
        k, rest = fit(trace.gradients, trace.again().gradients)
        if max(rest, abs(k - 1)) > step.rounding:
            yield fail(
                "loss", "the same batch with the same seeds gives two gradients", "keep no state in a step"
            )
        return
    run, first, again = twice(step)
    if (where := _written(step, first)) is not None:
        yield fail(where, "the step writes into the batch, which is another from then on", "change a copy")
        return
    k, rest = fit(again.gradients, first.gradients)
    if max(rest, abs(k - 1)) > _floor(step, run):
        evidence = "the same weights get another gradient from the same batch and seeds"
        yield fail(
            "step", evidence, "look for what outlives a step: globals, counters, generators of its own"
        )


@property_of("learns", passes=30)
def overfit(step: Step) -> Iterator[Violation | Note]:
    """A small batch is learnt by the user's own step: its loss falls below where it began, and stays there.

    Dropout is off and the seeds are the same in each step, so that at a rate of 0 the loss would not change.
    Rates are those of the schedule's peak, reached in ten steps.
    """
    if step.setup.optimizer is None:
        raise Untestable("no optimizer was handed over: pass optimizer=")
    batch, rows = step.batch, step.facts.rows
    if rows > 4:
        with suppress(Exception):
            small = step.facts.with_rows(torch.arange(4))
            rehearsal(step).run(small)
            batch = small
    losses = _learn(step, batch)
    if _learnt(losses):
        return
    place = (
        "step" if step.setup.step and _learnt(_learn(step, batch, plain_step(step.loss_of))) else "optimizer"
    )
    evidence = f"{len(losses) - 1} steps on one batch bring its loss from {losses[0]:.4g} to {losses[-1]:.4g}"
    with suppress(Unknown):
        if step.facts.trained and math.isfinite(losses[-1]):
            yield note(place, evidence)
            return
    yield fail(place, evidence, "lower the rate if the loss grows, raise it if it stays")


def _learnt(losses: list[float]) -> bool:
    floor = losses[0] - 1e-6 * abs(losses[0])
    return len(losses) > LEARNT and all(x < floor for x in losses[-LEARNT:])


def _learn(step: Step, batch: Any, whole: Any = None) -> list[float]:
    """The losses of a batch before each step and after the last."""
    run = rehearsal(step, whole=whole)
    trace = Trace(run.model, run.own(batch), step.loss_of, training=True, dropout=False)
    losses, peaks = [float(trace.loss)], rates(step).peaks
    by_hand = step.setup.scheduler is None and step.setup.step is not None and whole is None
    for i in range(TRIED):
        ramp = min(1.0, (i + 1) / LEARNT)
        run.run(batch, acts=True, rates=None if by_hand else [ramp * rate for rate in peaks])
        losses.append(float(trace.again().loss))
        if not math.isfinite(losses[-1]) or _learnt(losses):
            break
    return losses

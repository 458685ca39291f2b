"""Test the user's own step: the gradient that optimizers get from it, whether it repeats, and what it learns.

The step runs on copies (``trace.dry_run``). Its gradients are compared with those of the loss scaled far
down, where nothing is clipped, and what it clips is seen far up, where everything is.
"""

from __future__ import annotations

import math
from contextlib import suppress
from math import isclose
from typing import Any, Final

import torch
from torch.optim import SGD

from normlab.base.units import count
from normlab.checks.property import BACKWARD, WHOLE_STEP, Answers, fail, needs, note, property_of
from normlab.setups.window import WindowStep
from normlab.trace.autograd import Weights
from normlab.trace.compare import distance
from normlab.trace.dry_run import (
    BIG,
    SEED,
    DryRun,
    Fit,
    ObservedStep,
    fit,
    learnt,
    parameters_of,
    splits,
    written,
)
from normlab.trace.facts import Unknown
from normlab.trace.facts.targets import CLOSE
from normlab.trace.finite_differences import Along
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.updates import factors
from normlab.trace.whole_step import SMALL

STILL: Final = 1e-3
"""A loss stands still if it moves by a smaller share than this of what its gradient says."""
NO_STEP: Final = "there is no step: pass step=, a function of model, batch, optimizer and scheduler"


@property_of(
    "loop",
    explains=["repeats", "overfit"],
    passes=4,
    steps=4,
    applies=lambda step: needs(step.setup.step is not None, NO_STEP),
    uses=WHOLE_STEP,
)
def step(step: StepUnderTest) -> Answers:
    """Once a step, optimizers get the gradient of the whole batch's loss, fresh, averaged and clipped;
    nothing else moves between its passes.

    The gradient at optimizer.step() = clip(∂(loss of the whole batch)/∂θ).
    """
    exact, seen, again = step.whole_step.two_runs
    run = step.whole_step.dry_run(exact=exact)
    yield from _steps_once(step, run, seen)
    yield from _follows_once(step, run, seen)
    yield from _is_fresh(step, seen, again)
    yield from _clips(step, run, seen)
    yield from _averages(step, run, seen)
    yield from _weighs_a_shorter_window(step)
    yield from _trains(step, seen)


def _steps_once(step: StepUnderTest, run: DryRun, seen: ObservedStep) -> Answers:
    """Each optimizer is stepped once."""
    counts = [seen.calls.count(number) for number in range(len(run.optimizers))]
    if not any(counts):
        # a loop that accumulates gradients over several calls steps in the last of them
        for _ in range(7):
            later = run.run(step.step_batch)
            if any(call != "scheduler" for call in later.calls):
                raise Unknown("it steps the optimizer only in some calls; pass the step of a whole batch")
        yield fail("step", "it never calls step() of the optimizer that it is given", "call it")
    elif max(counts) > 1:
        evidence = f"it steps the optimizer {max(counts)} times in one batch of {len(seen.training)} passes"
        yield fail("step", evidence, "step once, after the last backward")
    elif min(counts) < 1:
        evidence = f"optimizer {counts.index(0) + 1} of {len(counts)} is never stepped"
        yield fail("step", evidence, "step each")


def _follows_once(step: StepUnderTest, run: DryRun, seen: ObservedStep) -> Answers:
    """What no optimizer moves, such as a moving average, moves after the passes, or before them."""
    held_names = {run.names.get(id(p)) for p in parameters_of(run.optimizers)}
    by_forward = {*step.forward_writes[False], *step.forward_writes[True]}
    others = [name for name in seen.between if name not in held_names and name not in by_forward]
    if others:
        written_to = f"{count(len(others), 'parameter')} that no optimizer holds, such as {others[0]}"
        evidence = f"between its {len(seen.training)} passes it writes to {written_to}"
        yield fail("step", evidence, "let averages follow once, after the optimizer's step")


def _is_fresh(step: StepUnderTest, seen: ObservedStep, again: ObservedStep) -> Answers:
    """From the same weights, a second step gets the same gradient: nothing of the first is left in it."""
    second = fit(again.gradients, seen.gradients)
    is_off = second.apart > step.whole_step.gradient_rounding
    # a step that writes into its batch is another mistake, which ``repeats`` names
    if is_off and written(step.step_batch, seen.batch) is None:
        evidence = f"from the same weights the second gradient is {second.factor:.3g} times the first"
        yield fail("step", evidence, "zero the gradients once in each step; keep nothing for the next")


def _clips(step: StepUnderTest, run: DryRun, seen: ObservedStep) -> Answers:
    """All gradients are clipped, to the declared norm, and nothing changes them until the optimizer's step.

    Args:
        step: the step.
        run: copies that it runs on.
        seen: what it showed with gradients too small to be clipped.
    """
    declared = step.declare.max_grad_norm
    if not seen.clips and not declared:
        return
    small, large = seen, run.run(step.step_batch, scale=BIG)  # so large that everything is clipped
    if not large.clips:
        # gradients that grow with the loss are not clipped in any other way either
        if isclose(fit(large.gradients, small.gradients).factor, BIG / SMALL, rel_tol=CLOSE):
            evidence = f"nothing clips gradients, but a norm of {declared:.4g} is declared"
            yield fail("step", evidence, "clip them")
        return
    spared = sorted(large.nonzero - {run.names.get(number) for number in large.clipped})
    advice = "clip all parameters after the last backward, and after unscaling, right before the step"
    if large.late:
        yield fail("step", "gradients grow in a backward pass after they were clipped", advice)
    elif large.undone:
        left, norm = large.undone
        evidence = f"the norm is clipped to {left:.4g}, but is {norm:.4g} in the optimizer"
        yield fail("step", evidence, advice)
    elif spared:
        yield fail("step", f"{len(spared)} parameters are not clipped ({', '.join(spared[:3])})", advice)
    elif declared:
        # a clip of parameters without gradients leaves nothing
        left = next((clip.left_of_all for clip in reversed(large.clips) if clip.left), 0.0)
        if not isclose(left, declared, rel_tol=1e-3):  # torch adds 1e-6 to a norm
            evidence = f"gradients are clipped to {left:.4g}, but {declared:.4g} is declared"
            yield fail("step", evidence, "clip to the norm that was asked for")


def step_and_whole(step: StepUnderTest) -> tuple[Weights, Fit]:
    """Return the gradient of the whole batch's loss, and the step's as a factor times it."""
    exact, seen, _ = step.whole_step.two_runs
    run = step.whole_step.dry_run(exact=exact)
    # in the mode of the step: whether that is the right one is asked apart
    of_loss = run.gradients(step.step_batch, training=not seen.training or any(seen.training))
    return of_loss, fit(seen.gradients, of_loss, SMALL)


def _averages(step: StepUnderTest, run: DryRun, seen: ObservedStep) -> Answers:
    """The step's gradient is that of the loss of the whole batch, however many passes make it.

    Before it is a failure, everything that makes two gradients differ in a sound step is ruled out: a sum
    that is divided later, draws of the step's own, a loss that is no mean over rows.
    """
    of_loss, match = step_and_whole(step)
    floor, passes = step.whole_step.gradient_rounding, len(seen.training)
    some = any(bool(gradient.any()) for gradient in of_loss.values())
    needs(some, "the loss has no gradient in what the optimizer holds")
    if match.apart <= floor:
        return
    for allowed in factors(step):
        if max(match.rest, abs(match.factor / allowed - 1)) <= floor:
            return
    if not seen.nonzero:
        yield fail("step", "every gradient is zero in the optimizer", "zero them before backward")
    needs(not seen.moved, "the step writes to the weights between its passes, so no gradient is right")
    with_another_seed = run.run(step.step_batch, scale=SMALL, seed=SEED + 1)
    if fit(with_another_seed.gradients, seen.gradients).rest > floor:
        raise Unknown("the step draws random numbers of its own, so no two of its gradients are the same")
    if match.rest <= floor:
        evidence = f"the gradient is {match.factor:.4g} times that of the whole batch, in {passes} passes"
        yield fail("step", evidence, "divide by the number of micro-batches; unscale before the step")
    if passes > 1 and not splits(step.exact.again(training=True), step.facts, step.rounding):
        raise Unknown("the loss is not a mean over rows: micro-batches have another one than the whole batch")
    evidence = f"{match.rest:.1%} of the gradient is not that of the whole batch, in {passes} passes"
    yield fail("step", evidence, "weight micro-batches by the targets that they count; use the same loss")


def _weighs_a_shorter_window(step: StepUnderTest) -> Answers:
    """Whether a recorded loop averages a window of fewer micro-batches, as the last of an epoch, too."""
    own_step = step.setup.step
    shorter = own_step.shorter if isinstance(own_step, WindowStep) else None
    if shorter is not None:
        passes = count(shorter.micro_batches, "pass")
        times = f"{shorter.weight:.4g} times that of its whole batch"
        evidence = f"in a later step of {passes} the gradient is {times}"
        advice = "divide by the number of micro-batches that the step really has"
        yield fail("step", evidence, advice)


def _trains(step: StepUnderTest, seen: ObservedStep) -> Answers:
    """Whether dropout, if there is any, is active in the step."""
    if not seen.training or any(seen.training):
        return
    evaluated = step.comparison.logits(step.unchanged)
    trained = step.comparison.logits(step.unchanged.again(training=True))
    if distance(evaluated, trained) > step.rounding:
        evidence = "its model is in evaluation mode, where its outputs differ from those in training mode"
        yield fail("step", evidence, "call model.train() at the start of the step")


@property_of("loop", explains=["overfit"], passes=5, steps=2, uses=BACKWARD)
def repeats(step: StepUnderTest) -> Answers:
    """The same batch, weights and seeds give the same step twice, and the step leaves the batch as it was.

    Otherwise a run cannot be repeated, and no comparison of two steps means anything.
    """
    place, whole_step = "step", step.whole_step
    if step.setup.optimizer is None:  # then the loss alone is run twice, in a plain step of any optimizer
        place, whole_step = "loss", whole_step.with_plain_step(lambda model: SGD(model.parameters()))
    _, first, again = whole_step.two_runs
    entry = written(step.step_batch, first.batch)
    if entry is not None:
        evidence = "the step writes into the batch, which is different from then on"
        yield fail(entry, evidence, "change a copy")
    elif fit(again.gradients, first.gradients).apart > whole_step.gradient_rounding:
        evidence = "the same weights get a different gradient from the same batch and seeds"
        yield fail(place, evidence, "look for state that outlives a step: globals, counters, generators")


@property_of("learns", passes=16, steps=6, uses=BACKWARD | {"rate"})
def overfit(step: StepUnderTest) -> Answers:
    """The user's own step learns a small batch: the loss falls below its first value and stays there.

    It is a trial and no equation: a step that cannot learn four rows by heart learns nothing.
    """
    peaks = step.whole_step.rates.peaks
    batch = _few_rows(step)
    # without a scheduler, the user's own step may set its rates itself
    by_hand = step.setup.scheduler is None and step.setup.step is not None
    losses = step.whole_step.dry_run().losses(batch, () if by_hand else peaks)
    if learnt(losses):
        return
    why = "its value does not move along its gradient, as that of a policy's ratio to itself"
    needs(_moves_along_its_gradient(step), f"the loss need not fall: {why}")
    # a plain step with the same optimizers tells whether the step or its optimizers are to blame
    plain = step.whole_step.dry_run(plain=True)
    by_plain_step = step.setup.step is not None and learnt(plain.losses(batch, peaks))
    place = "step" if by_plain_step else "optimizer"
    evidence = f"{len(losses) - 1} steps on one batch bring its loss from {losses[0]:.4g} to {losses[-1]:.4g}"
    trained = False
    with suppress(Unknown):
        trained = step.facts.trained
    if trained and math.isfinite(losses[-1]):  # what is trained may have nothing left to learn from a batch
        yield note(place, evidence)
    else:
        yield fail(place, evidence, "lower the rate if the loss grows, else raise it")


def _moves_along_its_gradient(step: StepUnderTest) -> bool:
    """Return whether the value of the loss changes where its gradient leads, or nothing tells.

    What is detached in a loss, or run without gradients, follows each step: the ratio of a policy to itself
    is 1 with any weights, and only its gradient says where to go.
    """
    with suppress(Unknown):
        along = Along(step.exact) if step.is_exact else None
        if along is not None and along.gradients:
            return abs(along.all.measured) > STILL * along.all.expected
    return True


def _few_rows(step: StepUnderTest) -> Any:
    """Return four rows of the batch if the step runs on them, else all of it."""
    if step.facts.rows > 4:
        with suppress(Exception):  # a step may insist on its number of rows
            few = step.facts.with_rows(torch.arange(4))
            step.whole_step.dry_run().run(few)
            return few
    return step.step_batch

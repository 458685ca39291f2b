"""Properties of the user's own step: the gradient that optimizers get, repetition, and learning."""

from __future__ import annotations

import math
from contextlib import suppress
from math import isclose
from typing import Final

import torch
from torch.optim import SGD

from normlab.base.units import count
from normlab.checks.property import BACKWARD, WHOLE_STEP, Answers, fail, needs, note, property_of
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
    applies=lambda step: needs(step.setup.step, NO_STEP),
    uses=WHOLE_STEP,
)
def step(step: StepUnderTest) -> Answers:
    """Once a step, optimizers get the gradient of the whole batch's loss, fresh, averaged and clipped;
    nothing else moves between its passes.
    """
    exact, seen, again = step.whole_step.twice
    run = step.whole_step.dry_run(exact=exact)
    yield from _steps_once(step, run, seen)
    yield from _follows_once(step, run, seen)
    yield from _is_fresh(step, seen, again)
    yield from _clips(step, run, seen)
    yield from _averages(step, run, seen)
    yield from _weighs_a_shorter_window(step)
    yield from _trains(step, seen)


def _steps_once(step: StepUnderTest, run: DryRun, seen: ObservedStep) -> Answers:
    counts = [seen.calls.count(i) for i in range(len(run.optimizers))]
    if not any(counts):
        if any(any(c != "scheduler" for c in run.run(step.stepped).calls) for _ in range(7)):
            raise Unknown("it steps the optimizer only in some calls; pass the step of a whole batch")
        yield fail("step", "it never calls step() of the optimizer that it is given", "call it")
    elif max(counts) > 1:
        say = f"it steps the optimizer {max(counts)} times in one batch of {len(seen.training)} passes"
        yield fail("step", say, "step once, after the last backward")
    elif min(counts) < 1:
        yield fail("step", f"optimizer {counts.index(0) + 1} of {len(counts)} is never stepped", "step each")


def _follows_once(step: StepUnderTest, run: DryRun, seen: ObservedStep) -> Answers:
    """What no optimizer moves, such as a moving average, moves after the passes, or before them."""
    held = {run.names.get(id(p)) for p in parameters_of(run.optimizers)}
    by_forward = {*step.rewritten[False], *step.rewritten[True]}
    if alone := [name for name in seen.between if name not in held and name not in by_forward]:
        written_to = f"{count(len(alone), 'parameter')} that no optimizer holds, such as {alone[0]}"
        say = f"between its {len(seen.training)} passes it writes to {written_to}"
        yield fail("step", say, "let averages follow once, after the optimizer's step")


def _is_fresh(step: StepUnderTest, seen: ObservedStep, again: ObservedStep) -> Answers:
    other = fit(again.gradients, seen.gradients)
    if other.apart > step.whole_step.gradient_rounding and written(step.stepped, seen.batch) is None:
        say = f"from the same weights the second gradient is {other.factor:.3g} times the first"
        yield fail("step", say, "zero the gradients once in each step; keep nothing for the next")


def _clips(step: StepUnderTest, run: DryRun, seen: ObservedStep) -> Answers:
    asked = step.declare.max_grad_norm
    if not seen.clips and not asked:
        return
    small, seen = seen, run.run(step.stepped, scale=BIG)
    if not seen.clips:
        if isclose(fit(seen.gradients, small.gradients).factor, BIG / SMALL, rel_tol=CLOSE):
            yield fail("step", f"nothing clips gradients, but a norm of {asked:.4g} is declared", "clip them")
        return
    spared = sorted(seen.nonzero - {run.names.get(i) for i in seen.clipped})
    advice = "clip all parameters after the last backward, and after unscaling, right before the step"
    if seen.late:
        yield fail("step", "gradients grow in a backward pass after they were clipped", advice)
    elif seen.undone:
        left, norm = seen.undone
        yield fail("step", f"the norm is clipped to {left:.4g}, but is {norm:.4g} in the optimizer", advice)
    elif spared:
        yield fail("step", f"{len(spared)} parameters are not clipped ({', '.join(spared[:3])})", advice)
    elif asked and not isclose(seen.clips[-1][1], asked, rel_tol=1e-3):  # torch adds 1e-6 to a norm
        say = f"gradients are clipped to {seen.clips[-1][1]:.4g}, but {asked:.4g} is declared"
        yield fail("step", say, "clip to the norm that was asked for")


def step_and_whole(step: StepUnderTest) -> tuple[Weights, Fit]:
    """Return the gradient of the whole batch's loss, and the step's as a factor times it."""
    exact, seen, _ = step.whole_step.twice
    run = step.whole_step.dry_run(exact=exact)
    want = run.gradients(step.stepped, training=not seen.training or any(seen.training))
    return want, fit(seen.gradients, want, SMALL)


def _averages(step: StepUnderTest, run: DryRun, seen: ObservedStep) -> Answers:
    want, match = step_and_whole(step)
    floor, passes = step.whole_step.gradient_rounding, len(seen.training)
    needs(any(bool(g.any()) for g in want.values()), "the loss has no gradient in what the optimizer holds")
    if match.apart <= floor:
        return
    for allowed in factors(step):
        if max(match.rest, abs(match.factor / allowed - 1)) <= floor:
            return
    if not seen.nonzero:
        yield fail("step", "every gradient is zero in the optimizer", "zero them before backward")
    needs(not seen.moved, "the step writes to the weights between its passes, so no gradient is right")
    if fit(run.run(step.stepped, scale=SMALL, seed=SEED + 1).gradients, seen.gradients).rest > floor:
        raise Unknown("the step draws random numbers of its own, so no two of its gradients are the same")
    if match.rest <= floor:
        say = f"the gradient is {match.factor:.4g} times that of the whole batch, in {passes} passes"
        yield fail("step", say, "divide by the number of micro-batches; unscale before the step")
    if passes > 1 and not splits(step.exact.again(training=True), step.facts, step.rounding):
        raise Unknown("the loss is not a mean over rows: micro-batches have another one than the whole batch")
    say = f"{match.rest:.1%} of the gradient is not that of the whole batch, in {passes} passes"
    yield fail("step", say, "weight micro-batches by the targets that they count; use the same loss")


def _weighs_a_shorter_window(step: StepUnderTest) -> Answers:
    """Whether a recorded loop averages a window of fewer micro-batches, as the last of an epoch, too."""
    shorter = getattr(step.setup.step, "shorter", None)
    if shorter is not None:
        passes = count(shorter.micro_batches, "pass")
        say = (
            f"in a later step of {passes} the gradient is {shorter.weight:.4g} times that of its whole batch"
        )
        yield fail("step", say, "divide by the number of micro-batches that the step really has")


def _trains(step: StepUnderTest, seen: ObservedStep) -> Answers:
    """Whether dropout, if there is any, is active in the step."""
    if not seen.training or any(seen.training):
        return
    if (
        distance(
            step.comparison.logits(step.unchanged),
            step.comparison.logits(step.unchanged.again(training=True)),
        )
        > step.rounding
    ):
        say = "its model is in evaluation mode, where its outputs differ from those in training mode"
        yield fail("step", say, "call model.train() at the start of the step")


@property_of("loop", explains=["overfit"], passes=5, steps=2, uses=BACKWARD)
def repeats(step: StepUnderTest) -> Answers:
    """The same batch, weights and seeds give the same step twice, and the step leaves the batch as it was."""
    place, whole_step = "step", step.whole_step
    if step.setup.optimizer is None:
        place, whole_step = "loss", whole_step.with_plain_step(lambda model: SGD(model.parameters()))
    _, first, again = whole_step.twice
    if (where := written(step.stepped, first.batch)) is not None:
        yield fail(where, "the step writes into the batch, which is different from then on", "change a copy")
    elif fit(again.gradients, first.gradients).apart > whole_step.gradient_rounding:
        say = "the same weights get a different gradient from the same batch and seeds"
        yield fail(place, say, "look for state that outlives a step: globals, counters, generators")


@property_of("learns", passes=16, steps=6, uses=BACKWARD | {"rate"})
def overfit(step: StepUnderTest) -> Answers:
    """The user's own step learns a small batch: the loss falls below its first value and stays there."""
    batch, peaks = step.stepped, step.whole_step.rates.peaks
    if step.facts.rows > 4:
        with suppress(Exception):
            small = step.facts.with_rows(torch.arange(4))
            step.whole_step.dry_run().run(small)
            batch = small
    # without a scheduler, the user's own step may set its rates itself
    by_hand = step.setup.scheduler is None and step.setup.step is not None
    losses = step.whole_step.dry_run().losses(batch, () if by_hand else peaks)
    if learnt(losses):
        return
    why = "its value does not move along its gradient, as that of a policy's ratio to itself"
    needs(_moves_along_its_gradient(step), f"the loss need not fall: {why}")
    plain = step.whole_step.dry_run(plain=True)
    by_plain_step = step.setup.step is not None and learnt(plain.losses(batch, peaks))
    say = f"{len(losses) - 1} steps on one batch bring its loss from {losses[0]:.4g} to {losses[-1]:.4g}"
    place = "step" if by_plain_step else "optimizer"
    trained = False
    with suppress(Unknown):
        trained = step.facts.trained
    if trained and math.isfinite(losses[-1]):  # what is trained may have nothing left to learn from a batch
        yield note(place, say)
    else:
        yield fail(place, say, "lower the rate if the loss grows, else raise it")


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

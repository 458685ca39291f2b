"""Test the outputs of a step: they are numbers, the same twice, and the same however they are computed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from normlab.checks.property import BACKWARD, FORWARD, Answers, fail, needs, note, property_of
from normlab.errors import UserError
from normlab.private_torch import AnyDropout, runs_compiled
from normlab.trace.budget import Cost
from normlab.trace.compare import distance, part_ways, rounding_of, whole
from normlab.trace.facts import Unknown
from normlab.trace.facts.drawn import scores_its_draws
from normlab.trace.facts.facts import Facts
from normlab.trace.finite_differences import Along
from normlab.trace.patching import in_mode
from normlab.trace.restore import same, same_random_state
from normlab.trace.rewrites import left_by
from normlab.trace.starts import is_of_library
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import call_model, tensors_in
from normlab.trace.trace import Trace, at_weights


@property_of("outputs", passes=6, uses=FORWARD)
def finite(step: StepUnderTest) -> Answers:
    """Weights, buffers, outputs, the loss and its gradient are finite numbers.

    Infinity is an error in what is trained and in gradients alone: a mask may hold it.
    """
    model = step.unchanged.model
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if _has_nan([tensor]) or (tensor.requires_grad and tensor.isinf().any()):
            yield fail(path, "holds NaN or infinity before the first step", "initialize or load it")
    yield from _is_finite(step.unchanged)
    # rows that a part of the batch leaves out may be the ones with NaN
    if step.tests_a_part and step.estimates.reaches_whole_batch:
        yield from _is_finite(step.on_whole_batch)


def _is_finite(trace: Trace) -> Answers:
    """Outputs, the loss and the gradients of one pass are finite."""
    if not torch.isfinite(trace.loss) or _has_nan(trace.outputs):
        makes_nan = (e.module for e in trace.events if _has_nan(e.outputs) and not _has_nan(e.inputs))
        place = next(makes_nan, "loss")
        evidence = "outputs NaN on finite inputs" if place != "loss" else f"the loss is {float(trace.loss)}"
        advice = "look for a row whose keys are all masked, a division by zero, a target outside the classes"
        yield fail(place, evidence, advice)
    with suppress(UserError):  # another property handles a loss without a gradient
        gradients = trace.again(training=True).gradients
        broken = [name for name, g in gradients.items() if g is not None and not g.isfinite().all()]
        if broken:
            # the last one in the model's order is usually the first on the way back
            others = f", as are those of {len(broken) - 1} others" if len(broken) > 1 else ""
            evidence = f"its gradient is NaN or infinite although the loss is finite{others}"
            advice = "look for a root, a norm or a logarithm at 0, or a masked division by 0"
            yield fail(broken[-1], evidence, advice)


def _has_nan(tensors: Iterable[Tensor]) -> bool:
    return any(x.is_floating_point() and bool(x.isnan().any()) for x in tensors)


@property_of(
    "outputs", explains=["causality", "rows", "padding", "cache", "state_dict"], passes=5, uses=FORWARD
)
def evaluation_repeats(step: StepUnderTest) -> Answers:
    """Two runs in evaluation mode on the same batch give the same results, unless the loss scores the
    distribution that they draw from.

    f(x; seed 1) = f(x; seed 2). A loss that scores the distribution, as a variational bound does, needs the
    draws; it is told by a way from what sizes them to the loss that goes round the logits.
    """
    first = step.exact.again(dropout=True)
    second = first.again(seed=1)
    difference = step.comparison.difference(first, second, whole)
    if difference is None:
        return
    # with torch's dropout off, what is left of the difference is drawn by something else
    by_dropout = step.comparison.difference(step.exact, step.exact.again(seed=1), whole) is None
    calls = zip(first.events, second.events, strict=False)
    draws = (a.module for a, b in calls if part_ways(a, b, whole, step.rounding))
    place = next(draws, None)  # None if no module draws: then the loss does, as for a task
    if not by_dropout and step.facts.is_scored and scores_its_draws(step.exact, step.facts.scored_places):
        yield note(place or "", "it draws from a distribution that the loss scores, in evaluation mode too")
    elif place is not None and (by_dropout or _asks_the_same(step, second)):
        evidence = f"two runs in evaluation mode differ by {difference.size:.2g} of the output"
        advice = "draw only in training mode: training=self.training, and dropout_p=0.0 otherwise"
        yield fail(place, evidence + ", by dropout" * by_dropout, advice)
    else:
        yield note(place or "", "the task is drawn: outputs depend on the random state in evaluation mode")


def _asks_the_same(step: StepUnderTest, other: Trace) -> bool:
    """Whether the loss is a cross-entropy at the same places in another run, so that no task is drawn."""
    with suppress(Unknown):
        return step.facts.targets.counted.equal(Facts(other, step.declare).targets.counted)
    return False


@property_of("outputs", explains=["gradients", "step"], passes=4, uses=FORWARD)
def training_equals_evaluation(step: StepUnderTest) -> Answers:
    """Without dropout, training mode gives the same outputs as evaluation mode.

    f(x; training, dropout 0) = f(x; evaluation): nothing but dropout is meant to know of the mode. Running
    statistics, and draws of the model's own, make the comparison impossible, and are no failure.
    """
    evaluated = step.exact
    if weights := left_by(step.training):  # the weights that the training pass computes with
        evaluated = step.exact.again(weights=weights)
    difference = step.comparison.difference(evaluated, step.training, whole)
    if difference is None:
        of_losses = distance(evaluated.loss, step.training.loss)
        if of_losses > step.rounding and not step.comparison.draws:
            yield note("loss", f"it differs by {of_losses:.2g} between the modes, with the same outputs")
    elif step.running_statistics:
        raise Unknown(f"{step.running_statistics[0]} holds running statistics, which evaluation reads")
    elif step.comparison.draws:
        raise Unknown("training draws other numbers than torch's dropout: pass the model with a rate of 0")
    else:
        evidence = f"without dropout, outputs of training and of evaluation differ by {difference.size:.2g}"
        if is_of_library(step.model, difference.module):
            yield note(difference.module, f"{evidence}, as a library builds it")
        else:
            yield fail(difference.module, evidence, "nothing besides dropout may depend on self.training")


@property_of(
    "outputs",
    passes=14,
    uses=FORWARD,
    applies=lambda step: needs(
        any(map(runs_compiled, step.setup.model.modules())), "nothing of it is compiled"
    ),
)
def compiled_equals_plain(step: StepUnderTest) -> Answers:
    """The compiled model gives the outputs of the uncompiled one, in either mode, up to rounding.

    A compiler may round in another order, so outputs may differ by what they would move if each weight were
    rounded once more: |compiled f(x) − f(x)| ≤ |f(x; rounded θ) − f(x)|.
    """
    compared = partial(_compared_numbers, step)
    for training in (False, True):
        of_compiled = _compiled_numbers(step, 0, training=training)
        uncompiled = step.unchanged.again(training=training, dropout=not training)
        draws = training and not torch.equal(of_compiled, _compiled_numbers(step, 1, training=training))
        needs(not draws, "in training it draws other numbers than dropout's: pass it with a rate of 0")
        size = distance(of_compiled, compared(uncompiled))
        explained = rounding_of(uncompiled, compared)
        if size > explained:
            evidence = f"compiled it differs by {size:.2g}, while rounding explains {explained:.2g}"
            advice = "compile with backend='aot_eager' and part by part to find the graph that differs"
            place = "" if step.setup.loss is None else "loss"
            yield fail(place, evidence + " in training mode" * training, advice)


def _compared_numbers(step: StepUnderTest, trace: Trace) -> Tensor:
    """Return what is compared of a plain pass: the outputs, or the loss if a function of the user's makes it,
    since that function may call the model as it likes.
    """
    return _flat(trace.outputs if step.setup.loss is None else [trace.loss])


def _compiled_numbers(step: StepUnderTest, seed: int, *, training: bool) -> Tensor:
    """Return the same of a pass of the user's own compiled model, without dropout."""
    model, batch = step.setup.model, step.unchanged.batch
    # a pass that writes to weights must begin with what the plain one began with
    rewritten = {
        name: p.detach().clone()
        for name, p in step.model.named_parameters()
        if name in step.unchanged.rewritten
    }
    with (
        same(model, parameters=False),
        at_weights(step.model, rewritten),
        in_mode(model, training=training),
        same_random_state(seed),
        torch.set_grad_enabled(training),
    ):
        for layer in model.modules():
            # by its rate, since its mode is that of the model, which is what is compared
            if isinstance(layer, AnyDropout):
                layer.p = 0.0
        outputs = call_model(model, batch) if step.setup.loss is None else step.loss_of(model, batch)
        return _flat(x for _, x in tensors_in(outputs))


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return all floating-point numbers in one vector, in float64."""
    return torch.cat([x.detach().flatten().double() for x in tensors if x.is_floating_point()])


@property_of(
    "outputs",
    passes=13,
    applies=lambda step: needs(step.training.run_again, "backward() runs nothing again"),
    asking=Cost(passes=3),
    uses=BACKWARD,
)
def dropout_repeats(step: StepUnderTest) -> Answers:
    """A block that is recomputed in the backward pass uses the dropout masks of its forward pass.

    With other masks, the gradient is that of another function: with the random state fixed, central
    differences of the loss disagree with it, and agree once dropout is off.
    """
    drawn = step.training.again(dropout=True)
    needs(step.is_exact, step.why_inexact)
    needs(distance(drawn.loss, drawn.again(seed=1).loss) > step.rounding, "nothing is drawn in training")
    is_rewritten = step.forward_writes[True].__contains__
    along = Along(drawn, is_rewritten)
    if along.all.disagrees and not Along(step.training, is_rewritten).all.disagrees:
        evidence = "with dropout on, the gradient is not the derivative of the loss; without, it is"
        advice = "let checkpoints keep the random state: preserve_rng_state=True"
        yield fail(along.first_wrong(step.facts.order), evidence, advice)

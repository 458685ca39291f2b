"""Properties of outputs: they are numbers, the same twice, and the same however they are computed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

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
    """Weights, buffers, outputs, the loss and its gradient are finite numbers."""
    model = step.unchanged.model
    for path, x in [*model.named_parameters(), *model.named_buffers()]:
        if _broken([x]) or (x.requires_grad and x.isinf().any()):
            yield fail(path, "holds NaN or infinity before the first step", "initialize or load it")
    yield from _is_finite(step.unchanged)
    if step.tests_a_part and step.estimates.reaches_whole_batch:
        yield from _is_finite(step.on_whole_batch)


def _is_finite(trace: Trace) -> Answers:
    if not torch.isfinite(trace.loss) or _broken(trace.outputs):
        place = next((e.module for e in trace.events if _broken(e.outputs) and not _broken(e.inputs)), "loss")
        say = "outputs NaN on finite inputs" if place != "loss" else f"the loss is {float(trace.loss)}"
        advice = "look for a row whose keys are all masked, a division by zero, a target outside the classes"
        yield fail(place, say, advice)
    with suppress(UserError):  # another property handles a loss without a gradient
        found = trace.again(training=True).gradients
        if bad := [n for n, g in found.items() if g is not None and not g.isfinite().all()]:
            others = f"as are those of {len(bad) - 1} others"
            say = f"its gradient is NaN or infinite although the loss is finite, {others}"
            yield fail(bad[-1], say, "look for a root, a norm or a logarithm at 0, or a masked division by 0")


def _broken(tensors: Iterable[Tensor]) -> bool:
    return any(x.is_floating_point() and bool(x.isnan().any()) for x in tensors)


@property_of(
    "outputs", explains=["causality", "rows", "padding", "cache", "state_dict"], passes=5, uses=FORWARD
)
def evaluation_repeats(step: StepUnderTest) -> Answers:
    """Two runs in evaluation mode on the same batch give the same results, unless the loss scores the
    distribution that they draw from.
    """
    first = step.exact.again(dropout=True)
    second = first.again(seed=1)
    apart = step.comparison.difference(first, second, whole)
    if apart is None:
        return
    by_dropout = step.comparison.difference(step.exact, step.exact.again(seed=1), whole) is None
    calls = zip(first.events, second.events, strict=False)
    place = next((a.module for a, b in calls if part_ways(a, b, whole, step.rounding)), None)
    if not by_dropout and step.facts.is_scored and scores_its_draws(step.exact, step.facts.scored_places):
        yield note(place or "", "it draws from a distribution that the loss scores, in evaluation mode too")
    elif place is not None and (by_dropout or _asks_the_same(step, second)):
        say = f"two runs in evaluation mode differ by {apart.size:.1e} of the output"
        advice = "draw only in training mode: training=self.training, and dropout_p=0.0 otherwise"
        yield fail(place, say + ", by dropout" * by_dropout, advice)
    else:
        yield note(place or "", "the task is drawn: outputs depend on the random state in evaluation mode")


def _asks_the_same(step: StepUnderTest, other: Trace) -> bool:
    """Whether the loss is a cross-entropy at the same places in another run, so that no task is drawn."""
    with suppress(Unknown):
        return step.facts.targets.counted.equal(Facts(other, step.declare).targets.counted)
    return False


@property_of("outputs", explains=["gradients", "step"], passes=4, uses=FORWARD)
def training_equals_evaluation(step: StepUnderTest) -> Answers:
    """Without dropout, training mode gives the same outputs as evaluation mode."""
    evaluated = step.exact
    if left := left_by(step.training):  # the weights that the training pass computes with
        evaluated = step.exact.again(weights=left)
    found = step.comparison.difference(evaluated, step.training, whole)
    if found is None:
        apart = distance(evaluated.loss, step.training.loss)
        if apart > step.rounding and not step.comparison.draws:
            yield note("loss", f"it differs by {apart:.1e} between the modes, with the same outputs")
    elif step.moving:
        raise Unknown(f"{step.moving[0]} holds running statistics, which evaluation reads")
    elif step.comparison.draws:
        raise Unknown("training draws other numbers than torch's dropout: pass the model with a rate of 0")
    else:
        say = f"without dropout, outputs of training and of evaluation differ by {found.size:.1e}"
        if is_of_library(step.model, found.module):
            yield note(found.module, f"{say}, as a library builds it")
        else:
            yield fail(found.module, say, "nothing besides dropout may depend on self.training")


@property_of(
    "outputs",
    passes=14,
    uses=FORWARD,
    applies=lambda step: needs(
        any(map(runs_compiled, step.setup.model.modules())), "nothing of it is compiled"
    ),
)
def compiled_equals_plain(step: StepUnderTest) -> Answers:
    """The compiled model gives the outputs of the uncompiled one, in either mode, up to rounding."""
    model, batch, alone = step.setup.model, step.unchanged.batch, step.setup.loss is None

    def flat(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([x.detach().flatten().double() for x in tensors if x.is_floating_point()])

    def read(trace: Trace) -> Tensor:
        return flat(trace.outputs if alone else [trace.loss])

    def compiled(seed: int, *, training: bool) -> Tensor:
        own = step.model.named_parameters()
        copies = {n: p.detach().clone() for n, p in own if n in step.unchanged.rewritten}
        with (
            same(model, parameters=False),
            at_weights(step.model, copies),
            in_mode(model, training=training),
            same_random_state(seed),
            torch.set_grad_enabled(training),
        ):
            for layer in model.modules():
                if isinstance(layer, AnyDropout):
                    layer.p = 0.0
            outputs = call_model(model, batch) if alone else step.loss_of(model, batch)
            return flat(x for _, x in tensors_in(outputs))

    for training in (False, True):
        own, plain = (
            compiled(0, training=training),
            step.unchanged.again(training=training, dropout=not training),
        )
        draws = training and not torch.equal(own, compiled(1, training=training))
        needs(not draws, "in training it draws other numbers than dropout's: pass it with a rate of 0")
        if (apart := distance(own, read(plain))) > (least := rounding_of(plain, read)):
            say = f"compiled it differs by {apart:.1e}, while rounding explains {least:.1e}"
            advice = "compile with backend='aot_eager' and part by part to find the graph that differs"
            yield fail("" if alone else "loss", say + " in training mode" * training, advice)


@property_of(
    "outputs",
    passes=13,
    applies=lambda s: needs(s.training.run_again, "backward() runs nothing again"),
    asking=Cost(passes=3),
    uses=BACKWARD,
)
def dropout_repeats(step: StepUnderTest) -> Answers:
    """A block that is recomputed in the backward pass uses the dropout masks of its forward pass."""
    drawn = step.training.again(dropout=True)
    needs(step.is_exact, step.why_inexact)
    needs(distance(drawn.loss, drawn.again(seed=1).loss) > step.rounding, "nothing is drawn in training")
    left_out = step.rewritten[True].__contains__
    along = Along(drawn, left_out)
    if along.all.disagrees and not Along(step.training, left_out).all.disagrees:
        say = "with dropout on, the gradient is not the derivative of the loss; without, it is"
        advice = "let checkpoints keep the random state: preserve_rng_state=True"
        yield fail(along.first_wrong(step.facts.order), say, advice)

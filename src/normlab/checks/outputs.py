"""Properties of outputs: they are numbers, the same twice, and the same in each way of computing them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn

from normlab.checks.property import Answers, Untestable, fail, note, property_of
from normlab.checks.step import Step
from normlab.errors import UserError
from normlab.trace.along import Along
from normlab.trace.compare import distance, part_ways, whole
from normlab.trace.exact import rounding_of
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.tensors import call_model, compiles, tensors_in
from normlab.trace.trace import Trace
from normlab.trace.untouched import in_mode, same, same_random_state


@property_of("outputs", passes=1)
def finite(step: Step) -> Answers:
    """Weights, buffers, outputs, the loss and its gradient are finite numbers."""
    model, trace = step.whole.model, step.whole
    for path, x in [*model.named_parameters(), *model.named_buffers()]:
        if _broken([x]) or (isinstance(x, nn.Parameter) and x.is_floating_point() and x.isinf().any()):
            yield fail(path, "holds NaN or infinity before the first step", "initialize or load it")
    if not torch.isfinite(trace.loss) or _broken(trace.outputs):
        place = next((e.module for e in trace.events if _broken(e.outputs) and not _broken(e.inputs)), "loss")
        say = "puts out NaN on finite inputs" if place != "loss" else f"the loss is {float(trace.loss)}"
        advice = "look for a row whose keys are all masked, a division by zero, a target outside the classes"
        yield fail(place, say, advice)
    with suppress(UserError):  # a loss without a gradient is for another property
        found = trace.again(training=True).gradients
        if bad := [n for n, g in found.items() if g is not None and _broken([g])]:
            say = f"its gradient is NaN though the loss is finite, and so are those of {len(bad) - 1} others"
            yield fail(bad[-1], say, "look for a root, a norm or a logarithm at 0, or a masked division by 0")


def _broken(tensors: Iterable[Tensor]) -> bool:
    return any(x.is_floating_point() and bool(x.isnan().any()) for x in tensors)


@property_of("outputs", explains=["causality", "rows", "padding", "cache", "state_dict"], passes=3)
def evaluation_repeats(step: Step) -> Answers:
    """Two runs in evaluation mode on the same batch give the same."""
    first = step.exact.again(dropout=True)
    second = first.again(seed=1)
    apart = step.difference(first, second, whole)
    if apart is None:
        return
    by_dropout = step.difference(step.exact, step.exact.again(seed=1), whole) is None
    calls = zip(first.events, second.events, strict=False)
    place = next((a.module for a, b in calls if part_ways(a, b, whole, step.rounding)), None)
    if place is not None and (by_dropout or _asks_the_same(step, second)):
        say = f"two runs in evaluation mode differ by {apart.size:.1e} of the output"
        advice = "draw in training mode only: training=self.training, and dropout_p=0.0 otherwise"
        yield fail(place, say + ", by dropout" * by_dropout, advice)
    else:
        yield note(place or "", "the task is drawn: outputs depend on the random state in evaluation mode")


def _asks_the_same(step: Step, other: Trace) -> bool:
    """Whether the loss is a cross-entropy at the same places in another run, so that no task was drawn."""
    with suppress(Unknown):
        return step.facts.targets.counted.equal(Facts(other, step.declare).targets.counted)
    return False


@property_of("outputs", explains=["gradients", "step"], passes=4)
def training_equals_evaluation(step: Step) -> Answers:
    """Without dropout, training mode gives what evaluation mode gives."""
    found = step.difference(step.exact, step.training, whole)
    if found is None:
        apart = distance(step.exact.loss, step.training.loss)
        if apart > step.rounding and not step.draws:
            yield note("loss", f"it differs by {apart:.1e} between the modes, from the same outputs")
    elif step.moving:
        raise Untestable(f"{step.moving[0]} holds running statistics, which evaluation reads")
    elif step.draws:
        raise Untestable("training draws besides torch's dropout: hand the model over with a rate of 0")
    else:
        say = f"without dropout, outputs of training and of evaluation differ by {found.size:.1e}"
        yield fail(found.module, say, "nothing besides dropout may depend on self.training")


@property_of("outputs", passes=6)
def compiled_equals_plain(step: Step) -> Answers:
    """The compiled model gives what the same model gives uncompiled, but for rounding."""
    model, alone = step.setup.model, step.setup.loss is None
    if not any(map(compiles, model.modules())):
        raise Untestable("nothing of the model is compiled")

    def flat(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([x.flatten().double() for x in tensors if x.is_floating_point()])

    def read(trace: Trace) -> Tensor:
        return flat(trace.outputs if alone else [trace.loss])

    with same(model, parameters=False), in_mode(model, training=False), same_random_state(0), torch.no_grad():
        outputs = call_model(model, step.batch) if alone else step.loss_of(model, step.batch)
    apart = distance(flat(x for _, x in tensors_in(outputs)), read(step.whole))
    if apart > (least := rounding_of(step.whole, read)):
        say = f"compiled and not, it differs by {apart:.1e}, where rounding explains {least:.1e}"
        advice = "compile with backend='aot_eager' and part by part to find the graph that differs"
        yield fail("" if alone else "loss", say, advice)


@property_of("outputs", passes=9)
def dropout_repeats(step: Step) -> Answers:
    """A block that is run again in the backward pass draws the dropout of its forward pass.

    With dropout on and the random state fixed, the gradient must be the derivative of the loss.
    """
    drawn = step.training.again(dropout=True)
    if not step.training.run_again:
        raise Untestable("the backward pass runs nothing again")
    if not step.is_exact:
        raise Untestable("the model does not run in float64")
    if distance(drawn.loss, drawn.again(seed=1).loss) <= step.rounding:
        raise Untestable("nothing is drawn in training")
    along = Along(drawn)
    if along.all.disagrees and not Along(step.training).all.disagrees:
        say = "with dropout on, the gradient is not the derivative of the loss; without, it is"
        advice = "let checkpoints keep the random state: preserve_rng_state=True"
        yield fail(along.first_wrong(m for m, _ in step.facts.order), say, advice)

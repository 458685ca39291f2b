"""Properties of outputs: they are numbers, the same twice, and the same in each way of computing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from normlab.checks.gradients import ordered
from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.errors import UserError
from normlab.trace.along import Along
from normlab.trace.compare import distance
from normlab.trace.exact import rounding_of
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.tensors import call_model, compiles, tensors_in
from normlab.trace.trace import Trace
from normlab.trace.untouched import in_mode, same, same_random_state


@property_of("outputs", passes=1)
def finite(step: Step) -> Iterator[Violation | Note]:
    """Weights, buffers, outputs, the loss and its gradient are finite numbers."""
    model, trace = step.plain.model, step.plain
    for path, x in [*model.named_parameters(), *model.named_buffers()]:
        weight = isinstance(x, torch.nn.Parameter)
        if x.is_floating_point() and bool(x.isnan().any() or (weight and x.isinf().any())):
            yield fail(path, "holds NaN or infinity before the first step", "initialize or load it")
            return
    if not bool(torch.isfinite(trace.loss)) or _broken(trace.outputs):
        place = next((e.module for e in trace.events if _broken(e.outputs) and not _broken(e.inputs)), "loss")
        yield fail(
            place,
            "puts out NaN on finite inputs" if place != "loss" else f"the loss is {float(trace.loss)}",
            "look for a row whose keys are all masked, a division by zero, a mean over nothing or a target "
            "outside the classes",
        )
        return
    with suppress(UserError):  # a loss without a gradient is for another property
        bad = [n for n, g in trace.again(training=True).gradients.items() if g is not None and _broken([g])]
        if bad:
            yield fail(
                bad[-1],
                f"its gradient is NaN though the loss is finite, and so are those of {len(bad) - 1} others",
                "a root, a norm or a logarithm at 0, or a masked branch that divides by zero",
            )


def _broken(tensors: Iterable[Tensor]) -> bool:
    return any(x.is_floating_point() and bool(x.isnan().any()) for x in tensors)


@property_of("outputs", explains=["causality", "rows", "padding", "cache", "state_dict"], passes=3)
def evaluation_repeats(step: Step) -> Iterator[Violation | Note]:
    """Two runs in evaluation mode on the same batch give the same."""
    first = step.exact.again(dropout=True)
    second = first.again(seed=1)
    found = step.difference(first, second, lambda x: x)
    if found is None:
        return
    dropout = step.difference(step.exact, step.exact.again(seed=1), lambda x: x) is None
    place = _where_drawn(step, first, second)
    if place is not None and (dropout or _asks_the_same(step, second)):
        yield fail(
            place,
            f"two runs in evaluation mode differ by {found.size:.1e} of the output"
            + (", by dropout" if dropout else ""),
            "draw in training mode only: training=self.training, and dropout_p=0.0 otherwise",
        )
    else:
        yield note(
            place or "", "the output depends on the random state in evaluation mode: the task is drawn"
        )


def _where_drawn(step: Step, first: Trace, second: Trace) -> str | None:
    """The module that draws; None where it is not the model that does so, but what calls it."""

    def apart(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
        pairs = zip(a, b, strict=False)
        return any(distance(x, y) > step.rounding for x, y in pairs if x.is_floating_point())

    for a, b in zip(first.events, second.events, strict=False):
        if apart(a.outputs, b.outputs) and not apart(a.inputs, b.inputs):
            return a.module
    return None


def _asks_the_same(step: Step, other: Trace) -> bool:
    """Whether the loss is a cross-entropy at the same places in another run, so that no task was drawn."""
    try:
        own, drawn = step.facts.targets.counted, Facts(other, step.declare).targets.counted
    except Unknown:
        return False
    return torch.equal(own, drawn)


@property_of("outputs", explains=["gradients", "step"], passes=4)
def training_equals_evaluation(step: Step) -> Iterator[Violation | Note]:
    """Without dropout, training mode gives what evaluation mode gives."""
    found = step.difference(step.exact, step.training, lambda x: x)
    if found is None:
        apart = distance(step.exact.loss, step.training.loss)
        if apart > step.rounding and not step.draws:
            yield note("loss", f"it differs by {apart:.1e} between the modes, from the same outputs")
        return
    if step.moving:
        raise Untestable(f"{step.moving[0]} holds running statistics, which evaluation reads")
    if step.draws:
        raise Untestable(
            "training draws something besides torch's dropout: hand the model over with a rate of 0"
        )
    yield fail(
        found.module,
        f"without dropout, outputs of training and of evaluation differ by {found.size:.1e}",
        "nothing besides dropout may depend on self.training",
    )


@property_of("outputs", passes=6)
def compiled_equals_plain(step: Step) -> Iterator[Violation | Note]:
    """The compiled model gives what the same model gives uncompiled, but for rounding."""
    model = step.setup.model
    if not any(compiles(m) for m in model.modules()):
        raise Untestable("nothing of the model is compiled")
    alone = step.setup.loss is None

    def value(trace: Trace) -> Tensor:
        return torch.cat([x.flatten().double() for x in trace.outputs if x.is_floating_point()])

    with same(model, parameters=False), in_mode(model, training=False), same_random_state(0), torch.no_grad():
        model.eval()
        outputs = call_model(model, step.batch) if alone else step.loss_of(model, step.batch)
    given = [x.flatten().double() for _, x in tensors_in(outputs) if x.is_floating_point()]
    read = value if alone else (lambda trace: trace.loss.flatten().double())
    apart, least = distance(torch.cat(given), read(step.plain)), rounding_of(step.plain, read)
    if apart > least:
        yield fail(
            "" if alone else "loss",
            f"compiled and not, it differs by {apart:.1e}, where rounding explains {least:.1e}",
            "compile with backend='aot_eager' and part by part to find the graph that differs",
        )


@property_of("outputs", passes=9)
def dropout_repeats(step: Step) -> Iterator[Violation | Note]:
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
    if not along.all.disagrees or Along(step.training).all.disagrees:
        return
    yield fail(
        along.first_wrong(ordered(step.facts, along.gradients)),
        "with dropout on, the gradient is not the derivative of the loss; without, it is",
        "let checkpoints keep the random state: preserve_rng_state=True",
    )

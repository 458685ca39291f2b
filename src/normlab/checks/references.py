"""Test what a loss compares the model with, such as a reference or itself, and adapters on a frozen model."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from normlab.base.units import count
from normlab.checks.property import FORWARD, Answers, fail, needs, note, property_of
from normlab.errors import UserError
from normlab.trace import starts
from normlab.trace.budget import Cost
from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.compared import Compared, Comparison, compared
from normlab.trace.facts.twins import Twins
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import tensors_in

NO_ADAPTER = "no matrix is corrected by an adapter that starts at 0"
SAME = "compute both alike: of the same tokens, with one mask, shift and temperature, summed or averaged"


@property_of(
    "loss",
    explains=["padded_loss", "derivative", "overfit", "ties"],
    passes=8,
    applies=lambda step: step.twins,
    asking=Cost(passes=2),
    uses=FORWARD,
)
def reference(step: StepUnderTest) -> Answers:
    """A loss that compares the model with a copy, or itself, sees no difference between equal weights.

    What it is compared with does not train, and a reference does not follow the model.

    q(f_θ(x)) = q(f_ref(x)) if θ = θ_ref, for each quantity q that the loss compares: the model is given the
    weights of the copy, and what the loss subtracts or takes a divergence of must be equal. Then the implicit
    rewards of a preference are 0, the ratio to an older policy is 1 and a divergence from the reference is 0.
    """
    twins, compared_there = step.twins, step.compared
    judged = compared_there.judged(step.rounding)
    if judged:
        yield from _both_train(twins)
    yield from _follows_the_model(step, twins, compared_there)
    is_itself = all(twin.is_self for twin in twins.twins)
    other = "itself, run without gradients" if is_itself else "its frozen copy"
    sizes = [size for size in compared_there.off.values() if size > step.rounding]
    if sizes:
        evidence = (
            f"with equal weights and an equal first input, the outputs of the model and of {other} differ"
        )
        yield note("", f"{evidence} by up to {max(sizes):.2g} of their size")
    if compared_there.comparisons:
        why = "comes from outputs that differ"
    else:
        why = "is not a difference, divergence or distance"
    needs(judged, f"what the loss makes of the model and of {other} {why}")
    for comparison in judged:
        if comparison.off <= step.rounding:
            continue
        evidence = (
            f"with equal weights, {_compared_numbers(comparison)} from the outputs of the model and of "
        )
        evidence += f"{other} are {comparison.off:.2g} of their size apart"
        if comparison.is_even:  # a temperature or a margin may be meant
            yield note("loss", f"{evidence}, by one factor or one summand")
        else:
            yield fail("loss", evidence, SAME)


def _compared_numbers(comparison: Comparison) -> str:
    """Say how many numbers are compared, and by which function."""
    is_difference = comparison.function.strip("_") in ("sub", "rsub", "subtract")
    function = "a difference" if is_difference else comparison.function
    return f"the {count(comparison.size, 'number')} that {function} takes"


def _both_train(twins: Twins) -> Answers:
    """A copy that trains with the model: what the model is compared with must stay where it is."""
    for twin in twins.twins:
        if twin.trains and twin.path is not None:
            evidence = "it is a copy of what the loss compares with it, and both train"
            yield fail(twin.path, evidence, "freeze it, and run it without gradients")


def _follows_the_model(step: StepUnderTest, twins: Twins, compared_there: Compared) -> Answers:
    """A preference that is measured by what the model has changed, if that is always nothing.

    The older policy of a ratio may be the model itself, where each batch is used once.
    """
    if not compared_there.ranked or not all(twin.is_self for twin in twins.twins):
        return
    # with other weights, as after some steps, a model differs from a fixed reference, and never from itself
    as_given = step.exact_as_given
    other_weights = {name: p.roll(1) for name, p in as_given.parameters.items() if p.is_floating_point()}
    with_others = compared(as_given.again(weights=other_weights), twins)
    if all(with_others.off.get(output, 1.0) <= step.rounding for output in compared_there.ranked):
        evidence = "it prefers one answer by how the model differs from itself, run without gradients"
        evidence += ": by nothing, with these weights and with others"
        yield fail("loss", evidence, "compare it with a frozen copy of its start")


@property_of(
    "structure",
    explains=["reference", "groups"],
    passes=4,
    applies=lambda step: needs(step.wiring.adapters, NO_ADAPTER),
    asking=Cost(passes=1),
    uses=FORWARD,
)
def adapters(step: StepUnderTest) -> Answers:
    """What adapters correct is frozen, and they start at 0: outputs are those without adapters.

    y = W x + s·B A x with B A = 0 at the start, so that y = W x (Hu et al. 2021, Section 4.1, arXiv
    2106.09685). Factors that are both away from 0 are a failure only if both look drawn: after training, or
    where they come from a decomposition of W, they are meant.
    """
    names = {id(p): name for name, p in step.exact.model.named_parameters()}
    start, live = step.exact_as_given.parameters, dict(step.model.named_parameters())
    of_adapters_at_zero, corrected = set[str](), list[str]()
    downs, ups = list[str](), list[str]()  # of adapters that are away from 0, on a frozen matrix
    for adapter in step.wiring.adapters:
        down, up, matrix = names[id(adapter.down)], names[id(adapter.up)], names[id(adapter.matrix)]
        if not (start[down].any() and start[up].any()):
            of_adapters_at_zero |= {down, up}
            corrected.append(matrix)
        elif live[down].requires_grad and live[up].requires_grad and not live[matrix].requires_grad:
            downs.append(down)
            ups.append(up)
    if all(starts.are_independent_draws(live[name].detach() for name in side) for side in (downs, ups)):
        evidence = f"both factors of {count(len(ups), 'adapter')} are drawn, so that training starts from "
        evidence += "another model than the frozen one"
        yield fail(ups[0], evidence, "start the second factor of each at 0")
        return
    needs(corrected, NO_ADAPTER)
    training = [n for n in corrected if live[n].requires_grad and not step.declare.is_frozen(n)]
    if training:
        share = f"{len(training)} of {len(corrected)} such matrices"
        evidence = f"it trains although an adapter corrects it, as do {share}"
        yield fail(training[0], evidence, "freeze the model before adapters are added to it")
    others = [n for n, p in live.items() if p.requires_grad and n not in of_adapters_at_zero]
    yield from _unlike_base(step, only_adapters=not others)
    if others and not training:
        yield note(others[0], f"{count(len(others), 'parameter')} besides the adapters train")


def _unlike_base(step: StepUnderTest, *, only_adapters: bool) -> Answers:
    """Outputs other than those of a frozen copy without adapters, or of the model while they are disabled."""
    place, evidence = "", "the adapters are 0, but outputs are {:.2g} of their size off those of {}"
    advice = "add nothing but their product to what the frozen matrices give"
    with suppress(Unknown, UserError):
        compared_there = step.compared
        without = [twin for twin in step.twins.twins if not twin.is_self and not twin.weights]
        size = max((compared_there.off[output] for output in compared_there.of_same_inputs), default=0.0)
        if without and len(without) == len(step.twins.twins) and size > step.rounding:
            yield fail(place, evidence.format(size, "a frozen model with the same other weights"), advice)
    trace = step.exact_as_given
    # PEFT's switch; it is any attribute of a model that anybody may have written
    switches: list[Any] = [m.disable_adapter for m in trace.model.modules() if hasattr(m, "disable_adapter")]
    if not switches or not only_adapters:
        return
    outputs = [x for x in trace.outputs if x.is_floating_point()]
    with switches[0]():
        without_adapters = [x for _, x in tensors_in(trace.again().outputs) if x.is_floating_point()]
    sizes = (distance(x, y) for x, y in zip(outputs, without_adapters, strict=False))
    size = max(sizes, default=0.0)
    if size > step.rounding:
        yield fail(place, evidence.format(size, "the same model while they are disabled"), advice)

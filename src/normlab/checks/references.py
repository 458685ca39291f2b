"""Properties of what a model is compared with, and of what is added to a frozen one."""

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
    """
    twins, seen = step.twins, step.compared
    judged = seen.judged(step.rounding)
    if judged:
        yield from _trained(twins)
    yield from _following(step, twins, seen)
    what = "itself, run without gradients" if all(twin.is_self for twin in twins.twins) else "its frozen copy"
    apart = [off for off in seen.off.values() if off > step.rounding]
    if apart:
        say = f"with equal weights and an equal first input, the outputs of the model and of {what} differ"
        yield note("", f"{say} by up to {max(apart):.1e} of their size")
    why = "comes from outputs that differ" if seen.comparisons else "is no difference, divergence or distance"
    needs(judged, f"what the loss makes of the model and of {what} {why}")
    for one in judged:
        if one.off > step.rounding:
            say = f"with equal weights, {_said(one)} from the outputs of the model and of {what} are "
            say += f"{one.off:.1e} of their size apart"
            if one.is_even:
                yield note("loss", f"{say}, by one factor or one summand")
            else:
                yield fail("loss", say, SAME)


def _said(one: Comparison) -> str:
    """Say what is compared."""
    is_difference = one.function.strip("_") in ("sub", "rsub", "subtract")
    return f"the {count(one.size, 'number')} that {'a difference' if is_difference else one.function} takes"


def _trained(twins: Twins) -> Answers:
    for twin in twins.twins:
        if twin.trains and twin.path is not None:
            say = "it is a copy of what the loss compares with it, and both train"
            yield fail(twin.path, say, "freeze it, and run it without gradients")


def _following(step: StepUnderTest, twins: Twins, seen: Compared) -> Answers:
    """A preference that is measured by what the model has changed, if that is always nothing.

    The older policy of a ratio may be the model itself, where each batch is used once.
    """
    if not seen.ranked or not all(twin.is_self for twin in twins.twins):
        return
    rolled = {n: p.roll(1) for n, p in step.exact_as_given.parameters.items() if p.is_floating_point()}
    other = compared(step.exact_as_given.again(weights=rolled), twins)
    if all(other.off.get(output, 1.0) <= step.rounding for output in seen.ranked):
        say = "it prefers one answer by how the model differs from itself, run without gradients"
        say += ": by nothing, with these weights and with others"
        yield fail("loss", say, "compare it with a frozen copy of its start")


@property_of(
    "structure",
    explains=["reference", "groups"],
    passes=4,
    applies=lambda step: needs(step.wiring.adapters, NO_ADAPTER),
    asking=Cost(passes=1),
    uses=FORWARD,
)
def adapters(step: StepUnderTest) -> Answers:
    """What adapters correct is frozen, and they start at 0: outputs are those without adapters."""
    names = {id(p): name for name, p in step.exact.model.named_parameters()}
    start, live = step.exact_as_given.parameters, dict(step.model.named_parameters())
    of_adapters, at_zero, away_from_zero = set[str](), list[str](), list[str]()
    for one in step.wiring.adapters:
        down, up, matrix = names[id(one.down)], names[id(one.up)], names[id(one.matrix)]
        if start[down].any() and start[up].any():
            is_frozen = live[down].requires_grad and live[up].requires_grad and not live[matrix].requires_grad
            away_from_zero += [down, up] if is_frozen else []
            continue
        of_adapters |= {down, up}
        at_zero.append(matrix)
    downs, ups = away_from_zero[::2], away_from_zero[1::2]
    if all(starts.are_independent_draws(live[n].detach() for n in side) for side in (downs, ups)):
        say = f"both factors of {count(len(ups), 'adapter')} are drawn, so that training starts from another "
        yield fail(ups[0], f"{say}model than the frozen one", "start the second factor of each at 0")
        return
    needs(at_zero, NO_ADAPTER)
    training = [n for n in at_zero if live[n].requires_grad and not step.declare.is_frozen(n)]
    if training:
        share = f"{len(training)} of {len(at_zero)} such matrices"
        say = f"it trains although an adapter corrects it, as do {share}"
        yield fail(training[0], say, "freeze the model before adapters are added to it")
    others = [n for n, p in live.items() if p.requires_grad and n not in of_adapters]
    yield from _unlike_base(step, only_adapters=not others)
    if others and not training:
        yield note(others[0], f"{count(len(others), 'parameter')} besides the adapters train")


def _unlike_base(step: StepUnderTest, *, only_adapters: bool) -> Answers:
    """Outputs other than those of a frozen copy without adapters, or of the model while they are disabled."""
    place, say = "", "the adapters are 0, but outputs are {:.1e} of their size off those of {}"
    advice = "add nothing but their product to what the frozen matrices give"
    with suppress(Unknown, UserError):
        seen = step.compared
        without = [twin for twin in step.twins.twins if not twin.is_self and not twin.weights]
        off = max((seen.off[output] for output in seen.of_same_inputs), default=0.0)
        if without and len(without) == len(step.twins.twins) and off > step.rounding:
            yield fail(place, say.format(off, "a frozen model with the same other weights"), advice)
    trace = step.exact_as_given
    switches: list[Any] = [m.disable_adapter for m in trace.model.modules() if hasattr(m, "disable_adapter")]
    if not switches or not only_adapters:
        return
    own = [x for x in trace.outputs if x.is_floating_point()]
    with switches[0]():
        bare = [x for _, x in tensors_in(trace.again().outputs) if x.is_floating_point()]
    off = max((distance(x, y) for x, y in zip(own, bare, strict=False)), default=0.0)
    if off > step.rounding:
        yield fail(place, say.format(off, "the same model while they are disabled"), advice)

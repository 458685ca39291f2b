"""Properties of a start: how parameters and buffers are drawn, and what the untrained model predicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from normlab.base.units import count
from normlab.checks.property import AT_REST, FORWARD, Answers, fail, needs, note, property_of
from normlab.trace import starts
from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.stacks import odd_one, siblings
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import counts


@property_of("start", explains=["initial_loss", "state_dict"], passes=2, uses=AT_REST)
def start(step: StepUnderTest) -> Answers:
    """Parameters start as declared, as their class or make() draws them, and as their siblings do; what a
    part of the model gives itself as a start is not drawn over.

    Constants are compared exactly, draws by a z-test on the logarithm of their deviation, whose error uses
    their kurtosis, corrected for the number of comparisons. A sibling is compared only if the others agree,
    so that a start that is scaled by depth passes; so are the experts that one parameter holds.
    """
    needs(not step.is_trained, "the model is trained; its initial values are gone")
    declared: tuple[starts.Start, ...] = step.declare.init if isinstance(step.declare.init, tuple) else ()
    for path, how in starts.differences(step.model, declared):
        yield fail(path, how, "initialize it as declared, or declare what you intend")
    meant = {one.path for one in declared}
    live, drawn = {n: p for n, p in starts.parameters_of(step.model).items() if n not in meant}, set[str]()
    with suppress(Unknown):
        one, other = map(starts.parameters_of, step.fresh.pair)
        odd, drawn = starts.unlike_class(live, one, other), {*one}
        for first in odd[:1]:
            say = f"{first.how} (unlike a newly made model: {len(odd)} of {len(live)} parameters)"
            yield fail(first.path, say, "draw replaced parts as the class does")
    for replaced in step.fresh.replaced[:1]:
        say = f"{replaced.instead_of} gives it a start of its own, which {replaced.by} replaces"
        more = f"{say} (as that of {count(len(step.fresh.replaced), 'parameter')})"
        yield fail(replaced.path, more, "draw everything first, and let parts start as they need afterwards")
    groups = [{n: live[n] for n in names} for names in siblings(step.facts.stacks, live).values()]
    several = {n: p for n, p in live.items() if p.ndim == 3 and len(p) > 3 and n not in drawn}
    groups += [{f"{n}[{i}]": part for i, part in enumerate(p)} for n, p in several.items()]
    if (unlike := starts.unlike_siblings(groups)) is not None:
        yield fail(unlike.path, unlike.how, "initialize all blocks alike")
    needs(drawn or step.facts.stacks or declared, starts.NOT_MADE)


@property_of("start", explains=["start", "initial_loss"], passes=2, uses=AT_REST)
def seeds(step: StepUnderTest) -> Answers:
    """Each block is drawn independently, and two seeds give two different models."""
    live = starts.parameters_of(step.model)
    for names in siblings(step.facts.stacks, live).values():
        for first, name in starts.equal_draws({n: live[n] for n in names}, step.fresh.draws):
            say = f"is drawn at random, yet equals {first} in every entry"
            meant = step.fresh.copies(first, name) or step.is_trained
            yield note(name, say) if meant else fail(name, say, "build each block by itself, not as a copy")
            return
    one, other = map(starts.parameters_of, step.fresh.pair)
    drawn = [n for n, p in one.items() if p.ndim >= 2 and n in other and not starts.constant(p)]
    same = {n for n in drawn if torch.equal(one[n], other[n])}
    needs(not drawn or len(same) < len(drawn), "two seeds gave the same model: make() seeds itself")
    for names in siblings(step.facts.stacks, drawn).values():
        if not same.issuperset(names) and (odd := same.intersection(names)):
            say = "is the same under two seeds, unlike in other blocks"
            yield fail(min(odd, key=names.index), say, "draw it by torch's generator")


@property_of("start", explains=["overfit"], passes=0, uses=FORWARD)
def initial_loss(step: StepUnderTest) -> Answers:
    r"""An untrained model has no favourite: no class outweighs all others.

    Logits that know nothing and have variance :math:`s^2` over C classes cost :math:`\ln C + s^2 / 2`; at
    :math:`s^2 = 2 \ln C` the largest of them outweighs the sum of the rest (Derrida 1981, the random energy
    model), and what the model says is the noise of its start.
    """
    facts, targets = step.facts, step.facts.targets
    needs(not facts.trained, "the model is trained")
    counted = targets.counted.reshape(-1)
    logits = facts.logits.value.reshape(-1, targets.classes)[counted.to(facts.logits.value.device)]
    variance, even = float(logits.double().var(-1).mean()), math.log(targets.classes)
    loss = float(targets.nll.reshape(-1)[counted].mean())
    if targets.classes > 1 and variance > 2 * even and loss > even:
        knows = f"the untrained model costs {loss:.3g} nats, but one that knows nothing {even:.3g}"
        say, where = f"{knows}: its logits have deviation {variance**0.5:.3g}", facts.head or "loss"
        pair = step.fresh.pair if step.fresh.by_class else None
        by_class = pair and not starts.unlike_class(*map(starts.parameters_of, (step.model, *pair)))
        yield note(where, say) if by_class or not facts.head else fail(where, say, "draw it smaller")


@property_of("structure", explains=["start", "meta", "state_dict"], passes=2, uses=AT_REST)
def buffers(step: StepUnderTest) -> Answers:
    """Each buffer, except a count of steps, has the values and the precision of a freshly built model."""
    counted = counts(step.model)
    own = {n: b for n, b in step.model.named_buffers() if n not in counted}
    live = {n: b for n, b in own.items() if b.numel() and not b.is_meta}
    needs(live, "the model has no buffers")
    yield from _unfilled(step, live)
    moving = step.training.moving
    live = {n: b for n, b in live.items() if n not in moving}
    with suppress(Unknown):
        one, other = (dict(m.named_buffers()) for m in step.fresh.pair)
        for name, b in live.items():
            a = one.get(name)
            if a is None or a.shape != b.shape or not torch.equal(a, other[name]):
                continue
            if distance(b, a.to(b.dtype)) > (4 * torch.finfo(b.dtype).eps if b.is_floating_point() else 0):
                yield fail(name, "differs from that of a new model", "build it again once it is moved")
        return
    groups = [names for names in siblings(step.facts.stacks, live).values() if len(names) > 2]
    needs(groups, starts.NOT_MADE)
    for names in groups:
        odd = odd_one({n: next(o for o in names if torch.equal(live[n], live[o])) for n in names})
        if odd is not None:
            yield fail(odd.key, "differs from those of all other blocks", "build all blocks alike")


def _unfilled(step: StepUnderTest, live: Mapping[str, Tensor]) -> Answers:
    """Buffers that are 0 throughout, but matter, and that no state dict fills."""
    saved = step.model.state_dict().keys()
    for name, b in live.items():
        if name in saved or not b.is_floating_point() or bool(b.any()):
            continue
        ones = torch.ones_like(step.exact.buffers[name])
        filled = step.exact.again(weights={name: ones})
        if distance(step.exact.loss, filled.loss) > step.rounding:
            say = "it is 0 throughout, the loss depends on it, and no state dict holds it"
            yield note(name, f"{say}: so to_empty() may leave a buffer")

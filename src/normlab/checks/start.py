"""Test how training starts: how parameters and buffers are drawn, and what the untrained model predicts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
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
    declared_paths = {declaration.path for declaration in declared}
    live = {n: p for n, p in starts.parameters_of(step.model).items() if n not in declared_paths}
    yield from _unlike_class(step, live)
    yield from _drawn_over(step)
    made = _made_parameters(step)
    yield from _unlike_siblings(step, live, made)
    needs(made or step.facts.stacks or declared, starts.NOT_MADE)


def _made_parameters(step: StepUnderTest) -> set[str]:
    """Return the names of the parameters of a newly made model; none if no new one can be made."""
    with suppress(Unknown):
        made, _ = step.fresh.pair
        return {*starts.parameters_of(made)}
    return set()


def _unlike_class(step: StepUnderTest, live: Mapping[str, Tensor]) -> Answers:
    """Parameters that their class or make() draws otherwise, as two newly made models show."""
    with suppress(Unknown):
        first_made, second_made = map(starts.parameters_of, step.fresh.pair)
        differing = starts.unlike_class(live, first_made, second_made)
        for difference in differing[:1]:
            share = f"{len(differing)} of {len(live)} parameters"
            evidence = f"{difference.how} (unlike a newly made model: {share})"
            yield fail(difference.path, evidence, "draw replaced parts as the class does")


def _drawn_over(step: StepUnderTest) -> Answers:
    """A start that a part of the model gives itself, and that another function of the user's replaces."""
    for replaced in step.fresh.replaced[:1]:
        evidence = f"{replaced.instead_of} gives it a start of its own, which {replaced.by} replaces"
        evidence += f" (as that of {count(len(step.fresh.replaced), 'parameter')})"
        advice = "draw everything first, and let parts start as they need afterwards"
        yield fail(replaced.path, evidence, advice)


def _unlike_siblings(step: StepUnderTest, live: Mapping[str, Tensor], made: Collection[str]) -> Answers:
    """A parameter that starts unlike those of other blocks, or an expert unlike the others."""
    groups = [{n: live[n] for n in names} for names in siblings(step.facts.stacks, live).values()]
    for name, p in live.items():
        # several matrices in one parameter, as of experts; what a new model draws is compared with that
        if p.ndim == 3 and len(p) > 3 and name not in made:
            groups.append({f"{name}[{i}]": matrix for i, matrix in enumerate(p)})
    unlike = starts.unlike_siblings(groups)
    if unlike is not None:
        yield fail(unlike.path, unlike.how, "initialize all blocks alike")


@property_of("start", explains=["start", "initial_loss"], passes=2, uses=AT_REST)
def seeds(step: StepUnderTest) -> Answers:
    """Each block is drawn independently, and two seeds give two different models.

    Two draws of real numbers are never equal, so matrices that agree in every entry are one draw.
    """
    live = starts.parameters_of(step.model)
    for names in siblings(step.facts.stacks, live).values():
        for first, name in starts.equal_draws({n: live[n] for n in names}, step.fresh.draws):
            evidence = f"is drawn at random, yet equals {first} in every entry"
            # a class may build its blocks as copies, and training goes on from there
            if step.fresh.copies(first, name) or step.is_trained:
                yield note(name, evidence)
            else:
                yield fail(name, evidence, "build each block by itself, not as a copy")
            return
    first_made, second_made = map(starts.parameters_of, step.fresh.pair)
    drawn = [n for n, p in first_made.items() if p.ndim >= 2 and n in second_made and not starts.constant(p)]
    same = {n for n in drawn if torch.equal(first_made[n], second_made[n])}
    needs(not drawn or len(same) < len(drawn), "two seeds gave the same model: make() seeds itself")
    for names in siblings(step.facts.stacks, drawn).values():
        # what is the same in all blocks is a constant, such as an identity
        if not same.issuperset(names) and (odd := same.intersection(names)):
            evidence = "is the same under two seeds, unlike in other blocks"
            yield fail(min(odd, key=names.index), evidence, "draw it by torch's generator")


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
    # logits that vary and yet cost less than even odds know something: of a model that is partly trained
    if targets.classes > 1 and variance > 2 * even and loss > even:
        evidence = f"the untrained model costs {loss:.3g} nats, but one that knows nothing {even:.3g}"
        evidence += f": its logits have deviation {variance**0.5:.3g}"
        place = facts.head or "loss"
        if _starts_as_its_class(step) or not facts.head:
            yield note(place, evidence)
        else:
            yield fail(place, evidence, "draw it smaller")


def _starts_as_its_class(step: StepUnderTest) -> bool:
    """Whether the model starts as its library's class draws it."""
    pair = step.fresh.pair if step.fresh.by_class else None
    if not pair:
        return False
    return not starts.unlike_class(*map(starts.parameters_of, (step.model, *pair)))


@property_of("structure", explains=["start", "meta", "state_dict"], passes=2, uses=AT_REST)
def buffers(step: StepUnderTest) -> Answers:
    """Each buffer, except a count of steps, has the values and the precision of a freshly built model.

    No gradient ever mends a buffer, so one that a cast or a move has changed stays wrong. What two new models
    differ in is drawn, and what a training step changes is a statistic: neither is compared.
    """
    counts_of_steps = counts(step.model)
    live = {
        name: buffer
        for name, buffer in step.model.named_buffers()
        if name not in counts_of_steps and buffer.numel() and not buffer.is_meta
    }
    needs(live, "the model has no buffers")
    yield from _unfilled(step, live)
    moving = step.training.moving
    live = {name: buffer for name, buffer in live.items() if name not in moving}
    with suppress(Unknown):
        first_made, second_made = (dict(model.named_buffers()) for model in step.fresh.pair)
        yield from _unlike_new(live, first_made, second_made)
        return
    yield from _unlike_other_blocks(step, live)


def _unlike_new(
    live: Mapping[str, Tensor], first_made: Mapping[str, Tensor], second_made: Mapping[str, Tensor]
) -> Answers:
    """Buffers that differ from those of a new model by more than one cast rounds."""
    for name, buffer in live.items():
        new = first_made.get(name)
        if new is None or new.shape != buffer.shape or not torch.equal(new, second_made[name]):
            continue
        rounding = 4 * torch.finfo(buffer.dtype).eps if buffer.is_floating_point() else 0
        if distance(buffer, new.to(buffer)) > rounding:
            yield fail(name, "differs from that of a new model", "build it again once it is moved")


def _unlike_other_blocks(step: StepUnderTest, live: Mapping[str, Tensor]) -> Answers:
    """One buffer that differs from those of all other blocks, where no new model can be made."""
    groups = [names for names in siblings(step.facts.stacks, live).values() if len(names) > 2]
    needs(groups, starts.NOT_MADE)
    for names in groups:
        # each is known by the first one that it equals
        equal_to = {n: next(other for other in names if torch.equal(live[n], live[other])) for n in names}
        odd = odd_one(equal_to)
        if odd is not None:
            yield fail(odd.key, "differs from those of all other blocks", "build all blocks alike")


def _unfilled(step: StepUnderTest, live: Mapping[str, Tensor]) -> Answers:
    """Buffers that are 0 throughout, but matter, and that no state dict fills."""
    saved = step.model.state_dict().keys()
    for name, buffer in live.items():
        if name in saved or not buffer.is_floating_point() or bool(buffer.any()):
            continue
        ones = torch.ones_like(step.exact.buffers[name])
        filled = step.exact.again(weights={name: ones})
        if distance(step.exact.loss, filled.loss) > step.rounding:
            evidence = "it is 0 throughout, the loss depends on it, and no state dict holds it"
            yield note(name, f"{evidence}: so to_empty() may leave a buffer")

"""Properties of a start: how parameters and buffers are drawn, and what the untrained model predicts."""

from __future__ import annotations

import math
from contextlib import suppress

import torch

from normlab.checks.property import Answers, Untestable, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.compare import distance
from normlab.trace.exact import from_library
from normlab.trace.facts import Unknown
from normlab.trace.facts.stacks import odd_one, siblings
from normlab.trace.starts import (
    Start,
    constant,
    differences,
    equal_draws,
    parameters_of,
    unlike_class,
    unlike_siblings,
)


@property_of("start", explains=["initial_loss", "state_dict"], passes=0)
def start(step: Step) -> Answers:
    """Parameters start as declared, as their class or ``make`` draws them, and as their siblings do.

    Constants are compared exactly, draws by a z-test on the logarithm of their deviation, whose error uses
    their kurtosis, corrected for the number of comparisons. Siblings are compared where the rest of them
    agree, so that a start that is scaled by depth passes.
    """
    if _trained(step):
        raise Untestable("the model is trained; its start is gone")
    declared: tuple[Start, ...] = step.declare.init if isinstance(step.declare.init, tuple) else ()
    for path, how in differences(step.model, declared):
        yield fail(path, how, "initialize it as declared, or declare what is meant")
        return
    live = parameters_of(step.model)
    for one in declared:
        live.pop(one.path, None)
    drawn = False
    with suppress(Unknown):
        odd = unlike_class(live, *map(parameters_of, step.fresh.pair))
        drawn = True
        if odd:
            more = f" ({len(odd)} of {len(live)} parameters are unlike their class)" if len(odd) > 1 else ""
            advice = "run the class's own initialization after replacing parts"
            yield fail(odd[0].path, odd[0].how + more, advice)
            return
    groups = [{n: live[n] for n in names} for names in siblings(step.facts.stacks, live).values()]
    groups += [{f"{n}[{i}]": part for i, part in enumerate(p)} for n, p in live.items() if p.ndim == 3]
    if (unlike := unlike_siblings(groups)) is not None:
        yield fail(unlike.path, unlike.how, "initialize all blocks alike")
    elif not drawn and not step.facts.stacks and not declared:
        raise Untestable("no siblings, and nothing says how the model is drawn: pass make=")


def _trained(step: Step) -> bool:
    """Whether the weights are trained: the loss says so, or most constants of the start are none any more."""
    with suppress(Unknown):
        if step.facts.trained:
            return True
    with suppress(Unknown):
        fixed = {n for n, p in parameters_of(step.fresh.pair[0]).items() if p.ndim and constant(p)}
        live = parameters_of(step.model)
        moved = [n for n in fixed if n in live and live[n].numel() > 1 and not constant(live[n])]
        return len(moved) > len(fixed) / 2
    return False


@property_of("start", explains=["start", "initial_loss"], passes=0)
def seeds(step: Step) -> Answers:
    """Blocks are drawn each for itself, and two seeds give two models.

    No matrix that is drawn equals the one of another block in every entry, unless the block stands twice.
    """
    live = parameters_of(step.model)
    for names in siblings(step.facts.stacks, live).values():
        for first, name in equal_draws({n: live[n] for n in names}):
            say = f"is drawn, and equals {first} in every entry"
            meant = _copied_on_purpose(step, first, name) or _trained(step)
            advice = "build each block anew: a copy has its numbers"
            yield note(name, say) if meant else fail(name, say, advice)
            return
    one, other = map(parameters_of, step.fresh.pair)
    drawn = [n for n, p in one.items() if p.ndim >= 2 and n in other and not constant(p)]
    same = {n for n in drawn if torch.equal(one[n], other[n])}
    if drawn and len(same) == len(drawn):
        raise Untestable("two seeds gave the same model: make() seeds itself; leave the seed to its caller")
    alike = siblings(step.facts.stacks, drawn).values()
    odd = next((n for names in alike for n in names if n in same and not same.issuperset(names)), None)
    if odd is not None:
        say = "is the same under two seeds, and in other blocks it is not"
        yield fail(odd, say, "draw it by torch's generator")


def _copied_on_purpose(step: Step, first: str, name: str) -> bool:
    """Whether the model's own class, or a library's container (nn.TransformerEncoder), copies its blocks."""
    if step.fresh.of_class is not None:
        drawn = parameters_of(step.fresh.of_class)
        return torch.equal(drawn[first], drawn[name])
    owner = next(c for c in step.facts.stacks if name.startswith(f"{c}."))
    return from_library(step.model.get_submodule(owner.rpartition(".")[0]))


@property_of("start", explains=["overfit"], passes=0)
def initial_loss(step: Step) -> Answers:
    r"""An untrained model has no favourite: no class outweighs all others.

    Logits that know nothing and have variance :math:`s^2` over C classes cost :math:`\ln C + s^2 / 2`; at
    :math:`s^2 = 2 \ln C` the largest of them outweighs the sum of the rest (Derrida 1981, the random energy
    model), and what the model says is the noise of its start.
    """
    facts, targets = step.facts, step.facts.targets
    if facts.trained:
        raise Untestable("the model is trained")
    counted = targets.counted.reshape(-1)
    logits = facts.logits.value.reshape(-1, targets.classes)[counted.to(facts.logits.value.device)]
    variance = float(logits.double().var(-1).mean())
    loss, even = float(targets.nll.reshape(-1)[counted].mean()), math.log(targets.classes)
    if targets.classes > 1 and variance > 2 * even and loss > even:
        knows = f"the untrained model costs {loss:.3g} nats, and one that knows nothing {even:.3g}"
        say = f"{knows}: its logits have deviation {variance**0.5:.3g}"
        where = _head(step)
        meant = where == "loss" or (step.fresh.by_class and _same_start(step))
        yield note(where, say) if meant else fail(where, say, "draw the head, or the tied table, smaller")


def _same_start(step: Step) -> bool:
    return not unlike_class(parameters_of(step.model), *map(parameters_of, step.fresh.pair))


def _head(step: Step) -> str:
    roles, parameters = step.facts.roles, dict(step.exact.model.named_parameters())
    tables = [n for n, role in roles.items() if role in ("head", "embedding")]
    fits = [n for n in tables if step.facts.logits.shape[-1] in parameters[n].shape]
    return max(fits, key=lambda n: roles[n] == "head", default="loss")


@property_of("structure", explains=["start", "meta", "state_dict"], passes=3)
def buffers(step: Step) -> Answers:
    """Each buffer holds what a freshly built model has there, in the buffer's own precision.

    Buffers that a training step changes, and those that two seeds draw differently, are left out. Without a
    way to build the model, those of other blocks are compared.
    """
    live = {n: b for n, b in step.model.named_buffers() if b.numel() and not b.is_meta}
    if not live:
        raise Untestable("the model has no buffers")
    moving = step.training.moving
    live = {n: b for n, b in live.items() if n not in moving}
    with suppress(Unknown):
        one, other = (dict(m.named_buffers()) for m in step.fresh.pair)
        for name, b in live.items():
            a = one.get(name)
            if a is None or a.shape != b.shape or not torch.equal(a, other[name]):
                continue
            if distance(b, a.to(b.dtype)) > (4 * torch.finfo(b.dtype).eps if b.is_floating_point() else 0):
                say = "differs from that of a model that is built anew"
                yield fail(name, say, "build it again after moving the model")
                return
        return
    groups = [names for names in siblings(step.facts.stacks, live).values() if len(names) > 2]
    if not groups:
        raise Untestable("nothing says how the model is built: pass make=")
    for names in groups:
        odd = odd_one({n: next(o for o in names if torch.equal(live[n], live[o])) for n in names})
        if odd is not None:
            yield fail(odd.key, "differs from those of all other blocks", "build all blocks alike")
            return

"""Properties of optimizers: which parameters they hold, in which groups, and what their first step does."""

from __future__ import annotations

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.base.units import count
from normlab.checks.property import AT_REST, BACKWARD, Answers, fail, note, property_of
from normlab.trace.dry_run import groups_of, parameters_of
from normlab.trace.facts.stacks import common, odd_one, responses, siblings
from normlab.trace.gradients import only_rounding, without_gradient
from normlab.trace.optimizers import Held, held
from normlab.trace.starts import LEVEL
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import unregistered
from normlab.trace.updates import STEPS, Moved, depends_on_others, first_step, masters_of, unmoved

SORTED: Final = "sort parameters by their number of dimensions, not by their names"


@property_of(
    "optimizer",
    explains=["groups", "update", "step", "repeats", "overfit", "evaluation_repeats", "state_dict"],
    passes=1,
    uses=BACKWARD,
)
def optimizer_coverage(step: StepUnderTest) -> Answers:
    """Every trainable parameter is in exactly one optimizer group; no group holds one of another model.

    A parameter that is not the model's must at least have a gradient, like a loss's own parameter, or be the
    copy that the user's step makes one of the model's equal to, like a master in float32.
    """
    model, optimizers = step.whole_step.handed
    names = {id(p): name for name, p in model.named_parameters()}
    every = parameters_of(optimizers)
    counts = Counter(map(id, every))

    foreign: Sequence[Tensor] = []
    if model is step.model:  # copies are bound to each other, and hold nothing of another model
        foreign = without_gradient(step, [p for p in every if id(p) not in names])
    masters: Mapping[int, str] = {}
    if foreign and step.setup.step and step.copies.may_stand_in:
        masters = masters_of(step)
    foreign = [p for p in foreign if all(p is not every[i] for i in masters)]

    missing: list[str] = []
    for name, p in model.named_parameters():
        meant = step.declare.is_frozen(name) or name in masters.values()
        if p.requires_grad and p.numel() and id(p) not in counts and not meant:
            missing.append(name)

    twice = [names[i] for i, count in counts.items() if count > 1 and i in names]
    if hidden := _in_plain_lists(step, counts):
        say = "modules in a plain list get a gradient, but are not among model.parameters()"
        yield fail(hidden[0], say, "hold them in an nn.ModuleList or an nn.ModuleDict")
    elif foreign:
        say = f"{len(foreign)} of the {len(counts)} parameters that it holds are not the model's"
        yield fail("optimizer", say, "build it after the model was copied, moved, wrapped or changed")
    elif missing:
        say = f"{len(missing)} trainable parameters are in no optimizer ({', '.join(missing[:3])})"
        yield fail(common(missing), say, "pass it all of model.parameters(), or freeze these")
    elif twice:
        yield fail(twice[0], f"{len(twice)} parameters are held and stepped twice", "put each in one group")


def _in_plain_lists(step: StepUnderTest, counts: Mapping[int, int]) -> list[str]:
    """Where modules are kept in plain lists whose parameters get a gradient, but are in no optimizer."""
    places: list[str] = []
    for path, modules in unregistered(step.model).items():
        left_out = [p for module in modules for p in module.parameters() if id(p) not in counts]
        if len(without_gradient(step, left_out)) < len(left_out):
            places.append(path)
    return places


@property_of("optimizer", explains=["update", "overfit"], passes=1, uses=AT_REST)
def groups(step: StepUnderTest) -> Answers:
    """Each parameter has the weight decay, the learning rate and the optimizer that suit its role."""
    model, optimizers = step.whole_step.handed
    every = [h for h in held(model, optimizers) if h.parameter.requires_grad]
    roles = {h.name: step.facts.roles.get(h.name, "hidden") for h in every}
    decays = (_decay(step, [h for h in every if h.optimizer is o], roles, o) for o in optimizers)
    yield from chain(_settings(step, optimizers), _empty(model, optimizers))
    yield from chain(_muon(step, every, roles), *decays)
    yield from chain(_odd_one(step, every), _tokens(step, every, roles))


def _settings(step: StepUnderTest, optimizers: Sequence[Optimizer]) -> Answers:
    for group in groups_of(optimizers):
        betas = group.get("betas")
        if isinstance(betas, (tuple, list)) and len(betas) == 2 and float(betas[0]) ** 2 >= float(betas[1]):
            say = f"betas are {tuple(map(float, betas))}, but beta1 must be below the square root of beta2"
            yield fail("optimizer", f"{say} (Reddi et al. 2018, section 3, 1904.09237)", "swap them")
    rates, asked = {float(g.get("initial_lr", g["lr"])) for g in groups_of(optimizers)}, step.setup.lr
    if asked and step.setup.scheduler is None and all(abs(rate - asked) > 1e-6 * asked for rate in rates):
        yield fail("optimizer", f"its rates are {sorted(rates)}; {asked} was asked for", "pass it that rate")


def _empty(model: nn.Module, optimizers: Sequence[Optimizer]) -> Answers:
    """A group with a rate of its own that holds nothing, though no parameter is frozen that it may be for."""
    rates: dict[bool, set[float]] = {True: set(), False: set()}
    for group in groups_of(optimizers):
        rates[bool(group["params"])].add(float(group.get("initial_lr", group["lr"])))
    unused = rates[False] - rates[True]
    if unused and rates[True] and all(p.requires_grad for p in model.parameters()):
        say = f"a group with a rate of its own ({', '.join(map(str, sorted(unused)))}) holds no parameter"
        advice = "look at the names by which parameters are sorted: none of the model's matches"
        yield fail("optimizer", f"{say}, though none is frozen", advice)


def _muon(step: StepUnderTest, every: Sequence[Held], roles: Mapping[str, str]) -> Answers:
    """Embeddings, heads and vectors that Muon steps, by the step that they get and not by a name alone."""
    suspects = [h for h in every if h.may_be_orthogonal and roles[h.name] != "hidden"]
    if not suspects:
        return
    depends = depends_on_others(step)
    wrong = [h.name for h in suspects if depends.get(h.name, h.orthogonal)]
    if wrong:
        say = f"Muon is made for hidden matrices, but steps {count(len(wrong), 'parameter')} of another role"
        say += f" ({', '.join(f'{name}: {roles[name]}' for name in wrong[:3])})"
        yield fail(wrong[0], say, "give them to AdamW")


def _decay(
    step: StepUnderTest, every: Sequence[Held], roles: Mapping[str, str], optimizer: Optimizer
) -> Answers:
    """What decays in one optimizer. A gain that is centred on 0 may decay.

    A group is what its author sorted. A gain among matrices was sorted like them, which is a mistake where
    other vectors are spared; one that decays in a group without matrices was put there on purpose.
    """
    vectors = [h for h in every if roles[h.name] in ("norm", "bias", "scalar")]
    exempt = any(not h.decay for h in vectors)
    exempt |= any(not g["params"] and not g.get("weight_decay") for g in optimizer.param_groups)
    of_matrices = {id(h.group) for h in every if roles[h.name] in ("hidden", "embedding", "head")}
    gains = [h for h in vectors if roles[h.name] == "norm"]
    decayed = [h for h in gains if h.decay and abs(float(h.parameter.detach().float().mean())) >= 0.5]
    among_matrices = [h for h in decayed if id(h.group) in of_matrices]
    apart = [h for h in decayed if id(h.group) not in of_matrices]

    matrices = [h for h in every if roles[h.name] == "hidden" and h.name.endswith("weight")]
    if decayed and matrices and not any(h.decay for h in matrices) and _every_norm_decays(step, gains):
        yield fail("optimizer", "gains are decayed and matrices are not: the groups are swapped", SORTED)
    if among_matrices and exempt:
        say = f"{len(among_matrices)} of {len(gains)} gains are decayed in a group of matrices"
        say += f", though a group without decay exists ({_names(among_matrices)})"
        yield fail(among_matrices[0].name, say, SORTED)
    spared = {h.name for h in matrices if not h.decay}
    holder = partial(_holder_class, step)
    yield from _by_kind(matrices, spared, "matrices are not decayed", _sizes, holder)
    biases = [h for h in vectors if roles[h.name] == "bias"]
    biased = {h.name for h in biases if h.decay}
    yield from _by_kind(biases, biased, "biases are decayed", holder)
    if apart:
        say = f"{len(apart)} of {len(gains)} gains are decayed, in groups without matrices ({_names(apart)})"
        yield note(apart[0].name, say)
    if among_matrices or (exempt and biases and len(biased) == len(biases)):
        decayed = {"gain": len(among_matrices), "bias": len(biased)}
        listed = " and ".join(count(number, kind) for kind, number in decayed.items() if number)
        yield note("optimizer", f"it decays {listed} as it does matrices")


def _every_norm_decays(step: StepUnderTest, gains: Sequence[Held]) -> bool:
    """Whether norms have gains and all of these decay; other vectors may scale anything."""
    norms = {response.module for response in responses(step.exact) if response.mixes and not response.grows}
    of_norms = [h for h in gains if h.name.rpartition(".")[0] in norms]
    return bool(of_norms) and all(h.decay for h in of_norms)


def _by_kind(
    every: Sequence[Held], some: Collection[str], say: str, *kinds: Callable[[Held], object]
) -> Answers:
    """Parameters of one role, ``some`` of which are treated differently.

    It is a choice if it depends on their kind alone, in one of several ways to tell kinds, as for small
    kernels that are spared, or for all that is no weight of a linear map; and a mistake if it tears each of
    these kinds apart.
    """
    if not some or len(some) == len(every):
        return
    different = [h for h in every if h.name in some]
    torn = min((_torn(every, some, kind) for kind in kinds), key=len)
    say = f"{len(different)} of {len(every)} {say} ({_names(torn or different)})"
    yield fail(torn[0].name, say, SORTED) if torn else note(different[0].name, f"{say}: all of their kind")


def _torn(every: Sequence[Held], some: Collection[str], kind: Callable[[Held], object]) -> list[Held]:
    """Return those of ``some`` that are treated unlike others of their kind."""
    ways: dict[object, set[bool]] = defaultdict(set)
    for h in every:
        ways[kind(h)].add(h.name in some)
    return [h for h in every if h.name in some and len(ways[kind(h)]) > 1]


def _sizes(h: Held) -> object:
    """Return the lengths of a matrix's axes: a map and one back are of a kind, a kernel is of another."""
    return tuple(sorted(h.parameter.shape))


def _holder_class(step: StepUnderTest, h: Held) -> object:
    """Return the class of the module that holds a parameter."""
    return type(step.model.get_submodule(h.name.rpartition(".")[0]))


def _names(these: Sequence[Held]) -> str:
    return ", ".join(h.name for h in these[:3])


def _treatment(h: Held) -> str:
    return f"rate {h.rate:.4g} and decay {h.decay:.4g} by {type(h.optimizer).__name__}"


def _tokens(step: StepUnderTest, every: Sequence[Held], roles: Mapping[str, str]) -> Answers:
    """A token of its own whose rate or decay differs from those that join the stream where it does.

    The odd one is the one treated unlike most of all that joins the stream as it is, or like the matrices.
    """
    treatments = {h.name: _treatment(h) for h in every}
    of_matrices = {id(h.group) for h in every if roles[h.name] == "hidden"}
    tokens = [h for h in every if roles[h.name] == "token"]
    tokens.sort(key=lambda h: id(h.group) in of_matrices)
    usual = Counter(treatments[h.name] for h in tokens).most_common()  # the first of equally many leads
    for together in step.facts.joined_together:
        here = [name for name in together if name in treatments]
        if len({treatments[name] for name in here}) < 2:
            continue
        odd = next(name for name in here if treatments[name] != usual[0][0])
        other = next(name for name in here if treatments[name] != treatments[odd])
        say = f"it has {treatments[odd]}, but {other} has {treatments[other]}"
        where = f"{say}, and both become tokens in {step.facts.joined[odd].module or 'the model'}"
        yield fail(odd, where, "give it the group of the others: tokens are no matrices")


def _odd_one(step: StepUnderTest, every: Sequence[Held]) -> Answers:
    """A parameter whose rate or decay differs from that of all its siblings, three or more."""
    settings = {h.name: _treatment(h) for h in every}
    for names in siblings(step.facts.stacks, settings).values():
        if len(names) > 3 and (odd := odd_one({n: settings[n] for n in names})):
            yield fail(odd.key, f"it has {odd.value}, its siblings {odd.rest}", "make one group by role")


@property_of("optimizer", explains=["overfit"], passes=9, steps=1, uses=BACKWARD)
def update(step: StepUnderTest) -> Answers:
    """The first step follows the optimizer's rule, moves every parameter downhill, and survives rounding."""
    moved, wide = first_step(step), dict[str, Moved]()
    live = [m for m in moved if bool(m.gradient.any())]
    if any(2 * stuck > entries for stuck, entries in (m.lost() for m in live)):
        with suppress(Exception):  # a model may not run in float64
            wide = {m.name: m for m in first_step(step, exact=True)}
        if wide and not any(m.change.any() for m in (*moved, *wide.values())):
            yield note("optimizer", "its first step moves nothing, not even in float64")
            return
    # at a smaller rate than that of the training, more is rounded away
    lost = () if "rate" in step.setup.cannot else _lost(step, live, wide)
    yield from chain(_moves_well(moved, live), lost, _by_rule(live), _by_forward(step))


def _by_forward(step: StepUnderTest) -> Answers:
    """What the forward pass does to the weights, which is not the optimizer's doing."""
    written: dict[str, list[str]] = defaultdict(list)
    for name, module in step.rewritten[True].items():
        written[module].append(name)
    for module, names in written.items():
        say = f"its forward pass writes to {count(len(names), 'parameter')} ({', '.join(names[:3])})"
        yield note(module, f"{say}; the optimizer's step is measured from what that leaves")


def _moves_well(moved: Sequence[Moved], live: Sequence[Moved]) -> Answers:
    for m in moved:
        if not torch.isfinite(m.change).all():
            yield fail(m.name, "its update is not finite", "look at the rate, at eps and at the gradient")
        elif not m.parameter.requires_grad and bool(m.change.any()):
            yield fail(m.name, "it is frozen, yet it moves", "leave it out of the optimizer")
    if still := [m.name for m in live if not m.group["lr"]]:
        yield fail(common(still), f"{len(still)} parameters with a gradient have rate 0", "see their group")
    if not any(m.state for m in moved) and sum(float((m.gradient * m.change).sum()) for m in live) > 0:
        yield fail("optimizer", "its first step goes up the gradient", "look for a flipped sign")


def _lost(step: StepUnderTest, live: Sequence[Moved], wide: Mapping[str, Moved]) -> Answers:
    """Parameters of which most entries do not move: a failure if these are most of all entries, or if several
    steps leave a whole parameter as it was.
    """
    counts = [m.lost(wide.get(m.name)) for m in live]
    lost = [m for m, (stuck, entries) in zip(live, counts, strict=True) if 2 * stuck > entries]
    if not lost:
        return
    kind, place = str(lost[0].parameter.dtype).removeprefix("torch."), common([m.name for m in lost])
    say = f"{kind} rounds most of the update away in {len(lost)} of {len(live)} parameters"
    advice = "keep the weights, or a copy of them in the optimizer, in float32"
    stuck, entries = (sum(each) for each in zip(*counts, strict=True))
    if 2 * stuck > entries:
        yield fail(place, say, advice)
        return
    never = [m for m, (stuck, entries) in zip(live, counts, strict=True) if stuck == entries]
    if still := _held_still(step, never, wide):
        names = [m.name for m in still]
        kept = f"{STEPS} steps leave {len(still)} of {len(live)} parameters as they were, bit for bit"
        yield fail(common(names), f"{kept}: {kind} rounds their updates away", advice)
    else:
        yield note(place, say)


def _held_still(step: StepUnderTest, never: Sequence[Moved], wide: Mapping[str, Moved]) -> list[Moved]:
    """Return those of the parameters that the first step does not move that rounding alone holds still.

    They move where nothing is rounded, by a gradient that is more than rounding, but not in several steps. A
    rule that rounds at random moves some entries; whether so few could all stay by chance is computed.
    """
    gradients = {name: m.gradient for name, m in wide.items()}
    without = only_rounding(gradients, gradients, step.rounding)
    free = [m for m in never if m.name in wide and m.name not in without and bool(wide[m.name].change.any())]
    if not free:
        return []
    same = unmoved(step)
    still = [m for m in free if m.name in same]
    expected = STEPS * sum(m.moves_expected(wide[m.name]) for m in still)
    return still if math.exp(-expected) < LEVEL else []


def _by_rule(live: Sequence[Moved]) -> Answers:
    for m in live:
        if off := m.off:
            say = f"its first step is {off:.2g} of its size off the rule of {type(m.optimizer).__name__}"
            yield fail(m.name, say, "look at decay, bias correction, and what else changes the weights")
    damped = [m for m in live if m.damped]
    if 2 * len(damped) > len(live):
        usual = inspect.signature(type(damped[0].optimizer)).parameters.get("eps")
        say = f"eps is above most of the gradient in {len(damped)} of {len(live)} parameters"
        if usual is not None and float(damped[0].group["eps"]) > usual.default:
            yield fail("optimizer", f"{say}, so Adam's step is below the rate", "lower eps")
        else:
            yield note(common([m.name for m in damped]), say)

"""Test the optimizers: which parameters they hold, in which groups, and what their first step does."""

from __future__ import annotations

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.base.roles import MATRICES, VECTORS, Role
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
    model, optimizers = step.whole_step.model_and_optimizers
    names = {id(p): name for name, p in model.named_parameters()}
    held_parameters = parameters_of(optimizers)
    counts = Counter(map(id, held_parameters))

    foreign: Sequence[Tensor] = []
    if model is step.model:  # copies are bound to each other, and hold nothing of another model
        foreign = without_gradient(step, [p for p in held_parameters if id(p) not in names])
    masters: Mapping[int, str] = {}  # by their place among the held parameters: whose master each is
    if foreign and step.setup.step is not None and step.copies.may_stand_in:
        masters = masters_of(step)
    foreign = [p for p in foreign if all(p is not held_parameters[place] for place in masters)]

    missing: list[str] = []
    for name, p in model.named_parameters():
        is_meant = step.declare.is_frozen(name) or name in masters.values()
        if p.requires_grad and p.numel() and id(p) not in counts and not is_meant:
            missing.append(name)

    twice = [names[key] for key, times in counts.items() if times > 1 and key in names]
    if hidden := _in_plain_lists(step, counts):
        evidence = "modules in a plain list get a gradient, but are not among model.parameters()"
        yield fail(hidden[0], evidence, "hold them in an nn.ModuleList or an nn.ModuleDict")
    elif foreign:
        evidence = f"{len(foreign)} of the {len(counts)} parameters that it holds are not the model's"
        yield fail("optimizer", evidence, "build it after the model was copied, moved, wrapped or changed")
    elif missing:
        evidence = f"{len(missing)} trainable parameters are in no optimizer ({', '.join(missing[:3])})"
        yield fail(common(missing), evidence, "pass it all of model.parameters(), or freeze these")
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
    """Each parameter has the weight decay, the learning rate and the optimizer that suit its role.

    (rate, decay, optimizer) of θ are a function of its role: what an author has sorted by role must be sorted
    for all, and nobody is told how to sort. What differs for a whole role, or a whole kind, gets a note.
    """
    model, optimizers = step.whole_step.model_and_optimizers
    trained = [h for h in held(model, optimizers) if h.parameter.requires_grad]
    # the roles are read off a pass; what it does not use is taken for one of the many matrices
    roles: dict[str, Role] = {h.name: step.facts.roles.get(h.name, "hidden") for h in trained}
    yield from _settings(step, optimizers)
    yield from _empty(model, optimizers)
    yield from _muon(step, trained, roles)
    for optimizer in optimizers:
        yield from _decay(step, [h for h in trained if h.optimizer is optimizer], roles, optimizer)
    yield from _odd_one(step, trained)
    yield from _tokens(step, trained, roles)


def _settings(step: StepUnderTest, optimizers: Sequence[Optimizer]) -> Answers:
    """Betas for which Adam converges, and the rate that was asked for.

    β₁ < √β₂ is what analyses of Adam assume (Reddi et al. 2018, Section 3, arXiv 1904.09237), and what betas
    in the wrong order violate.
    """
    for group in groups_of(optimizers):
        betas = group.get("betas")
        if isinstance(betas, (tuple, list)) and len(betas) == 2 and float(betas[0]) ** 2 >= float(betas[1]):
            evidence = (
                f"betas are {tuple(map(float, betas))}, but beta1 must be below the square root of beta2"
            )
            evidence += " (Reddi et al. 2018, section 3, 1904.09237)"
            yield fail("optimizer", evidence, "swap them")
    rates, asked = {_first_rate(group) for group in groups_of(optimizers)}, step.setup.lr
    # one group at that rate is enough: the others may have rates of their own
    if asked and step.setup.scheduler is None and all(abs(rate - asked) > 1e-6 * asked for rate in rates):
        evidence = f"its rates are {sorted(rates)}; {asked} was asked for"
        yield fail("optimizer", evidence, "pass it that rate")


def _first_rate(group: Mapping[str, Any]) -> float:
    """Return the rate that a group was made with; schedulers keep it there, and write to ``lr``."""
    return float(group.get("initial_lr", group["lr"]))


def _empty(model: nn.Module, optimizers: Sequence[Optimizer]) -> Answers:
    """A group with a rate of its own that holds nothing, though no parameter is frozen that it may be for."""
    of_empty, of_others = set[float](), set[float]()
    for group in groups_of(optimizers):
        rates = of_others if group["params"] else of_empty
        rates.add(_first_rate(group))
    unused = of_empty - of_others
    if unused and of_others and all(p.requires_grad for p in model.parameters()):
        rates_in_words = ", ".join(map(str, sorted(unused)))
        evidence = f"a group with a rate of its own ({rates_in_words}) holds no parameter"
        advice = "look at the names by which parameters are sorted: none of the model's matches"
        yield fail("optimizer", f"{evidence}, though none is frozen", advice)


def _muon(step: StepUnderTest, trained: Sequence[Held], roles: Mapping[str, Role]) -> Answers:
    """Embeddings, heads and vectors that Muon steps, by the step that they get and not by a name alone.

    Muon orthogonalises the update of a linear map; a row of a table is a vector of its own (Jordan et al.
    2024, as in Liu et al. 2025, Section 2.1, arXiv 2502.16982).
    """
    suspects = [h for h in trained if h.may_be_orthogonal and roles[h.name] != "hidden"]
    if not suspects:
        return
    depends = depends_on_others(step)  # whether the step of an entry depends on the gradient of others
    wrong = [h.name for h in suspects if depends.get(h.name, h.orthogonal)]
    if wrong:
        number = count(len(wrong), "parameter")
        examples = ", ".join(f"{name}: {roles[name]}" for name in wrong[:3])
        evidence = f"Muon is made for hidden matrices, but steps {number} of another role ({examples})"
        yield fail(wrong[0], evidence, "give them to AdamW")


def _decay(
    step: StepUnderTest, trained: Sequence[Held], roles: Mapping[str, Role], optimizer: Optimizer
) -> Answers:
    """What decays in one optimizer. A gain that is centred on 0 may decay.

    A group is what its author sorted. A gain among matrices was sorted like them, which is a mistake where
    other vectors are spared; one that decays in a group without matrices was put there on purpose.
    """
    vectors = [h for h in trained if roles[h.name] in VECTORS]
    some_are_spared = any(not h.decay for h in vectors)
    some_are_spared |= any(not g["params"] and not g.get("weight_decay") for g in optimizer.param_groups)
    gains = [h for h in vectors if roles[h.name] == "norm"]
    decayed = [h for h in gains if h.decay and _is_centred_on_1(h)]
    of_matrices = {id(h.group) for h in trained if roles[h.name] in MATRICES}
    among_matrices = [h for h in decayed if id(h.group) in of_matrices]
    apart = [h for h in decayed if id(h.group) not in of_matrices]

    matrices = [h for h in trained if roles[h.name] == "hidden" and h.name.endswith("weight")]
    no_matrix_decays = bool(matrices) and not any(h.decay for h in matrices)
    if decayed and no_matrix_decays and _every_norm_decays(step, gains):
        yield fail("optimizer", "gains are decayed and matrices are not: the groups are swapped", SORTED)
    if among_matrices and some_are_spared:
        evidence = f"{len(among_matrices)} of {len(gains)} gains are decayed in a group of matrices"
        evidence += f", though a group without decay exists ({_names(among_matrices)})"
        yield fail(among_matrices[0].name, evidence, SORTED)
    spared = {h.name for h in matrices if not h.decay}
    holder = partial(_holder_class, step)
    yield from _by_kind(matrices, spared, "matrices are not decayed", _sizes, holder)
    biases = [h for h in vectors if roles[h.name] == "bias"]
    decayed_biases = {h.name for h in biases if h.decay}
    yield from _by_kind(biases, decayed_biases, "biases are decayed", holder)
    if apart:
        evidence = f"{len(apart)} of {len(gains)} gains are decayed, in groups without matrices"
        yield note(apart[0].name, f"{evidence} ({_names(apart)})")
    if among_matrices or (some_are_spared and biases and len(decayed_biases) == len(biases)):
        numbers = {"gain": len(among_matrices), "bias": len(decayed_biases)}
        listed = " and ".join(count(number, word) for word, number in numbers.items() if number)
        yield note("optimizer", f"it decays {listed} as it does matrices")


def _is_centred_on_1(h: Held) -> bool:
    """Whether a gain is kept as a factor, and not as an offset from 1, of which 0 is the neutral value."""
    return abs(float(h.parameter.detach().float().mean())) >= 0.5


def _every_norm_decays(step: StepUnderTest, gains: Sequence[Held]) -> bool:
    """Whether norms have gains and all of these decay; other vectors may scale anything."""
    norms = {response.module for response in responses(step.exact) if response.mixes and not response.grows}
    of_norms = [h for h in gains if h.name.rpartition(".")[0] in norms]
    return bool(of_norms) and all(h.decay for h in of_norms)


def _by_kind(
    of_role: Sequence[Held], some: Collection[str], say: str, *kinds: Callable[[Held], object]
) -> Answers:
    """Parameters of one role, ``some`` of which are treated differently.

    It is a choice if it depends on their kind alone, in one of several ways to tell kinds, as for small
    kernels that are spared, or for all that is no weight of a linear map; and a mistake if it tears each of
    these kinds apart.

    Args:
        of_role: all parameters of the role.
        some: the names of those that are treated differently.
        say: what is different about them, in words.
        kinds: each returns the kind of a parameter.
    """
    if not some or len(some) == len(of_role):
        return
    different = [h for h in of_role if h.name in some]
    torn = min((_torn(of_role, some, kind) for kind in kinds), key=len)
    evidence = f"{len(different)} of {len(of_role)} {say} ({_names(torn or different)})"
    if torn:
        yield fail(torn[0].name, evidence, SORTED)
    else:
        yield note(different[0].name, f"{evidence}: all of their kind")


def _torn(of_role: Sequence[Held], some: Collection[str], kind: Callable[[Held], object]) -> list[Held]:
    """Return those of ``some`` that are treated unlike others of their kind."""
    is_among_some: dict[object, set[bool]] = defaultdict(set)
    for h in of_role:
        is_among_some[kind(h)].add(h.name in some)
    return [h for h in of_role if h.name in some and len(is_among_some[kind(h)]) > 1]


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


def _tokens(step: StepUnderTest, trained: Sequence[Held], roles: Mapping[str, Role]) -> Answers:
    """A token of its own whose rate or decay differs from those that join the stream where it does.

    The odd one is the one treated unlike most of all that joins the stream as it is, or like the matrices.
    """
    treatments = {h.name: _treatment(h) for h in trained}
    of_matrices = {id(h.group) for h in trained if roles[h.name] == "hidden"}
    tokens = [h for h in trained if roles[h.name] == "token"]
    # those that are not among the matrices first: most_common() begins with the first of equally many
    tokens.sort(key=lambda h: id(h.group) in of_matrices)
    if not tokens:
        return
    usual, _ = Counter(treatments[h.name] for h in tokens).most_common(1)[0]
    for joined_together in step.facts.joined_together:
        names = [name for name in joined_together if name in treatments]
        if len({treatments[name] for name in names}) < 2:
            continue
        odd = next(name for name in names if treatments[name] != usual)
        other = next(name for name in names if treatments[name] != treatments[odd])
        module = step.facts.joined[odd].module or "the model"
        evidence = f"it has {treatments[odd]}, but {other} has {treatments[other]}"
        evidence += f", and both become tokens in {module}"
        yield fail(odd, evidence, "give it the group of the others: a table of tokens is not a matrix")


def _odd_one(step: StepUnderTest, trained: Sequence[Held]) -> Answers:
    """A parameter whose rate or decay differs from that of all its siblings, three or more."""
    treatments = {h.name: _treatment(h) for h in trained}
    for names in siblings(step.facts.stacks, treatments).values():
        if len(names) > 3 and (odd := odd_one({name: treatments[name] for name in names})):
            yield fail(odd.key, f"it has {odd.value}, its siblings {odd.rest}", "make one group by role")


# ------------------------------------------------------------------------------------------ the first step


@property_of("optimizer", explains=["overfit"], passes=9, steps=1, uses=BACKWARD)
def update(step: StepUnderTest) -> Answers:
    """The first step follows the optimizer's rule, moves every parameter downhill, and survives rounding.

    θ′ − θ is the published rule of ∂loss/∂θ (``trace.update_rules``), ⟨θ′ − θ, ∂loss/∂θ⟩ < 0, and θ′ ≠ θ in
    the weights' own precision.
    """
    moved, wide = first_step(step), dict[str, Moved]()
    live = [m for m in moved if bool(m.gradient.any())]
    if any(2 * stuck > entries for stuck, entries in (m.lost() for m in live)):
        # in float64, what is lost to rounding moves, and what an optimizer does not move does not
        with suppress(Exception):  # a model may not run in float64
            wide = {m.name: m for m in first_step(step, exact=True)}
        if wide and not any(m.change.any() for m in (*moved, *wide.values())):
            yield note("optimizer", "its first step moves nothing, not even in float64")
            return
    yield from _moves_well(moved, live)
    # at a smaller rate than that of the training, more is rounded away
    if "rate" not in step.setup.cannot:
        yield from _lost(step, live, wide)
    yield from _by_rule(live)
    yield from _by_forward(step)


def _by_forward(step: StepUnderTest) -> Answers:
    """What the forward pass does to the weights, which is not the optimizer's doing."""
    names_by_module: dict[str, list[str]] = defaultdict(list)
    for name, module in step.forward_writes[True].items():
        names_by_module[module].append(name)
    for module, names in names_by_module.items():
        evidence = f"its forward pass writes to {count(len(names), 'parameter')} ({', '.join(names[:3])})"
        yield note(module, f"{evidence}; the optimizer's step is measured from what that leaves")


def _moves_well(moved: Sequence[Moved], live: Sequence[Moved]) -> Answers:
    """Updates are finite, go to trained parameters alone, and down their gradients.

    Args:
        moved: the first steps of all parameters.
        live: those of parameters that have a gradient.
    """
    for m in moved:
        if not torch.isfinite(m.change).all():
            advice = "look at the rate, at eps and at the gradient"
            yield fail(m.name, "its update is not finite", advice)
        elif not m.parameter.requires_grad and bool(m.change.any()):
            yield fail(m.name, "it is frozen, yet it moves", "leave it out of the optimizer")
    at_rate_0 = [m.name for m in live if not m.group["lr"]]
    if at_rate_0:
        evidence = f"{len(at_rate_0)} parameters with a gradient have rate 0"
        yield fail(common(at_rate_0), evidence, "see their group")
    # a state from earlier steps may outweigh this gradient, as momentum does
    is_first = not any(m.state for m in moved)
    if is_first and sum(float((m.gradient * m.change).sum()) for m in live) > 0:
        yield fail("optimizer", "its first step goes up the gradient", "look for a flipped sign")


def _lost(step: StepUnderTest, live: Sequence[Moved], wide: Mapping[str, Moved]) -> Answers:
    """Parameters of which most entries do not move: a failure if these are most of all entries, or if several
    steps leave a whole parameter as it was.
    """
    counts = [m.lost(wide.get(m.name)) for m in live]
    lost = [m for m, (stuck, entries) in zip(live, counts, strict=True) if 2 * stuck > entries]
    if not lost:
        return
    dtype, place = str(lost[0].parameter.dtype).removeprefix("torch."), common([m.name for m in lost])
    evidence = f"{dtype} rounds most of the update away in {len(lost)} of {len(live)} parameters"
    advice = "keep the weights, or a copy of them in the optimizer, in float32"
    all_stuck, all_entries = (sum(numbers) for numbers in zip(*counts, strict=True))
    if 2 * all_stuck > all_entries:
        yield fail(place, evidence, advice)
        return
    unmoved_at_first = [m for m, (stuck, entries) in zip(live, counts, strict=True) if stuck == entries]
    still = _held_still(step, unmoved_at_first, wide)
    if still:
        kept = f"{STEPS} steps leave {len(still)} of {len(live)} parameters as they were, bit for bit"
        yield fail(common([m.name for m in still]), f"{kept}: {dtype} rounds their updates away", advice)
    else:
        yield note(place, evidence)


def _held_still(
    step: StepUnderTest, unmoved_at_first: Sequence[Moved], wide: Mapping[str, Moved]
) -> list[Moved]:
    """Return those of the parameters that the first step does not move that rounding alone holds still.

    They move where nothing is rounded, by a gradient that is more than rounding, but not in several steps. A
    rule that rounds at random moves some entries; whether so few could all stay by chance is computed.
    """
    gradients = {name: m.gradient for name, m in wide.items()}
    without_gradients = only_rounding(gradients, gradients, step.rounding)
    moving_in_float64: list[Moved] = []
    for m in unmoved_at_first:
        if m.name in wide and m.name not in without_gradients and bool(wide[m.name].change.any()):
            moving_in_float64.append(m)
    if not moving_in_float64:
        return []
    same = unmoved(step)
    still = [m for m in moving_in_float64 if m.name in same]
    # none of independent events happens with a probability of at most exp(−their expected number)
    expected = STEPS * sum(m.moves_expected(wide[m.name]) for m in still)
    return still if math.exp(-expected) < LEVEL else []


def _by_rule(live: Sequence[Moved]) -> Answers:
    """The first step is that of the published rule, and not of a rate that eps makes smaller."""
    for m in live:
        if off := m.off:
            evidence = f"its first step is {off:.2g} of its size off the rule of {type(m.optimizer).__name__}"
            yield fail(m.name, evidence, "look at decay, bias correction, and what else changes the weights")
    damped = [m for m in live if m.damped]
    if 2 * len(damped) > len(live):
        usual = inspect.signature(type(damped[0].optimizer)).parameters.get("eps")
        evidence = f"eps is above most of the gradient in {len(damped)} of {len(live)} parameters"
        if usual is not None and float(damped[0].group["eps"]) > usual.default:
            yield fail("optimizer", f"{evidence}, so Adam's step is below the rate", "lower eps")
        else:  # the usual eps: then it is the gradient that is small
            yield note(common([m.name for m in damped]), evidence)

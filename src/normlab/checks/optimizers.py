"""Properties of optimizers: what they hold, in which groups, and what their first step does."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.checks.loop import rates, rehearsal
from normlab.checks.property import Answers, fail, note, property_of
from normlab.checks.step import Step
from normlab.diagnosis.reading.structure import unregistered
from normlab.trace.facts.stacks import common, siblings
from normlab.trace.optimizers import Held, Moved, first_step, held
from normlab.trace.rehearsal import groups_of, parameters_of, plain_step

LOOP: Final = ("groups", "update", "step", "repeats", "overfit")
SORTED: Final = "sort parameters by their number of dimensions, not by their names"


def _handed(step: Step) -> tuple[nn.Module, list[Optimizer]]:
    """The user's own model and optimizers, or copies where a function makes these."""
    optimizer = step.setup.optimizer
    ready = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    return (step.model, ready) if all(isinstance(o, Optimizer) for o in ready) else step.together()[:2]


@property_of("optimizer", explains=[*LOOP, "evaluation_repeats", "state_dict"], passes=3)
def holds(step: Step) -> Answers:
    """Every trainable parameter is in exactly one group of one optimizer, and no other model's is.

    A parameter that is not the model's must at least have a gradient, as one of a loss has.
    """
    model, optimizers = _handed(step)
    names, every = {id(p): n for n, p in model.named_parameters()}, parameters_of(optimizers)
    counts, foreign = Counter(map(id, every)), [p for p in every if id(p) not in names]
    foreign = _without_gradient(step, foreign) if foreign and model is step.model else []
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in counts]
    missing = [n for n in missing if not any(fnmatchcase(n, glob) for glob in step.declare.frozen)]
    twice = [names[i] for i, k in counts.items() if k > 1 and i in names]
    if hidden := _hidden(step, counts):
        say = "modules in a plain list get a gradient, and are not among model.parameters()"
        yield fail(hidden, say, "hold them in an nn.ModuleList or an nn.ModuleDict")
    elif foreign:
        evidence = f"{len(foreign)} of the {len(counts)} parameters that it holds are not the model's"
        yield fail("optimizer", evidence, "build it after the model was copied, moved, wrapped or changed")
    elif missing:
        evidence = f"{len(missing)} trainable parameters are in no optimizer ({', '.join(missing[:3])})"
        yield fail(common(missing), evidence, "hand over all of model.parameters(), or freeze these")
    elif twice:
        yield fail(twice[0], f"{len(twice)} parameters are held, and stepped, twice", "put each in one group")


def _hidden(step: Step, counts: Mapping[int, int]) -> str | None:
    """The first attribute whose modules torch does not see although the loss depends on their parameters."""
    for path, modules in unregistered(step.model).items():
        own: list[Tensor] = [p for m in modules for p in m.parameters() if id(p) not in counts]
        if len(_without_gradient(step, own)) < len(own):
            return path
    return None


def _without_gradient(step: Step, parameters: list[Tensor]) -> list[Tensor]:
    """Those in which the loss, run on the user's own model, has no gradient."""
    trained = [p for p in parameters if p.requires_grad]
    with step.plain.again(model=step.model, training=True).with_graph() as passed:
        if not trained or passed.loss is None or not passed.loss.requires_grad:
            return parameters
        gradients = torch.autograd.grad(passed.loss, trained, allow_unused=True)
    reached = {id(p) for p, g in zip(trained, gradients, strict=True) if g is not None}
    return [p for p in parameters if id(p) not in reached]


@property_of("optimizer", explains=["update", "overfit"], passes=2)
def groups(step: Step) -> Answers:
    """Groups are by role: decay, rate and Muon are those that a parameter's role calls for."""
    model, optimizers = _handed(step)
    every = [h for h in held(model, optimizers) if h.parameter.requires_grad]
    roles = {h.name: step.facts.roles.get(h.name, "matrix") for h in every}
    decays = (_decay([h for h in every if h.optimizer is o], roles, o) for o in optimizers)
    yield from chain(_settings(step, optimizers), _muon(every, roles), *decays, _odd_one(step, every))


def _settings(step: Step, optimizers: Sequence[Optimizer]) -> Answers:
    for group in groups_of(optimizers):
        betas = group.get("betas")
        if isinstance(betas, (tuple, list)) and len(betas) == 2 and float(betas[0]) ** 2 >= float(betas[1]):
            evidence = f"betas are {tuple(map(float, betas))}, and beta1 must be below the root of beta2"
            yield fail("optimizer", f"{evidence} (Reddi et al. 2018, section 3, 1904.09237)", "exchange them")
    own, asked = {float(g.get("initial_lr", g["lr"])) for g in groups_of(optimizers)}, step.setup.lr
    if asked and step.setup.scheduler is None and all(abs(rate - asked) > 1e-6 * asked for rate in own):
        yield fail("optimizer", f"its rates are {sorted(own)}, and {asked} is asked", "hand it that rate")


def _muon(every: Sequence[Held], roles: Mapping[str, str]) -> Answers:
    tables = ("embedding", "head")
    wrong = [h.name for h in every if h.orthogonal and (roles[h.name] in tables or h.parameter.ndim < 2)]
    if wrong:
        evidence = f"Muon is made for hidden matrices, and steps {len(wrong)} embeddings, heads or vectors"
        yield fail(wrong[0], evidence, "give them to AdamW")


def _decay(every: Sequence[Held], roles: Mapping[str, str], optimizer: Optimizer) -> Answers:
    """What decays in one optimizer. A gain that is centred on 0 may."""
    vectors = [h for h in every if roles[h.name] in ("gain", "bias", "scalar")]
    matrices = [h for h in every if roles[h.name] == "matrix" and h.name.endswith("weight")]
    biases = [h for h in vectors if roles[h.name] == "bias"]
    exempt = any(not h.decay for h in vectors)
    exempt |= any(not g["params"] and not g.get("weight_decay") for g in optimizer.param_groups)
    gains = [h for h in vectors if roles[h.name] == "gain" and h.decay]
    decayed = [h.name for h in gains if abs(float(h.parameter.detach().float().mean())) >= 0.5]
    spared, biased = [h.name for h in matrices if not h.decay], [h.name for h in biases if h.decay]
    if decayed and 0 < len(spared) == len(matrices):
        yield fail("optimizer", "gains are decayed and matrices are not: the groups are exchanged", SORTED)
    for wrong, are, fails in (
        (decayed, "gains are decayed, though a group without decay exists", exempt),
        (spared, f"of {len(matrices)} matrices are not decayed", len(spared) < len(matrices)),
        (biased, f"of {len(biases)} biases are decayed", len(biased) < len(biases)),
    ):
        if wrong and fails:
            yield fail(wrong[0], f"{len(wrong)} {are} ({', '.join(wrong[:3])})", SORTED)
    if decayed or (biased and exempt):
        yield note("optimizer", f"{len(decayed)} gains and {len(biased)} biases are decayed as matrices are")


def _odd_one(step: Step, every: Sequence[Held]) -> Answers:
    """A parameter whose rate or decay differs from what all of its siblings, three or more, have."""
    settings = {
        h.name: f"rate {h.rate:.4g} and decay {h.decay:.4g} by {type(h.optimizer).__name__}" for h in every
    }
    for names in siblings(step.facts.stacks, settings).values():
        counts = Counter(settings[n] for n in names).most_common()
        if len(counts) == 2 and counts[1][1] == 1 and counts[0][1] >= 3:
            (theirs, _), (own, _) = counts
            odd = next(n for n in names if settings[n] == own)
            yield fail(odd, f"it has {own}, its siblings have {theirs}", "make one group for each role")


@property_of("optimizer", explains=["overfit"], passes=4)
def update(step: Step) -> Answers:
    """The first step is the rule's: downhill, for every parameter, and not rounded away.

    It is taken on copies, in the weights' own precision and without dropout, at the schedule's peak. SGD,
    Adam and AdamW are compared with their published rules.
    """
    run = rehearsal(step, whole=plain_step(step.loss_of))
    moved = first_step(run, step.stepped, rates(step).peaks)
    live = [m for m in moved if bool(m.gradient.any())]
    if any(m.group["lr"] for m in live) and not any(m.change.any() for m in moved):
        wide = first_step(rehearsal(step, exact=True, whole=run.whole), step.stepped, rates(step).peaks)
        if not any(m.change.any() for m in wide):
            yield note("optimizer", "its first step moves nothing, in float64 either")
            return
    yield from chain(_moves_well(moved, live), _lost(live), _by_rule(live))


def _moves_well(moved: Sequence[Moved], live: Sequence[Moved]) -> Answers:
    for m in moved:
        if not torch.isfinite(m.change).all():
            yield fail(m.name, "its update is not finite", "look at the rate, at eps and at the gradient")
        elif not m.parameter.requires_grad and bool(m.change.any()):
            yield fail(m.name, "it is frozen, and moves", "leave it out of the optimizer")
    if still := [m.name for m in live if not m.group["lr"]]:
        evidence = f"{len(still)} parameters with a gradient have a rate of 0"
        yield fail(common(still), evidence, "look at their group")
    if not any(m.state for m in moved) and sum(float((m.gradient * m.change).sum()) for m in live) > 0:
        yield fail("optimizer", "its first step goes up the gradient", "look for a sign")


def _lost(live: Sequence[Moved]) -> Answers:
    """Parameters of which most entries do not move; a failure where these are most of all."""
    counts = [m.lost for m in live]
    if lost := [m for m, (stuck, entries) in zip(live, counts, strict=True) if 2 * stuck > entries]:
        kind = str(lost[0].parameter.dtype).removeprefix("torch.")
        place = common([m.name for m in lost])
        evidence = f"{kind} rounds most of the update away in {len(lost)} of {len(live)} parameters"
        stuck, entries = (sum(each) for each in zip(*counts, strict=True))
        advice = "keep the weights, or a copy of them in the optimizer, in float32"
        yield fail(place, evidence, advice) if 2 * stuck > entries else note(place, evidence)


def _by_rule(live: Sequence[Moved]) -> Answers:
    for m in live:
        if off := m.off:
            evidence = f"its first step is {off:.2g} of its size off the rule of {type(m.optimizer).__name__}"
            yield fail(m.name, evidence, "look at decay, bias correction, and what else changes the weights")
    damped = [m for m in live if m.damped]
    if 2 * len(damped) > len(live):
        usual = inspect.signature(type(damped[0].optimizer)).parameters.get("eps")
        evidence = f"eps is above most of the gradient in {len(damped)} of {len(live)} parameters"
        if usual is not None and float(damped[0].group["eps"]) > usual.default:
            yield fail("optimizer", f"{evidence}, so that Adam's step is below the rate", "lower eps")
        else:
            yield note(common([m.name for m in damped]), evidence)

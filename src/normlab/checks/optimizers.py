"""Properties of optimizers: what they hold, in which groups, and what their first step does."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.checks.loop import rates, rehearsal
from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.facts.stacks import common, siblings
from normlab.trace.rehearsal import Rehearsal, groups_of, parameters_of, plain_step, sample
from normlab.trace.rules import RULES

VECTORS: Final = ("gain", "bias", "scalar")
SORTED: Final = "sort parameters by their number of dimensions, not by their names"


def handed(step: Step) -> tuple[nn.Module, list[Optimizer]]:
    """The user's own model and optimizers, or copies where a function makes these."""
    given = step.setup.optimizer
    if given is None:
        raise Untestable("no optimizer was handed over: pass optimizer=")
    ready = list(given) if isinstance(given, (list, tuple)) else [given]
    return (step.model, ready) if all(isinstance(o, Optimizer) for o in ready) else step.together()[:2]


# -------------------------------------------------------------------------------------------------- holding
@property_of("optimizer", explains=["groups", "update", "step", "repeats", "overfit"], passes=3)
def holds(step: Step) -> Iterator[Violation | Note]:
    """Every trainable parameter is in exactly one group of one optimizer, and no other model's is.

    A parameter that is not the model's must at least have a gradient, as one of a loss has.
    """
    model, optimizers = handed(step)
    named, held = dict(model.named_parameters()), parameters_of(optimizers)
    names, counts = {id(p): n for n, p in named.items()}, Counter(map(id, held))
    foreign = [p for p in held if id(p) not in names]
    foreign = _without_gradient(step, foreign) if foreign and model is step.model else []
    frozen = {n for n in named if any(fnmatchcase(n, glob) for glob in step.declare.frozen)}
    missing = [n for n, p in named.items() if p.requires_grad and id(p) not in counts and n not in frozen]
    twice = [names[i] for i, k in counts.items() if k > 1 and i in names]
    if foreign:
        evidence = f"{len(foreign)} of the {len(counts)} parameters that it holds are not the model's"
        yield fail(
            "optimizer", evidence, "build it last: after the model was copied, moved, wrapped or changed"
        )
    elif missing:
        evidence = f"{len(missing)} trainable parameters are in no optimizer ({', '.join(missing[:3])})"
        yield fail(common(missing), evidence, "hand over all of model.parameters(), or freeze these")
    elif twice:
        yield fail(twice[0], f"{len(twice)} parameters are held, and stepped, twice", "put each in one group")


def _without_gradient(step: Step, parameters: list[Tensor]) -> list[Tensor]:
    """Those in which the loss, run on the user's own model, has no gradient."""
    trained = [p for p in parameters if p.requires_grad]
    with step.plain.again(model=step.model, training=True).with_graph() as passed:
        if not trained or passed.loss is None or not passed.loss.requires_grad:
            return parameters
        found = torch.autograd.grad(passed.loss, trained, allow_unused=True)
    reached = {id(p) for p, g in zip(trained, found, strict=True) if g is not None}
    return [p for p in parameters if id(p) not in reached]


# --------------------------------------------------------------------------------------------------- groups
class Held(NamedTuple):
    """A trainable parameter in its group."""

    name: str
    role: str
    parameter: Tensor
    group: Mapping[str, Any]
    optimizer: Optimizer

    @property
    def decay(self) -> float:
        return float(self.group.get("weight_decay") or 0)

    @property
    def rate(self) -> float:
        return float(self.group.get("initial_lr", self.group["lr"]))

    @property
    def orthogonal(self) -> bool:
        """Whether Muon steps it, as its group says, or the class of an optimizer that has no other rule."""
        rules = {str(v).lower() for k, v in self.group.items() if k != "params"}
        mixed = "betas" in self.group or any("adam" in rule for rule in rules)
        return bool(self.group.get("use_muon", "muon" in type(self.optimizer).__name__.lower() and not mixed))


@property_of("optimizer", explains=["update", "overfit"], passes=2)
def groups(step: Step) -> Iterator[Violation | Note]:
    """Groups are by role: decay, rate and Muon are those that a parameter's role calls for."""
    model, optimizers = handed(step)
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    roles = step.facts.roles
    held = [
        Held(names[id(p)], roles.get(names[id(p)], "matrix"), p, group, optimizer)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) in names
    ]
    answers = [*_settings(step, optimizers), *_muon(held)]
    for optimizer in optimizers:
        answers += _decay([h for h in held if h.optimizer is optimizer], optimizer)
    answers += _odd_one(step, held)
    yield from [a for a in answers if isinstance(a, Violation)][:1]
    yield from [a for a in answers if isinstance(a, Note)]


def _settings(step: Step, optimizers: Sequence[Optimizer]) -> Iterator[Violation]:
    for group in groups_of(optimizers):
        if group.get("maximize"):
            yield fail("optimizer", "maximize=True drives the loss up", "leave it out")
        betas = group.get("betas")
        if isinstance(betas, (tuple, list)) and len(betas) == 2 and float(betas[0]) ** 2 >= float(betas[1]):
            evidence = f"betas are {tuple(map(float, betas))}, and beta1 must be below the root of beta2"
            yield fail("optimizer", f"{evidence} (Reddi et al. 2018, section 3, 1904.09237)", "exchange them")
    found, asked = {float(g.get("initial_lr", g["lr"])) for g in groups_of(optimizers)}, step.setup.lr
    if asked and step.setup.scheduler is None and all(abs(rate - asked) > 1e-6 * asked for rate in found):
        yield fail("optimizer", f"its rates are {sorted(found)}, and {asked} is asked", "hand it that rate")


def _muon(held: Sequence[Held]) -> Iterator[Violation]:
    wrong = [h for h in held if h.orthogonal and (h.role in ("embedding", "head") or h.parameter.ndim < 2)]
    if wrong:
        evidence = f"Muon is made for hidden matrices, and steps {len(wrong)} embeddings, heads or vectors"
        yield fail(wrong[0].name, evidence, "give them to AdamW")


def _decay(held: Sequence[Held], optimizer: Optimizer) -> Iterator[Violation | Note]:
    """What decays in one optimizer. A gain that is centred on 0 may."""
    matrices = [h for h in held if h.role == "matrix" and h.name.endswith("weight")]
    gains = [h for h in held if h.role == "gain" and abs(float(h.parameter.detach().float().mean())) >= 0.5]
    biases = [h for h in held if h.role == "bias"]
    exempt = any(h.role in VECTORS and not h.decay for h in held)
    exempt |= any(not g["params"] and not g.get("weight_decay") for g in optimizer.param_groups)
    decayed, spared = [h.name for h in gains if h.decay], [h.name for h in matrices if not h.decay]
    biased = [h.name for h in biases if h.decay]
    if decayed and spared and len(spared) == len(matrices):
        yield fail("optimizer", "gains are decayed and matrices are not: the groups are exchanged", SORTED)
    elif decayed and exempt:
        evidence = f"{len(decayed)} gains decay ({', '.join(decayed[:3])}), though a group without exists"
        yield fail(decayed[0], evidence, SORTED)
    elif 0 < len(spared) < len(matrices):
        evidence = f"{len(spared)} of {len(matrices)} matrices are not decayed ({', '.join(spared[:3])})"
        yield fail(spared[0], evidence, SORTED)
    elif 0 < len(biased) < len(biases):
        yield fail(
            biased[0], f"{len(biased)} of {len(biases)} biases are decayed ({', '.join(biased[:3])})", SORTED
        )
    elif decayed or (biased and exempt):
        yield note("optimizer", f"{len(decayed)} gains and {len(biased)} biases are decayed as matrices are")


def _odd_one(step: Step, held: Sequence[Held]) -> Iterator[Violation]:
    """A parameter whose rate or decay differs from what all of its siblings, three or more, have."""
    settings = {h.name: (h.rate, h.decay, type(h.optimizer).__name__) for h in held}
    for names in siblings(step.facts.stacks, settings).values():
        counts = Counter(settings[n] for n in names).most_common()
        if len(counts) == 2 and counts[1][1] == 1 and counts[0][1] >= 3:
            odd = next(n for n in names if settings[n] == counts[1][0])
            own, theirs = (
                f"rate {s[0]:.4g} and decay {s[1]:.4g} by {s[2]}" for s in (counts[1][0], counts[0][0])
            )
            yield fail(odd, f"it has {own}, its siblings have {theirs}", "make one group for each role")
            return


# --------------------------------------------------------------------------------------------------- update
class Moves(NamedTuple):
    """The first step, in a sample of each parameter: what it was, its gradient, and how far it moved."""

    before: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    """Those that are not 0."""
    moved: Mapping[str, Tensor]
    holders: Mapping[str, tuple[Optimizer, Mapping[str, Any]]]
    """The optimizer and the group."""
    states: Mapping[str, Mapping[str, Any]]
    """The optimizer's state before the step."""


def _move(step: Step, run: Rehearsal) -> Moves:
    held = [
        (p, o, g) for o in run.optimizers for g in o.param_groups for p in g["params"] if id(p) in run.names
    ]
    holders = {run.names[id(p)]: (o, g) for p, o, g in held}
    states = {
        run.names[id(p)]: {k: sample(v) if isinstance(v, Tensor) else v for k, v in o.state[p].items()}
        for p, o, _ in held
        if p in o.state
    }
    before = {n: sample(p) for n, p in run.model.named_parameters()}
    seen = run.run(step.batch, acts=True, rates=rates(step).peaks)
    gradients = {n: g for n, g in seen.gradients.items() if bool(g.any())}
    moved = {n: sample(p) - before[n] for n, p in run.model.named_parameters()}
    return Moves(before, gradients, moved, holders, states)


@property_of("optimizer", explains=["overfit"], passes=4)
def update(step: Step) -> Iterator[Violation | Note]:
    """The first step is the rule's: downhill, for every parameter, and not rounded away.

    It is taken on copies, in the weights' own precision and without dropout, at the schedule's peak. SGD,
    Adam and AdamW are compared with their published rules.
    """
    run = rehearsal(step, whole=plain_step(step.loss_of))
    moves = _move(step, run)
    still = moves.gradients and any(float(g["lr"]) for g in groups_of(run.optimizers)) and not _moved(moves)
    if still and not _moved(_move(step, rehearsal(step, exact=True, whole=run.whole))):
        yield note("optimizer", "its first step moves nothing, in float64 either")
        return
    answers = [*_moves_well(run, moves), *_lost(run, moves), *_by_rule(run, moves)]
    if not moves.states and sum(float((g * moves.moved[n]).sum()) for n, g in moves.gradients.items()) > 0:
        answers.append(fail("optimizer", "its first step goes up the gradient", "look for a sign"))
    yield from [a for a in answers if isinstance(a, Violation)][:1]
    yield from [a for a in answers if isinstance(a, Note)]


def _moved(moves: Moves) -> bool:
    return any(bool(x.any()) for x in moves.moved.values())


def _moves_well(run: Rehearsal, moves: Moves) -> Iterator[Violation]:
    for name, p in run.model.named_parameters():
        if not torch.isfinite(moves.moved[name]).all():
            yield fail(name, "its update is not finite", "look at the rate, at eps and at the gradient")
        elif not p.requires_grad and bool(moves.moved[name].any()):
            yield fail(name, "it is frozen, and moves", "leave it out of the optimizer")
    still = [n for n in moves.gradients if not float(moves.holders[n][1]["lr"])]
    if still:
        yield fail(
            common(still), f"{len(still)} parameters with a gradient have a rate of 0", "look at their group"
        )


def _lost(run: Rehearsal, moves: Moves) -> Iterator[Violation | Note]:
    """Parameters of which most entries do not move; a failure where these are most of all."""
    weights = dict(run.model.named_parameters())
    lost, stuck, entries = list[str](), 0, 0
    for name, g in moves.gradients.items():
        optimizer, group = moves.holders[name]
        if not float(group["lr"]) or _has_wider(optimizer.state.get(weights[name], {}), weights[name]):
            continue
        here, still = int((g != 0).sum()), int(((g != 0) & (moves.moved[name] == 0)).sum())
        stuck, entries = stuck + still, entries + here
        if 2 * still > here:
            lost.append(name)
    if lost:
        kind = str(weights[lost[0]].dtype).removeprefix("torch.")
        evidence = (
            f"{kind} rounds most of the update away in {len(lost)} of {len(moves.gradients)} parameters"
        )
        if 2 * stuck > entries:
            yield fail(
                common(lost), evidence, "keep the weights, or a copy of them in the optimizer, in float32"
            )
        else:
            yield note(common(lost), evidence)


def _has_wider(state: Mapping[str, Any], p: Tensor) -> bool:
    """Whether the optimizer keeps the weights themselves in a wider type."""
    kept = [t for t in state.values() if isinstance(t, Tensor) and t.shape == p.shape]
    return any(t.dtype.itemsize > p.dtype.itemsize and torch.equal(t.to(p), p) for t in kept)


def _by_rule(run: Rehearsal, moves: Moves) -> Iterator[Violation | Note]:
    small = list[str]()
    for name, g in moves.gradients.items():
        optimizer, group = moves.holders[name]
        kind = type(optimizer).__name__
        if kind not in RULES:
            continue
        p, eps = moves.before[name], torch.finfo(dict(run.model.named_parameters())[name].dtype).eps
        want = RULES[kind](p, g, group, moves.states.get(name, {}))
        off = float((moves.moved[name] - want).norm())
        if off > 8 * eps * float(p.norm() + want.norm()):
            evidence = (
                f"its first step is {off / float(want.norm()):.2g} of its size away from the rule of {kind}"
            )
            yield fail(
                name, evidence, "look at decay and bias correction, and at what else changes the weights"
            )
        if (
            "eps" in group
            and name not in moves.states
            and float(g[g != 0].abs().median()) < float(group["eps"])
        ):
            small.append(name)
    if 2 * len(small) > len(moves.gradients):
        optimizer, group = moves.holders[small[0]]
        usual = inspect.signature(type(optimizer)).parameters.get("eps")
        evidence = f"eps is above most of the gradient in {len(small)} of {len(moves.gradients)} parameters"
        if usual is not None and float(group["eps"]) > usual.default:
            yield fail("optimizer", f"{evidence}, so that Adam's step is below the rate", "lower eps")
        else:
            yield note(common(small), evidence)

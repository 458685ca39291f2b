"""Properties of optimizers: what they hold, in which groups, and what their first step does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.checks.loop import cloned, rates_of, rehearsal
from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step, common
from normlab.trace.facts.stacks import siblings
from normlab.trace.rehearsal import groups_of, plain_step

VECTORS: Final = ("gain", "bias", "scalar")


def handed(step: Step) -> tuple[nn.Module, list[Optimizer]]:
    """The user's own model and optimizers, or copies where a function makes these."""
    given = step.setup.optimizer
    if given is None:
        raise Untestable("no optimizer was handed over: pass optimizer=")
    ready = list(given) if isinstance(given, (list, tuple)) else [given]
    return (step.model, ready) if all(isinstance(o, Optimizer) for o in ready) else step.together()[:2]


@property_of("optimizer", explains=["groups", "update", "step", "overfit"], passes=3)
def holds(step: Step) -> Iterator[Violation | Note]:
    """Every trainable parameter is in exactly one group of one optimizer, and no other model's is.

    Parameters that are none of the model's must at least have a gradient, as those of a loss have.
    """
    model, optimizers = handed(step)
    named = dict(model.named_parameters())
    names = {id(p): n for n, p in named.items()}
    held = [p for g in groups_of(optimizers) for p in g["params"]]
    counts = Counter(map(id, held))
    foreign = _without_gradient(step, [p for p in held if id(p) not in names]) if step.model is model else []
    missing = [
        n for n, p in named.items() if p.requires_grad and id(p) not in counts and not _frozen(step, n)
    ]
    twice = [names[i] for i, k in counts.items() if k > 1 and i in names]
    if foreign:
        yield fail(
            "optimizer",
            f"{len(foreign)} of the {len(counts)} parameters that it holds are not the model's",
            "build the optimizer last: after the model was copied, moved, wrapped or changed",
        )
    elif missing:
        yield fail(
            common(missing),
            f"{len(missing)} trainable parameters are in no optimizer ({', '.join(missing[:3])})",
            "hand over all of model.parameters(), or freeze these: requires_grad_(False)",
        )
    elif twice:
        yield fail(
            twice[0],
            f"{len(twice)} parameters are in two groups, and are stepped twice",
            "put each into one group",
        )


def _frozen(step: Step, name: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in step.declare.frozen)


def _without_gradient(step: Step, parameters: list[Tensor]) -> list[Tensor]:
    """Those that the loss, run on the user's own model, has no gradient in."""
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return parameters
    with step.plain.again(model=step.model, training=True).with_graph() as passed:
        if passed.loss is None or not passed.loss.requires_grad:
            return parameters
        found = torch.autograd.grad(passed.loss, trained, allow_unused=True)
    reached = {id(p) for p, g in zip(trained, found, strict=True) if g is not None}
    return [p for p in parameters if id(p) not in reached]


# ------------------------------------------------------------------------------------------------- groups
@property_of("optimizer", explains=["update", "overfit"], passes=2)
def groups(step: Step) -> Iterator[Violation | Note]:
    """Groups are by role: decay, rate and Muon are those that a parameter's role calls for."""
    model, optimizers = handed(step)
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    roles = step.facts.roles
    entries = [
        (names[id(p)], roles.get(names[id(p)], "matrix"), p, g, o)
        for o in optimizers
        for g in o.param_groups
        for p in g["params"]
        if id(p) in names
    ]
    answers = [*_settings(step, optimizers), *_muon(entries)]
    for o in optimizers:
        answers += _decay([e for e in entries if e[4] is o], o)
    answers += _odd_ones(step, entries)
    failures = [a for a in answers if isinstance(a, Violation)]
    yield from failures[:1]
    yield from (a for a in answers if isinstance(a, Note))


def _settings(step: Step, optimizers: list[Optimizer]) -> Iterator[Violation]:
    for g in groups_of(optimizers):
        if g.get("maximize"):
            yield fail("optimizer", "maximize=True drives the loss up", "leave it out")
        betas = g.get("betas")
        if isinstance(betas, (tuple, list)) and len(betas) == 2 and float(betas[0]) ** 2 >= float(betas[1]):
            yield fail(
                "optimizer",
                f"betas {tuple(map(float, betas))}: Adam needs beta1 < sqrt(beta2) (Reddi et al. 2018, section 3)",
                "exchange them",
            )
    rates = {float(g.get("initial_lr", g["lr"])) for g in groups_of(optimizers)}
    asked = step.setup.lr
    if asked and step.setup.scheduler is None and all(abs(r - asked) > 1e-6 * asked for r in rates):
        yield fail(
            "optimizer",
            f"its rates are {sorted(rates)}, and {asked} is asked",
            "hand the rate to the optimizer",
        )


def _muon(entries: list[tuple[str, str, Tensor, dict[str, Any], Optimizer]]) -> Iterator[Violation]:
    wrong = [
        (name, role)
        for name, role, p, g, o in entries
        if g.get("use_muon", "muon" in type(o).__name__.lower() and not _uses_adam(g))
        and (role in ("embedding", "head") or p.ndim < 2)
    ]
    if wrong:
        yield fail(
            wrong[0][0],
            f"Muon orthogonalises {len(wrong)} embeddings, heads or vectors; it is made for hidden matrices",
            "give them to AdamW",
        )


def _uses_adam(group: Mapping[str, Any]) -> bool:
    """Whether a group of an optimizer of several rules says that Adam's is its own."""
    return any("adam" in str(v).lower() for k, v in group.items() if k != "params") or "betas" in group


def _decay(
    entries: list[tuple[str, str, Tensor, dict[str, Any], Optimizer]], optimizer: Optimizer
) -> Iterator[Violation | Note]:
    decays = {name: float(g.get("weight_decay") or 0) > 0 for name, _, _, g, _ in entries}
    by_role = {r: [n for n, role, *_ in entries if role == r] for r in (*VECTORS, "matrix")}
    gains = [
        n for n, role, p, *_ in entries if role == "gain" and abs(float(p.detach().float().mean())) >= 0.5
    ]
    plain = [g for g in optimizer.param_groups if not float(g.get("weight_decay") or 0)]
    exempt = {n for n, role, *_ in entries if role in VECTORS and not decays[n]}
    decayed = [n for n in gains if decays[n]]
    matrices = [n for n in by_role["matrix"] if n.endswith("weight")]
    spared = [n for n in matrices if not decays[n]]
    advice = "sort parameters by their number of dimensions, not by their names"
    if matrices and len(spared) == len(matrices) and decayed:
        yield fail("optimizer", "gains are decayed and matrices are not: the groups are exchanged", advice)
    elif decayed and plain and (exempt or any(not g["params"] for g in plain)):
        yield fail(
            decayed[0],
            f"{len(decayed)} gains of norms are decayed ({', '.join(decayed[:3])}), though there is a group without",
            advice,
        )
    elif 0 < len(spared) < len(matrices):
        yield fail(
            spared[0],
            f"{len(spared)} of {len(matrices)} matrices are not decayed ({', '.join(spared[:3])})",
            advice,
        )
    elif decayed:
        yield note("optimizer", f"{len(decayed)} gains are decayed as matrices are")
    biases = [n for n in by_role["bias"] if decays[n]]
    if biases and exempt:
        some = len(biases) < len(by_role["bias"])
        yield (
            fail(biases[0], f"{len(biases)} biases are decayed, and others are not", advice)
            if some
            else note("optimizer", "biases are decayed, though there is a group without decay")
        )


def _odd_ones(
    step: Step, entries: list[tuple[str, str, Tensor, dict[str, Any], Optimizer]]
) -> Iterator[Violation]:
    settings = {
        name: (float(g.get("initial_lr", g["lr"])), float(g.get("weight_decay") or 0), type(o).__name__)
        for name, _, _, g, o in entries
    }
    for names in siblings(step.facts.stacks, settings).values():
        counts = Counter(settings[n] for n in names).most_common()
        if len(counts) == 2 and counts[1][1] == 1 and counts[0][1] >= 3:
            odd = next(n for n in names if settings[n] == counts[1][0])
            rate, decay, _ = settings[odd]
            yield fail(
                odd,
                f"its rate is {rate:.4g} and its decay {decay:.4g}, those of its siblings are {counts[0][0][0]:.4g} "
                f"and {counts[0][0][1]:.4g}",
                "one group for each role",
            )
            return


# ------------------------------------------------------------------------------------------------- update
@property_of("optimizer", explains=["overfit"], passes=4)
def update(step: Step) -> Iterator[Violation | Note]:
    """The first step is the rule's: downhill, for every parameter, and not lost in the weights' precision.

    It is taken on copies, in the weights' own precision and without dropout, at the schedule's peak. SGD, Adam
    and AdamW are compared with their published rules.
    """
    run = rehearsal(step, whole=plain_step(step.loss_of))
    rates = rates_of(step).peaks
    if max(rates) <= 0:
        yield fail("optimizer", "the rate of every group is 0", "hand it a rate")
        return
    weights = dict(run.model.named_parameters())
    before = {n: p.detach().clone() for n, p in weights.items()}
    fresh = not any(o.state for o in run.optimizers)
    states = {run.names.get(id(p), ""): dict(s) for o in run.optimizers for p, s in o.state.items()}
    states = {
        n: {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()} for n, s in states.items()
    }
    seen = run.run(cloned(step.batch), acts=True, rates=rates)
    gradients = {n: g.double() for n, g in seen.gradients.items() if bool(g.any())}
    moved = {n: weights[n].detach().double() - before[n].double() for n in weights}
    owner = {
        run.names[id(p)]: (o, g)
        for o in run.optimizers
        for g in o.param_groups
        for p in g["params"]
        if id(p) in run.names
    }
    for n, p in weights.items():
        if not torch.isfinite(moved[n]).all():
            yield fail(n, "its update is not finite", "look at the rate, eps and the gradient")
            return
        if not p.requires_grad and bool(moved[n].any()):
            yield fail(n, "it is frozen, and moves", "leave it out of the optimizer")
            return
    lost = _lost(step, run, (gradients, moved, owner))
    yield from lost
    if any(isinstance(a, Violation) for a in lost):
        return
    yield from _by_rule(before, gradients, moved, owner, states)
    slope = sum(float((g * moved[n]).sum()) for n, g in gradients.items())
    if fresh and slope > 0:
        yield fail("optimizer", "its first step goes up the gradient", "look for a sign")


def _lost(step: Step, run: Any, seen: tuple[Any, Any, Any]) -> list[Violation | Note]:
    """Parameters that do not move, and those of which most entries do not."""
    gradients, moved, owner = seen
    still = [n for n in gradients if float(owner[n][1]["lr"]) == 0]
    if still:
        return [
            fail(
                common(still),
                f"{len(still)} parameters with a gradient have a rate of 0",
                "look at their group",
            )
        ]
    weights = dict(run.model.named_parameters())
    lost, entries, total = list[str](), 0, 0
    for n, g in gradients.items():
        if _has_master(owner[n][0].state.get(weights[n], {}), weights[n]):
            continue
        here, stuck = int((g != 0).sum()), int(((g != 0) & (moved[n] == 0)).sum())
        entries, total = entries + stuck, total + here
        if 2 * stuck > here:
            lost.append(n)
    if not lost:
        return []
    kind = str(weights[lost[0]].dtype).removeprefix("torch.")
    evidence = f"in {len(lost)} of {len(gradients)} parameters most entries do not move: {kind} rounds the update away"
    if 2 * entries > total:
        return [
            fail(
                common(lost),
                evidence,
                "keep the weights in float32, or a float32 copy of them in the optimizer",
            )
        ]
    return [note(common(lost), evidence)]


def _has_master(state: Mapping[str, Any], p: Tensor) -> bool:
    """Whether the optimizer keeps the weights themselves in a wider type."""
    return any(
        isinstance(t, Tensor)
        and t.shape == p.shape
        and t.dtype.itemsize > p.dtype.itemsize
        and torch.equal(t.to(p), p)
        for t in state.values()
    )


def _by_rule(
    before: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    moved: Mapping[str, Tensor],
    owner: Mapping[str, tuple[Optimizer, dict[str, Any]]],
    states: Mapping[str, Mapping[str, Any]],
) -> Iterator[Violation | Note]:
    small = list[str]()
    for n, g in gradients.items():
        optimizer, group = owner[n]
        rule = RULES.get(type(optimizer).__name__)
        if rule is None:
            continue
        want = rule(before[n].double(), g, group, states.get(n, {}))
        eps = torch.finfo(before[n].dtype).eps
        allowed = 8 * eps * float(before[n].double().norm() + want.norm())
        off = float((moved[n] - want).norm())
        if off > allowed:
            yield fail(
                n,
                f"its first step differs from the rule of {type(optimizer).__name__} by {off / float(want.norm()):.2g} of "
                "its size",
                "look at decay, bias correction, and at what changes gradients or weights besides",
            )
            return
        if "eps" in group and float(g[g != 0].abs().median()) < float(group["eps"]) and n not in states:
            small.append(n)
    if 2 * len(small) > len(gradients):
        yield fail(
            "optimizer",
            f"eps is above most entries of the gradient in {len(small)} of {len(gradients)} parameters, so that "
            "Adam's first step is smaller than the rate",
            "lower eps, or do not shrink the gradient",
        )
    elif small:
        yield note(common(small), f"eps is above most entries of the gradient in {len(small)} parameters")


def _sgd(p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """SGD with momentum, as torch has it: the first step has no dampening."""
    g = (-g if group.get("maximize") else g) + float(group.get("weight_decay") or 0) * p
    momentum, buffer = float(group.get("momentum") or 0), state.get("momentum_buffer")
    if momentum:
        b = g if buffer is None else momentum * buffer.double() + (1 - float(group.get("dampening") or 0)) * g
        g = g + momentum * b if group.get("nesterov") else b
    return -float(group["lr"]) * g


def _adam(p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """Adam, Kingma and Ba 2015, algorithm 1 (1412.6980), with AMSGrad's maximum where that is asked."""
    decay, rate = float(group.get("weight_decay") or 0), float(group["lr"])
    g = -g if group.get("maximize") else g
    decoupled = bool(group.get("decoupled_weight_decay"))
    g = g if decoupled else g + decay * p
    (b1, b2), t = map(float, group["betas"]), float(state.get("step", 0)) + 1
    m = b1 * _old(state, "exp_avg", g) + (1 - b1) * g
    v = b2 * _old(state, "exp_avg_sq", g) + (1 - b2) * g * g
    if group.get("amsgrad"):
        v = torch.maximum(v, _old(state, "max_exp_avg_sq", g))
    step = rate * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + float(group["eps"]))
    return -step - (rate * decay * p if decoupled else 0)


def _adamw(p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """AdamW, Loshchilov and Hutter 2019, algorithm 2 (1711.05101), with the rate times the decay as torch has it."""
    return _adam(p, g, {**group, "decoupled_weight_decay": True}, state)


def _old(state: Mapping[str, Any], key: str, g: Tensor) -> Tensor:
    return state[key].double() if isinstance(state.get(key), Tensor) else torch.zeros_like(g)


RULES: Final = {"SGD": _sgd, "Adam": _adam, "AdamW": _adamw}
"""The first step of a parameter, by the name that an optimizer's class declares."""

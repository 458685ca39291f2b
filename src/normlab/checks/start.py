"""Properties of a start: how parameters and buffers are drawn, and what the untrained model predicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

import torch
from torch import Tensor, nn

from normlab.checks.fresh import drawn_by_class, fresh, from_library
from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.compare import distance
from normlab.trace.facts.stacks import siblings
from normlab.trace.facts.unknown import Unknown
from normlab.trace.starts import Start, differences

SEEDS: Final = (101, 202)
LEAST: Final = 64
"""Entries from which a deviation says something."""
MOST: Final = 2**20
"""Entries that are looked at."""
CHANCE: Final = 1e-5
"""How often all comparisons together may call a sound start odd."""
Answers = Iterator[Violation | Note]


# -------------------------------------------------------------------------------------------------- start
@property_of("start", explains=["initial_loss"], passes=0)
def start(step: Step) -> Answers:
    """Parameters start as declared, as their class or ``make`` draws them, and as their siblings do.

    Constants are compared exactly, draws by a z-test on the logarithm of their deviation, whose error uses
    their kurtosis, corrected for the number of comparisons. Siblings are compared where the rest of them
    agree, so that a start that is scaled by depth passes.
    """
    if _trained(step):
        raise Untestable("the model is trained; its start is gone")
    declared: tuple[Start, ...] = step.declare.init if isinstance(step.declare.init, tuple) else ()
    for path, how in islice(differences(step.model, declared), 1):
        yield fail(path, how, "initialize it as declared, or declare what is meant")
        return
    live = {n: p for n, p in _parameters(step.model).items() if n not in {one.path for one in declared}}
    with_class: Violation | None = None
    try:
        pair = [_parameters(fresh(step, seed)) for seed in SEEDS]
        with_class = _unlike_class(live, pair)
    except Untestable:
        pair = []
    answer = with_class or _unlike_siblings(step, live)
    if answer is not None:
        yield answer
    elif not pair and not step.facts.stacks and not declared:
        raise Untestable("no siblings, and nothing says how the model is drawn: pass make=")


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.is_floating_point() and not p.is_meta}


def _trained(step: Step) -> bool:
    """Whether the weights are trained: the loss says so, or most constants of the start are none any more."""
    try:
        if step.facts.trained:
            return True
    except Unknown:
        pass
    try:
        fixed = {n: p for n, p in _parameters(fresh(step, SEEDS[0])).items() if p.ndim and _constant(p)}
    except Untestable:
        return False
    live = _parameters(step.model)
    moved = [n for n in fixed if n in live and live[n].numel() > 1 and not _constant(live[n])]
    return len(moved) > len(fixed) / 2


def _constant(p: Tensor) -> bool:
    return p.numel() > 0 and bool((p == p.flatten()[0]).all())


def _unlike_class(live: Mapping[str, Tensor], pair: list[dict[str, Tensor]]) -> Violation | None:
    one, other = pair
    shared = [
        n for n, p in live.items() if n in one and n in other and p.shape == one[n].shape == other[n].shape
    ]
    cut = _limit(len(shared))
    odd: list[tuple[float, str, str]] = []
    seeded = all(torch.equal(one[n], other[n]) for n in shared)
    for name in shared:
        p, a, b = live[name].double(), one[name].double(), other[name].double()
        if torch.equal(a, b) and (_constant(a) or not seeded):
            gap = distance(p, a.to(live[name].dtype).double())
            if gap > 2 * torch.finfo(live[name].dtype).eps:
                odd.append((math.inf, name, f"differs by {gap:.1g} from the constants that it starts with"))
        elif p.numel() >= LEAST and not _constant(p):
            logs, errors = _log_std([p, a, b])
            z = abs(float(logs[0] - (logs[1] + logs[2]) / 2)) / (float(errors[0]) * 1.5**0.5)
            if z > cut:
                odd.append(
                    (z, name, f"has deviation {float(p.std()):.4g}, and is drawn with {float(a.std()):.4g}")
                )
        elif p.numel() >= LEAST:
            odd.append((math.inf, name, f"is {float(p.flatten()[0]):g} everywhere, and is drawn at random"))
    if not odd:
        return None
    _, name, say = odd[0]
    more = f" ({len(odd)} of {len(shared)} parameters are unlike their class)" if len(odd) > 1 else ""
    return fail(name, say + more, "run the class's own initialization after replacing parts")


def _limit(tests: int) -> float:
    """The largest z of so many draws of a standard normal that is still chance."""
    return -float(torch.special.ndtri(torch.tensor(CHANCE / max(tests, 1) / 2, dtype=torch.float64)))


def _log_std(draws: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The logarithm of each deviation, and its error by the kurtosis that they share."""
    flat = [x.flatten()[:: x.numel() // MOST + 1].double() for x in draws]
    std = torch.stack([x.std() for x in flat]).clamp_min(1e-300)
    count = sum(x.numel() for x in flat)
    fourth = sum(float(((x - x.mean()) / s).pow(4).sum()) for x, s in zip(flat, std, strict=True)) / count
    errors = [max(fourth - 1, 0.05) / (4 * x.numel()) for x in flat]
    return std.log(), torch.tensor(errors, dtype=torch.float64).sqrt()


def _unlike_siblings(step: Step, live: Mapping[str, Tensor]) -> Violation | None:
    groups = [{n: live[n] for n in names} for names in siblings(step.facts.stacks, live).values()]
    groups += [
        {f"{n}[{i}]": part for i, part in enumerate(p)} for n, p in live.items() if p.ndim == 3 and len(p) > 2
    ]
    groups = [g for g in groups if len(g) > 2 and len({p.shape for p in g.values()}) == 1]
    cut, worst = _limit(sum(map(len, groups))), (0.0, "", "")
    for group in groups:
        said = _odd_constant(group) if any(map(_constant, group.values())) else _odd_draw(group, cut)
        worst = max(worst, said or worst)
    _, name, say = worst
    return fail(name, say, "initialize all blocks alike") if name else None


def _odd_constant(group: Mapping[str, Tensor]) -> tuple[float, str, str] | None:
    values = {n: float(p.flatten()[0]) if _constant(p) else None for n, p in group.items()}
    top, count = Counter(values.values()).most_common(1)[0]
    odd = [n for n, v in values.items() if v != top]
    if len(odd) != 1 or count < 2:
        return None
    words = ["is drawn" if v is None else f"is {v:g}" for v in (values[odd[0]], top)]
    return math.inf, odd[0], f"{words[0]}, and in the {count} other blocks it {words[1]}"


def _odd_draw(group: Mapping[str, Tensor], cut: float) -> tuple[float, str, str] | None:
    """The parameter whose deviation is unlike that of its siblings, where these agree."""
    names, draws = list(group), list(group.values())
    if draws[0].numel() < LEAST:
        return None
    logs, errors = _log_std(draws)
    middle = logs.median()
    z = (logs - middle).abs() / errors / (1 + 1 / (len(draws) - 1)) ** 0.5
    off = z > cut
    if not off.any() or int(off.sum()) > (len(draws) - 1) // 2:
        return None
    rest = logs[~off]
    if float(((rest - rest.mean()).abs() / errors[~off]).max()) > cut:
        return None
    i = int(z.argmax())
    say = f"has deviation {math.exp(float(logs[i])):.4g}, its siblings {math.exp(float(middle)):.4g}"
    return float(z[i]), names[i], say


# -------------------------------------------------------------------------------------------------- seeds
@property_of("start", explains=["start", "initial_loss"], passes=0)
def seeds(step: Step) -> Answers:
    """Blocks are drawn each for itself, and two seeds give two models.

    No matrix that is drawn equals the one of another block in every entry, unless the block stands twice.
    """
    named = dict(step.model.named_parameters())
    for names in siblings(step.facts.stacks, named).values():
        answer = _copied(step, {n: named[n] for n in names})
        if answer is not None:
            yield answer
            return
    one, other = (_parameters(fresh(step, seed)) for seed in SEEDS)
    drawn = [n for n, p in one.items() if p.ndim >= 2 and n in other and not _constant(p)]
    same = [n for n in drawn if torch.equal(one[n], other[n])]
    if drawn and len(same) == len(drawn):
        raise Untestable("two seeds gave the same model: make() seeds itself; leave the seed to its caller")
    alike = siblings(step.facts.stacks, drawn).values()
    odd = next((n for names in alike for n in names if n in same and len(set(names) - set(same)) > 0), None)
    if odd is not None:
        yield fail(
            odd, "is the same under two seeds, and in other blocks it is not", "draw it by torch's generator"
        )


def _copied(step: Step, group: Mapping[str, Tensor]) -> Violation | Note | None:
    seen: list[tuple[str, Tensor]] = []
    for name, p in group.items():
        if p.ndim < 2 or not p.numel() or torch.equal(p[0], p[-1]):
            continue
        for first, q in seen:
            if p is not q and p.shape == q.shape and torch.equal(p, q):
                say = f"is drawn, and equals {first} in every entry"
                if _copied_on_purpose(step, first, name) or _trained(step):
                    return note(name, say)
                return fail(name, say, "build each block anew: a copy has its numbers")
        seen.append((name, p))
    return None


def _copied_on_purpose(step: Step, first: str, name: str) -> bool:
    """Whether the model's own class, or a library's container (nn.TransformerEncoder), copies its blocks."""
    if drawn_by_class(step):
        drawn = _parameters(fresh(step, SEEDS[0]))
        return torch.equal(drawn[first], drawn[name])
    owner = next(c for c in step.facts.stacks if name.startswith(f"{c}."))
    return from_library(step.model.get_submodule(owner.rpartition(".")[0]))


# ------------------------------------------------------------------------------------------- initial loss
@property_of("start", explains=["overfit"], passes=0)
def initial_loss(step: Step) -> Answers:
    r"""An untrained model has no favourite: no class outweighs all others.

    Logits that know nothing and have variance :math:`s^2` over C classes cost :math:`\ln C + s^2 / 2`; at
    :math:`s^2 = 2 \ln C` the largest of them outweighs the sum of the rest (Derrida 1981, the random energy
    model), and what the model says is the noise of its start.
    """
    targets = step.facts.targets
    if step.facts.trained:
        raise Untestable("the model is trained")
    counted = targets.counted.reshape(-1)
    logits = step.facts.logits.value.reshape(-1, targets.classes)[counted.to(step.facts.logits.value.device)]
    variance = float(logits.double().var(-1).mean())
    loss, even = float(targets.nll.reshape(-1)[counted].mean()), math.log(targets.classes)
    if targets.classes > 1 and variance > 2 * even and loss > even:
        say = (
            f"the untrained model costs {loss:.3g} nats, and one that knows nothing {even:.3g}: "
            f"its logits have deviation {variance**0.5:.3g}"
        )
        where = _head(step)
        meant = where == "loss" or (drawn_by_class(step) and _same_start(step))
        yield note(where, say) if meant else fail(where, say, "draw the head, or the tied table, smaller")


def _same_start(step: Step) -> bool:
    live, drawn = _parameters(step.model), [_parameters(fresh(step, seed)) for seed in SEEDS]
    return _unlike_class(live, drawn) is None


def _head(step: Step) -> str:
    roles = step.facts.roles
    tables = [n for n, role in roles.items() if role in ("head", "embedding")]
    named = dict(step.facts.trace.model.named_parameters())
    fits = [n for n in tables if step.facts.logits.shape[-1] in named[n].shape]
    return max(fits, key=lambda n: roles[n] == "head", default="loss")


# ------------------------------------------------------------------------------------------------ buffers
@property_of("structure", explains=["start", "meta", "state_dict"], passes=3)
def buffers(step: Step) -> Answers:
    """Each buffer holds what a freshly built model has there, in the buffer's own precision.

    Buffers that a training step changes, and those that two seeds draw differently, are left out. Without a
    way to build the model, those of other blocks are compared.
    """
    live = {n: b for n, b in step.model.named_buffers() if b.numel() and not b.is_meta}
    if not live:
        raise Untestable("the model has no buffers")
    moving = _moving(step)
    fixed = {n: b for n, b in live.items() if n not in moving}
    try:
        one, other = (dict(fresh(step, seed).named_buffers()) for seed in SEEDS)
    except Untestable:
        yield from _like_siblings(step, fixed)
        return
    for name, b in fixed.items():
        a = one.get(name)
        if a is None or a.shape != b.shape or not torch.equal(a, other[name]):
            continue
        if _apart(b, a):
            yield fail(
                name,
                "differs from that of a model that is built anew",
                "build it again after moving the model",
            )
            return


def _apart(live: Tensor, own: Tensor) -> bool:
    gap = distance(live.double(), own.to(live.dtype).double())
    return gap > (4 * torch.finfo(live.dtype).eps if live.is_floating_point() else 0.0)


def _moving(step: Step) -> set[str]:
    """Buffers that a training step changes: running statistics and counters."""
    model = step.copy().train()
    before = {n: b.clone() for n, b in model.named_buffers()}
    step.loss_of(model, step.batch)
    return {
        n for n, b in model.named_buffers() if b.shape != before[n].shape or not torch.equal(b, before[n])
    }


def _like_siblings(step: Step, live: Mapping[str, Tensor]) -> Answers:
    groups = [names for names in siblings(step.facts.stacks, live).values() if len(names) > 2]
    if not groups:
        raise Untestable("nothing says how the model is built: pass make=")
    for names in groups:
        unlike = [n for n in names if sum(torch.equal(live[n], live[o]) for o in names) == 1]
        if len(unlike) == 1:
            yield fail(unlike[0], "differs from those of all other blocks", "build all blocks alike")
            return

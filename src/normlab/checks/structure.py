"""Properties of structure: the stream, attention's scale, norms, and maps that bend."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normlab.checks.fresh import exact_fresh, from_library
from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step, common, distance
from normlab.checks.wiring import Scores, read_wiring, wiring
from normlab.trace.facts.stacks import Block, siblings, stream_of
from normlab.trace.functions import Functions
from normlab.trace.trace import Event, Trace

SCALES = (1e6, 1e7)
"""Sizes at which a normed branch is lost beside the stream that it is added to."""
Answers = Iterator[Violation | Note]


# ------------------------------------------------------------------------------------------------ residual
@property_of("structure", explains=["gradients", "derivative", "norms", "overfit", "siblings"], passes=6)
def residual(step: Step) -> Answers:
    """Blocks run in order, each on the output of the one before, and pass their stream on by one factor.

    From a block's output a way leads back to its input that crosses no matrix product. Its input is made a
    million and ten million times as large; the difference of the outputs is the factor of the stream: 1 where
    a branch is added to it, 0 where a norm follows.
    """
    facts = step.facts
    if not facts.stacks:
        raise Untestable("no numbered blocks hand a stream on")
    for name, blocks in facts.stacks.items():
        answer = _order(step, name, blocks) or _kept(step, name, blocks)
        if answer is not None:
            yield answer
            return
    if step.is_exact:
        yield from _factors(step)


def _order(step: Step, name: str, blocks: list[Block]) -> Violation | None:
    facts, ran = step.facts, {b.path: b for b in blocks if step.facts.called[b.path]}
    seen = {id(b.module) for b in ran.values()}
    classes = {type(b.module) for b in ran.values()}
    idle = [b for b in blocks if b.path not in ran and id(b.module) not in seen and type(b.module) in classes]
    if idle:
        return fail(idle[0].path, f"{len(idle)} of {len(blocks)} blocks never run", "run every block of the list")
    calls = [path for path, _ in facts.order if path in ran]
    if len(calls) != len(ran):
        return None
    numbers = [ran[path].index for path in calls]
    if numbers != sorted(numbers) and numbers != sorted(numbers, reverse=True):
        return fail(name, f"blocks run in the order {numbers}", "run them in the order of their numbers")
    for before, after in zip(calls, calls[1:], strict=False):
        (x, y), (z, _) = facts.streams[before, 0], facts.streams[after, 0]
        skipped = x is not None and z is not None and x.shape == z.shape and torch.equal(x, z)
        if skipped and not torch.equal(x, y) and not _used(step, before):
            return fail(after, f"reads what {before} read, whose output goes nowhere", "hand on each block's output")
    return None


def _used(step: Step, path: str) -> bool:
    """Whether the loss depends on the output of a module."""
    with step.exact.with_graph(events=True) as passed:
        y = next((stream_of(e.outputs) for e in passed.events if e.module == path), None)
        if y is None or not y.requires_grad or passed.loss is None:
            return True
        return torch.autograd.grad(passed.loss, y, allow_unused=True)[0] is not None


def _kept(step: Step, name: str, blocks: list[Block]) -> Violation | None:
    """A block whose output does not hold its input, unless it is so in all of them and none attends."""
    read = wiring(step)
    here = {b.path: read.streams[b.path] for b in blocks if b.path in read.streams}
    lost = [path for path, (kept, _) in here.items() if not kept]
    attending = any(m == p or m.startswith(f"{p}.") for m in read.attending for p in here)
    if not lost or (len(lost) == len(here) and not attending):
        return None
    how = (
        "every way from its output to its input crosses a matrix product"
        if here[lost[0]][1]
        else "no gradient flows from its output to its input"
    )
    return fail(lost[0], f"{how} ({len(lost)} of {len(here)} blocks)", "x = x + branch(norm(x)) for each branch")


def _passed_on(trace: Trace, streams: Any, blocks: list[Block]) -> tuple[dict[str, float], list[Trace]]:
    """By block, the factor of its stream where it has one; and the runs in which the streams were scaled."""
    inputs = {b.path: streams[b.path, 0][0] for b in blocks if (b.path, 0) in streams}
    inputs = {path: x for path, x in inputs.items() if x is not None}

    def entering(x: Tensor, c: float) -> Any:
        return lambda own: c * (x if x.shape == own.shape else own)

    runs = [
        trace.again(changed={p: entering(x, c) for p, x in inputs.items()}) for c in SCALES
    ]
    outputs: list[dict[str, Tensor | None]] = []
    for run in runs:
        outputs.append({e.module: stream_of(e.outputs) for e in run.events if e.module in inputs and not e.call})
    factors: dict[str, float] = {}
    for path, x in inputs.items():
        low, high = (out.get(path) for out in outputs)
        if low is None or high is None or low.shape != x.shape:
            continue
        change = (high - low).double() / (SCALES[1] - SCALES[0])
        size = float(x.double().square().sum())
        factor = float((change * x).sum()) / size if size else 0.0
        if float((change - factor * x).square().sum()) <= 1e-12 * size:
            factors[path] = 0.0 if abs(factor) < 1e-6 else round(factor, 6)
    return factors, runs


def _factors(step: Step) -> Answers:
    facts = step.facts
    known, runs = _passed_on(step.exact, facts.streams, facts.blocks)
    step.kept["scaled streams"] = known, runs
    for blocks in facts.stacks.values():
        here = {b.path: known[b.path] for b in blocks if b.path in known}
        if len(here) < 2:
            continue
        odd = odd_one(here)
        at_an_end = odd in (blocks[0].path, blocks[-1].path)
        if odd is not None and not (at_an_end and here[odd] in (0.0, 1.0)):
            rest = next(v for p, v in here.items() if p != odd)
            yield fail(odd, f"passes on {here[odd]:g} times its input, the other blocks {rest:g} times",
                       "x = x + branch(norm(x)) in every block")  # fmt: skip
            return
        path, factor = next(iter(here.items()))
        if len(set(here.values())) == 1 and factor not in (0.0, 1.0):
            whole = factor == int(factor)
            say = f"each of {len(here)} blocks passes on {factor:g} times its input"
            yield fail(path, say, "add the stream once") if whole else note(path, say)
            if whole:
                return


def odd_one(values: dict[str, Any]) -> str | None:
    """The only key whose value differs from all others', of three and more, which agree."""
    counts = Counter(values.values())
    if len(values) < 3 or len(counts) != 2 or min(counts.values()) != 1:
        return None
    return next(key for key, value in values.items() if counts[value] == 1)


# ------------------------------------------------------------------------------------------ attention scale
@property_of("structure", explains=["causality", "overfit", "siblings"], passes=4)
def attention_scale(step: Step) -> Answers:
    """Scores are divided by the root of the head's width, and a softmax runs over the keys.

    The constant on the product of queries and keys is read off the autograd graph, wherever it is multiplied
    in. The width itself will do (muP), and any constant where queries are normed, a parameter scales the
    scores, or the matrix of the queries is drawn that much smaller (T5).
    """
    read = wiring(step)
    if read.over_queries:
        yield fail(read.over_queries[0], "the softmax of the scores is not over the keys", "softmax(dim=-1)")
        return
    if not read.scores:
        raise Untestable("no product of queries and keys whose scale can be read goes into a softmax")
    for places in _alike(step, read.scores).values():
        odd = odd_one({str(i): round(s.factor * s.width**0.5, 5) for i, s in enumerate(places)})
        if odd is not None and not _as_drawn(step, places[int(odd)]):
            one, other = places[int(odd)], places[int(odd) - 1]
            say = f"scores are scaled by {one.factor:.4g}, in the other layers by {other.factor:.4g}"
            yield fail(one.module, say, "scale the scores alike in all layers")
            return
    wrong = [s for s in read.scores if not _scaled_by_width(s)]
    if not wrong:
        return
    first = wrong[0]
    say = f"scores are scaled by {first.factor:.4g}; heads are {first.width} wide, and 1/sqrt is {first.width**-0.5:.4g}"
    excused = _as_drawn(step, first) or step.facts.trained
    yield note(first.module, say) if excused else fail(first.module, say, "divide by the root of the head's width")


def _alike(step: Step, scores: list[Scores]) -> dict[str, list[Scores]]:
    """Scores by the place that they have in their blocks."""
    groups: dict[str, list[Scores]] = defaultdict(list)
    calls = Counter[str]()
    for one in scores:
        role = next(iter(siblings(step.facts.stacks, [f"{one.module}."])), "")
        calls[one.module] += 1
        if role:
            groups[f"{role} {calls[one.module]}"].append(one)
    return groups


def _scaled_by_width(s: Scores) -> bool:
    wanted = s.width**-0.5
    ratio, error = s.drawn
    near = abs(s.factor - wanted) < 1e-3 * wanted or abs(s.factor * s.width - 1) < 1e-3
    return near or s.free or (error > 0 and abs(s.factor * ratio / wanted - 1) < 5 * error)


def _as_drawn(step: Step, one: Scores) -> bool:
    """Whether the library's own class scales these scores so."""
    trace = exact_fresh(step)
    if trace is None:
        return False
    own = read_wiring(trace, [b.path for b in step.facts.blocks]).scores
    return any(s.module == one.module and abs(s.factor - one.factor) < 1e-3 * abs(one.factor) for s in own)


# --------------------------------------------------------------------------------------------------- norms
@property_of("structure", explains=["siblings", "overfit", "initial_loss"], passes=4)
def norms(step: Step) -> Answers:
    """A norm gives each token's features one size, whatever their scale; and one stands before the head.

    A module whose own parameters are vectors and whose output at one feature depends on the others is a norm:
    its output must not change with the scale of its input, nor with other tokens. The entries of a gain have
    one sign. Where blocks add to a stream that they norm themselves, the logits must not grow with it.
    """
    here = [e for e in step.exact.events if e.call == 0 and _may_norm(step.exact.model, e)]
    found: list[str] = []
    for event in here:
        said = _normed(step, event)
        if isinstance(said, Violation):
            yield said
            return
        if said:
            found.append(event.module)
    gains = {path: g for path in found if (g := _gain(step, path)) is not None and g.numel() >= 16}
    if len(gains) > 1 and all(_scatters(g) for g in gains.values()):
        first = next(iter(gains))
        yield fail(
            first,
            f"its gains scatter around zero (mean {float(gains[first].mean()):.2g}, deviation "
            f"{float(gains[first].std()):.2g}), as those of {len(gains) - 1} other norms do",
            "read a gain that is kept as an offset as 1 + w, or draw it as ones",
        )
        return
    yield from _before_the_head(step)
    if not found and "scaled streams" not in step.kept:
        raise Untestable("no module is a norm, and no stack adds to a stream")


def _may_norm(model: nn.Module, event: Event) -> bool:
    x, y = event.inputs[:1], event.outputs[:1]
    if len(event.inputs) != 1 or not y or not event.module or x[0].shape != y[0].shape or x[0].ndim < 2:
        return False
    module, width = model.get_submodule(event.module), x[0].shape[-1]
    grouped = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
    return (
        x[0].is_floating_point()
        and width > 2
        and not any(isinstance(m, grouped) for m in module.modules())
        and all(p.numel() in (1, width) for p in module.parameters())
    )


def _call(trace: Trace, path: str, x: Tensor) -> Tensor | None:
    """A module on another input, run as the trace runs it; None where it cannot be."""
    module = trace.model.get_submodule(path)
    with trace._surroundings(), torch.no_grad(), Functions(exact=trace.exact, dropout=False):
        try:
            y = module(x.clone())
        except Exception:
            return None
    return y if isinstance(y, Tensor) and y.shape == x.shape else None


def _normed(step: Step, event: Event) -> Violation | bool:
    """Whether a module norms each token; a violation where it should and does not."""
    x, path = event.inputs[0], event.module
    h = torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(x)
    other = h.clone()
    other[..., 0] = -2 * h[..., 0] + 1
    ys = [_call(step.exact, path, v) for v in (h, other, 1e3 * h, 1e4 * h)]
    if any(y is None for y in ys):
        return False
    y, y_other, large, larger = ys
    mixes = distance(y[..., 1:], y_other[..., 1:]) > 1e-6
    change, own = distance(large, larger), step.exact.model.get_submodule(path)
    if change > 1e-6:
        if not mixes or all(p.numel() != x.shape[-1] for p in own.parameters()):
            return False
        return fail(path, f"its output changes by {change:.1g} of its size when its input is ten times as large",
                    "divide by the root of the mean square, or the deviation, of the features")  # fmt: skip
    if x.ndim == 3 and x.shape[1] > 1:
        moved = h.clone()
        moved[:, 1:] = moved[:, 1:].roll(1, -1) * 1.7 + 0.3
        again = _call(step.exact, path, moved)
        if again is not None and distance(y[:, :1], again[:, :1]) > 1e-6:
            return fail(path, "what it makes of one token depends on the others", "take its statistics over features")
    return mixes


def _gain(step: Step, path: str) -> Tensor | None:
    """The factor on each feature, read off a token of ones with both signs."""
    event = next(e for e in step.exact.events if e.module == path)
    width = event.inputs[0].shape[-1]
    signs = (1 - 2 * (torch.randperm(width, generator=torch.Generator().manual_seed(7)) % 2)).to(event.inputs[0])
    dtype = next((p.dtype for p in step.plain.model.get_submodule(path).parameters()), torch.float32)
    x = signs.to(dtype).expand(event.inputs[0].shape)
    plus, minus = _call(step.plain, path, x), _call(step.plain, path, -x)
    if plus is None or minus is None or width % 2:
        return None
    return ((plus - minus) / 2 * x).reshape(-1, width)[0].double()


def _scatters(gain: Tensor) -> bool:
    """Whether the signs of a gain are those of a fair coin, by three deviations; or it is zero."""
    count = gain.numel()
    return abs(int((gain < 0).sum()) - count / 2) <= 1.5 * count**0.5 or not bool(gain.any())


def _before_the_head(step: Step) -> Answers:
    known, runs = step.kept.get("scaled streams", ({}, []))
    last = next((path for path, _ in reversed(step.facts.order) if path in known), None)
    if last is None or known[last] != 1.0:
        return
    _ = step.facts.logits
    if not _grows(step, runs):
        return
    own = from_library(step.model.get_submodule(last)) and not from_library(step.model)
    trace = exact_fresh(step)
    if trace is not None:
        own = _grows(step, _passed_on(trace, step.facts.streams, step.facts.blocks)[1])
    say = "the logits grow in proportion to the last block's stream: no norm stands between"
    yield note(last, say) if own else fail(last, say, "norm the stream before the head")


def _grows(step: Step, runs: list[Trace]) -> bool:
    low, high = (step.logits(run).double() for run in runs)
    size = float(low.norm())
    return size > 0 and abs(float(high.norm()) / size - SCALES[1] / SCALES[0]) < 1e-3


# ----------------------------------------------------------------------------------------------- nonlinear
@property_of("structure", passes=4)
def nonlinear(step: Step) -> Answers:
    """Two maps in a row with nothing that bends between them are not wider inside than outside.

    Such a pair is one map of lower rank, and its inner width is wasted; a narrow one (LoRA, a factorized
    table) is meant.
    """
    chains = wiring(step).chains
    if chains:
        first, second, width = chains[0]
        more = f", and {len(chains) - 1} more pairs" if len(chains) > 1 else ""
        say = f"{second} reads the {width} features of {first} as they are{more}"
        yield fail(common([first, second]), say, "put an activation between the two maps")

"""Properties of structure: the stream, attention's scale, norms, and maps that bend."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from normlab.checks.fresh import exact_fresh
from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.facts.stacks import Block, common, siblings, stream_of
from normlab.trace.facts.wiring import Scores, Wiring, read_wiring
from normlab.trace.record import Want, record
from normlab.trace.trace import Trace

SCALES = (1e6, 1e7)
"""Sizes at which a normed branch is lost beside the stream that it is added to."""
Answers = Iterator[Violation | Note]


def wiring(step: Step) -> Wiring:
    """The wiring of the exact model, read once."""
    if "wiring" not in step.kept:
        step.kept["wiring"] = read_wiring(step.exact, [b.path for b in step.facts.blocks])
    return step.kept["wiring"]


# ------------------------------------------------------------------------------------------------ residual
@property_of("structure", explains=["gradients", "derivative", "norms", "overfit", "siblings"], passes=8)
def residual(step: Step) -> Answers:
    """Blocks run in order, each on the output of the one before, and pass their stream on by one factor.

    From a block's output a way leads back to its input that crosses no matrix product. Its input is made a
    million and ten million times as large; the difference of the outputs is the factor of the stream: 1 where
    a branch is added to it, 0 where a norm follows. Dropout acts on branches, not on the stream.
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
        return fail(
            idle[0].path, f"{len(idle)} of {len(blocks)} blocks never run", "run every block of the list"
        )
    calls = [path for path, _ in facts.order if path in ran]
    if len(calls) != len(ran):
        return None
    numbers = [ran[path].index for path in calls]
    if numbers != sorted(numbers) and numbers != sorted(numbers, reverse=True):
        return fail(name, f"blocks run in the order {numbers}", "run them in the order of their numbers")
    for before, after in pairwise(calls):
        (x, y), (z, _) = facts.streams[before, 0], facts.streams[after, 0]
        skipped = x is not None and z is not None and x.shape == z.shape and torch.equal(x, z)
        if skipped and not torch.equal(x, y) and not _used(step, before):
            return fail(
                after, f"reads what {before} read, whose output goes nowhere", "hand on each block's output"
            )
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
    return fail(
        lost[0], f"{how} ({len(lost)} of {len(here)} blocks)", "x = x + branch(norm(x)) for each branch"
    )


def passed_on(trace: Trace, streams: Any, blocks: list[Block]) -> tuple[dict[str, float], list[Trace]]:
    """By block, the factor of its stream where it has one; and the runs in which the streams were scaled."""
    inputs = {b.path: streams[b.path, 0][0] for b in blocks if (b.path, 0) in streams}
    inputs = {path: x for path, x in inputs.items() if x is not None}

    def entering(x: Tensor, c: float) -> Any:
        return lambda own: c * (x if x.shape == own.shape else own)

    runs = [trace.again(changed={p: entering(x, c) for p, x in inputs.items()}) for c in SCALES]
    outputs = [_written(run, inputs) for run in runs]
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


def _written(trace: Trace, paths: Iterable[str]) -> dict[str, Tensor]:
    """The first tensor that each of these modules puts out."""
    wants = [Want(path, "output", keep=lambda x: x.detach().clone()) for path in paths]
    with trace._surroundings(), record(trace.model, wants) as seen:
        trace.run()
    written: dict[str, Tensor] = {}
    for one in seen:
        written.setdefault(one.tap.module, one.value)
    return written


def _factors(step: Step) -> Answers:
    facts = step.facts
    known, runs = passed_on(step.exact, facts.streams, facts.blocks)
    step.kept["scaled streams"] = known, runs
    drawing = step.exact.again(training=True, dropout=True)
    dropped = set(known) - set(passed_on(drawing, facts.streams, facts.blocks)[0])
    first = next((b.path for b in facts.blocks if b.path in dropped and known[b.path]), None)
    if first is not None:
        say = f"in training its stream is not passed on as it is ({len(dropped)} of {len(known)} blocks)"
        yield fail(first, say, "drop entries of the branch, not of the sum")
        return
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
@property_of("structure", explains=["overfit", "siblings"], passes=4)
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
    first = next((s for s in read.scores if not _scaled_by_width(s)), None)
    if first is None:
        return
    own = f"heads are {first.width} wide, and 1/sqrt is {first.width**-0.5:.4g}"
    say = f"scores are scaled by {first.factor:.4g}; {own}"
    excused = not _by_another_size(step, first) or _as_drawn(step, first) or step.facts.trained
    yield (
        note(first.module, say)
        if excused
        else fail(first.module, say, "divide by the root of the head's width")
    )


def _by_another_size(step: Step, one: Scores) -> bool:
    """Whether the constant is 1, or belongs to another size: of the stream, heads, tokens or rows."""
    shapes = [x.shape for pair in step.facts.streams.values() for x in pair if x is not None]
    width = shapes[0][-1] if shapes else one.width
    sizes = {1, width, width // one.width, *(n for shape in shapes[:1] for n in shape), one.width**-1}
    wanted = [size**power for size in sizes if size for power in (-0.5, -1.0)]
    return any(abs(one.factor - w) < 1e-3 * w for w in wanted)


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

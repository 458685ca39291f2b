"""Properties of structure: the stream, attention's scale, and maps that bend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from normlab.checks.property import Answers, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.facts.stacks import Block, common, odd_one, scaled_streams, siblings, stream_of, within
from normlab.trace.facts.wiring import Scores, read_wiring


@property_of("structure", explains=["gradients", "derivative", "norms", "overfit", "siblings"], passes=8)
def residual(step: Step) -> Answers:
    """Blocks run in order, each on the output of the one before, and pass their stream on by one factor.

    From a block's output a way leads back to its input that crosses no matrix product. Its input is made a
    million and ten million times as large; the difference of the outputs is the factor of the stream: 1 where
    a branch is added to it, 0 where a norm follows. Dropout acts on branches, not on the stream.
    """
    if not step.facts.stacks:
        raise Untestable("no numbered blocks hand a stream on")
    for name, blocks in step.facts.stacks.items():
        yield from filter(None, (_order(step, name, blocks), _kept(step, blocks)))
    if step.is_exact:
        yield from _factors(step)


def streams_in(step: Step) -> dict[str, Tensor]:
    """What each block reads at its first call."""
    first = ((b.path, step.facts.streams.get((b.path, 0), (None,))[0]) for b in step.facts.blocks)
    return {path: x for path, x in first if x is not None}


def _order(step: Step, name: str, blocks: Sequence[Block]) -> Violation | None:
    facts, ran = step.facts, {b.path: b for b in blocks if step.facts.called[b.path]}
    seen, classes = ({f(b.module) for b in ran.values()} for f in (id, type))
    idle = [b for b in blocks if id(b.module) not in seen and type(b.module) in classes]
    if idle:
        say = f"{len(idle)} of {len(blocks)} blocks never run"
        return fail(idle[0].path, say, "run every block of the list")
    calls = [path for path, _ in facts.order if path in ran]
    if len(calls) != len(ran):
        return None
    numbers = [ran[path].index for path in calls]
    if sorted(numbers) not in (numbers, numbers[::-1]):
        return fail(name, f"blocks run in the order {numbers}", "run them in the order of their numbers")
    for before, after in pairwise(calls):
        (x, y), (z, _) = facts.streams[before, 0], facts.streams[after, 0]
        if x is None or y is None or z is None or torch.equal(x, y):
            continue
        if torch.equal(x, z) and not _used(step, before):
            say = f"reads what {before} read, whose output goes nowhere"
            return fail(after, say, "hand on each block's output")
    return None


def _used(step: Step, path: str) -> bool:
    """Whether the loss depends on the output of a module."""
    with step.exact.with_graph(events=True) as passed:
        y = next((stream_of(e.outputs) for e in passed.events if e.module == path), None)
        if y is None or not y.requires_grad or passed.loss is None:
            return True
        return torch.autograd.grad(passed.loss, y, allow_unused=True)[0] is not None


def _kept(step: Step, blocks: Sequence[Block]) -> Violation | None:
    """A block whose output does not hold its input, unless it is so in all of them and none attends."""
    read = step.wiring
    here = {b.path: read.streams[b.path] for b in blocks if b.path in read.streams}
    lost = [path for path, (kept, _) in here.items() if not kept]
    attending = any(within(m, p) for m in read.attending for p in here)
    if not lost or (len(lost) == len(here) and not attending):
        return None
    cut = "every way crosses a matrix product" if here[lost[0]][1] else "no gradient flows"
    say = f"{cut} from its output to its input ({len(lost)} of {len(here)} blocks)"
    return fail(lost[0], say, "x = x + branch(norm(x)) for each branch")


def _factors(step: Step) -> Answers:
    facts, streams = step.facts, streams_in(step)
    scaled = step.kept["scaled streams"] = scaled_streams(step.exact, streams)
    known = scaled.factors
    drawing = scaled_streams(step.exact.again(training=True, dropout=True), streams).factors
    dropped = known.keys() - drawing.keys()
    first = next((b.path for b in facts.blocks if b.path in dropped and known[b.path]), None)
    if first is not None:
        say = f"in training its stream is not passed on as it is ({len(dropped)} of {len(known)} blocks)"
        yield fail(first, say, "drop entries of the branch, not of the sum")
        return
    for blocks in facts.stacks.values():
        here = {b.path: known[b.path] for b in blocks if b.path in known}
        odd = odd_one(here)
        at_an_end = odd is not None and odd.key in (blocks[0].path, blocks[-1].path)
        if odd is not None and not (at_an_end and odd.value in (0.0, 1.0)):
            say = f"passes on {odd.value:g} times its input, the other blocks {odd.rest:g} times"
            yield fail(odd.key, say, "x = x + branch(norm(x)) in every block")
            return
        factors = {*here.values()}
        if len(here) > 1 and len(factors) == 1 and not factors <= {0.0, 1.0}:
            path, factor = next(iter(here.items()))
            say = f"each of {len(here)} blocks passes on {factor:g} times its input"
            yield fail(path, say, "add the stream once") if factor.is_integer() else note(path, say)
            if factor.is_integer():
                return


@property_of("structure", explains=["overfit", "siblings", "state_dict"], passes=4)
def attention_scale(step: Step) -> Answers:
    """Scores are divided by the root of the head's width, and a softmax runs over the keys.

    The constant on the product of queries and keys is read off the autograd graph, wherever it is multiplied
    in. The width itself will do (muP), and any constant where queries are normed, a parameter scales the
    scores, or the matrix of the queries is drawn that much smaller (T5).
    """
    read = step.wiring
    if read.over_queries:
        yield fail(read.over_queries[0], "the softmax of the scores is not over the keys", "softmax(dim=-1)")
        return
    if not read.scores:
        raise Untestable("no product of queries and keys whose scale can be read goes into a softmax")
    for here in _alike(step, read.scores):
        odd = odd_one({m: round(s.factor * s.width**0.5, 5) for m, s in here.items()})
        if odd is not None and not _as_drawn(step, one := here[odd.key]):
            rest = odd.rest / one.width**0.5
            say = f"scores are scaled by {one.factor:.4g}, in the other layers by {rest:.4g}"
            yield fail(one.module, say, "scale the scores alike in all layers")
            return
    one = next((s for s in read.scores if not _scaled_by_width(s)), None)
    if one is not None:
        width = f"heads are {one.width} wide, and 1/sqrt is {one.width**-0.5:.4g}"
        say = f"scores are scaled by {one.factor:.4g}; {width}"
        meant = not _by_another_size(step, one) or _as_drawn(step, one) or step.facts.trained
        advice = "divide by the root of the head's width"
        yield note(one.module, say) if meant else fail(one.module, say, advice)


def _alike(step: Step, scores: Sequence[Scores]) -> Iterator[dict[str, Scores]]:
    """Scores by their module, together where they have one place in their blocks."""
    calls: dict[str, list[Scores]] = defaultdict(list)
    for one in scores:
        calls[f"{one.module}."].append(one)
    for modules in siblings(step.facts.stacks, calls).values():
        for here in zip(*(calls[m] for m in modules), strict=False):
            yield dict(zip(modules, here, strict=True))


def _by_another_size(step: Step, one: Scores) -> bool:
    """Whether the constant is 1, or belongs to another size: of the stream, heads, tokens or rows."""
    shapes = [x.shape for pair in step.facts.streams.values() for x in pair if x is not None]
    width = shapes[0][-1] if shapes else one.width
    sizes = {1, width, width // one.width, *(n for shape in shapes[:1] for n in shape), one.width**-1}
    wanted = [size**power for size in sizes if size for power in (-0.5, -1.0)]
    return any(abs(one.factor - w) < 1e-3 * w for w in wanted)


def _scaled_by_width(s: Scores) -> bool:
    wanted, (ratio, error) = s.width**-0.5, s.drawn
    near = abs(s.factor - wanted) < 1e-3 * wanted or abs(s.factor * s.width - 1) < 1e-3
    return near or s.free or (error > 0 and abs(s.factor * ratio / wanted - 1) < 5 * error)


def _as_drawn(step: Step, one: Scores) -> bool:
    """Whether the library's own class scales these scores so."""
    trace = step.fresh.exact(step.plain)
    if trace is None:
        return False
    own = read_wiring(trace, [b.path for b in step.facts.blocks]).scores
    return any(s.module == one.module and abs(s.factor - one.factor) < 1e-3 * abs(one.factor) for s in own)


@property_of("structure", passes=4)
def nonlinear(step: Step) -> Answers:
    """Two maps in a row with nothing that bends between them are not wider inside than outside.

    Such a pair is one map of lower rank, and its inner width is wasted; a narrow one (LoRA, a factorized
    table) is meant.
    """
    chains = step.wiring.chains
    if chains:
        first, second, width = chains[0]
        more = f", and {len(chains) - 1} more pairs" if len(chains) > 1 else ""
        say = f"{second} reads the {width} features of {first} as they are{more}"
        yield fail(common([first, second]), say, "put an activation between the two maps")

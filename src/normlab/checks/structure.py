"""Properties of structure: the stream, norms, attention's scale, and maps that bend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from normlab.checks.property import FORWARD, Answers, fail, needs, note, property_of
from normlab.trace.facts import stacks
from normlab.trace.facts.stacks import gains, responses, scatters
from normlab.trace.facts.wiring import alike
from normlab.trace.starts import from_library
from normlab.trace.step_under_test import StepUnderTest

ADDED = "x = x + branch(norm(x)) for each branch"


@property_of(
    "structure", explains=["gradients", "derivative", "norms", "overfit", "siblings"], passes=10, uses=FORWARD
)
def residual(step: StepUnderTest) -> Answers:
    """Blocks run in order, each on the output of the one before, and scale the residual stream alike."""
    listed = [layers for layers in step.facts.listed.values() if layers]
    needs(step.facts.stacks or listed, "no numbered blocks pass a stream on")
    for name, blocks in step.facts.stacks.items():
        yield from _in_order(step, name, blocks)
        streams = step.wiring.streams
        yield from _passes_through(step, {b.path: streams[b.path] for b in blocks if b.path in streams})
    for layers in listed:
        yield from _passes_through(step, {path: (kept, True) for path, kept in layers.items()})
    yield from _dropped(step)
    for blocks in step.facts.stacks.values():
        yield from _by_one_factor(blocks, step.scaled.factors)


def _in_order(step: StepUnderTest, name: str, blocks: Sequence[stacks.Block]) -> Answers:
    """A block that stands in several places runs once in each.

    The last ones of a frozen stack need not run: its features may be taken before them.
    """
    named = {b.path: b for b in blocks}
    calls = [call for call in step.facts.calls if call.path in named]
    ran = {id(named[call.path].module) for call in calls}
    classes = {type(named[call.path].module) for call in calls}
    idle = [b for b in blocks if id(b.module) not in ran and type(b.module) in classes]
    if idle:
        say = f"{len(idle)} of {len(blocks)} blocks never run"
        is_frozen = not any(p.requires_grad for b in blocks for p in b.module.parameters())
        if is_frozen and idle == list(blocks[len(blocks) - len(idle) :]):
            yield note(idle[0].path, f"{say}: features of a frozen stack are taken before its end")
        else:
            yield fail(idle[0].path, say, "run every block")
    planned = [id(b.module) for b in blocks if id(b.module) in ran]
    order = [id(named[call.path].module) for call in calls]
    if sorted(order) != sorted(planned):  # some run more often than they stand there, as in a loop
        return
    if order not in (planned, planned[::-1]):
        numbers = [named[call.path].index for call in calls]
        yield fail(name, f"blocks run in the order {numbers}", "run them in the order of their numbers")
    for before, after in pairwise(calls):
        if before.read is None or before.written is None or after.read is None:
            continue
        if torch.equal(before.read, before.written):
            continue
        if torch.equal(before.read, after.read) and not step.comparison.uses(before.path, before.number):
            say = f"reads what {before.path} read, whose output is lost"
            yield fail(after.path, say, "pass each output on")


def _passes_through(step: StepUnderTest, here: Mapping[str, tuple[bool, bool]]) -> Answers:
    """Each output holds its block's input, unless none does and none attends.

    ``here`` says, by block, whether its output holds its input unchanged, and whether it does so at all.
    """
    lost = [path for path, (kept, _) in here.items() if not kept]
    attending = any(stacks.within(m, p) for m in step.wiring.attending for p in here)
    if lost and (len(lost) < len(here) or attending):
        cut = "every way crosses a matrix product" if here[lost[0]][1] else "no gradient flows"
        yield fail(lost[0], f"{cut} from its output to its input ({len(lost)} of {len(here)} blocks)", ADDED)


def _dropped(step: StepUnderTest) -> Answers:
    known = step.scaled.factors
    if not known:
        return
    drawn = step.exact.again(training=True, dropout=True)
    dropped = known.keys() & stacks.scaled_streams(drawn, step.facts.entering).mixing
    first = next((b.path for b in step.facts.blocks if b.path in dropped and known[b.path]), None)
    if first is not None:
        say = f"in training it does not pass its stream on unchanged ({len(dropped)} of {len(known)} blocks)"
        yield fail(first, say, "drop entries of the branch, not of the sum")


def _by_one_factor(blocks: Sequence[stacks.Block], known: Mapping[str, float]) -> Answers:
    # without matrices it is a norm between two blocks, or behind the last one, in the same list
    mapping = [b for b in blocks if any(p.ndim > 1 for p in b.module.parameters())]
    here = {b.path: known[b.path] for b in mapping if b.path in known}
    odd, factors = stacks.odd_one(here), {*here.values()}
    at_an_end = odd is not None and odd.key in (mapping[0].path, mapping[-1].path)
    if odd is not None and not (at_an_end and odd.value in (0.0, 1.0)):
        yield fail(odd.key, f"passes on {odd.value:g} times its input, the others {odd.rest:g} times", ADDED)
    if len(here) > 1 and len(factors) == 1 and not factors <= {0.0, 1.0}:
        path, factor = next(iter(here.items()))
        say = f"each of {len(here)} blocks passes on {factor:g} times its input"
        yield fail(path, say, "add the stream once") if factor.is_integer() else note(path, say)


@property_of("structure", explains=["siblings", "start", "initial_loss", "overfit"], passes=4, uses=FORWARD)
def norms(step: StepUnderTest) -> Answers:
    """A norm brings each token's features to one size, whatever their scale, and one precedes the logits."""
    tried = responses(step.exact)
    for one in tried:
        if one.grows and one.mixes and one.has_vector and not one.leaks:
            say = f"its output changes by {one.grows:.1g} of its size when its input is ten times as large"
            yield fail(one.module, say, "divide by the root mean square, or the deviation, of the features")
        if one.leaks and not one.grows:
            yield fail(one.module, "what it makes of a token depends on others", "norm over features")
    normed = [one for one in tried if one.mixes and not one.grows]
    known = gains(step.unchanged, normed)
    if len(known) > 1 and all(map(scatters, known.values())):
        first, gain = next(iter(known.items()))
        say = f"its gains scatter around zero ({float(gain.mean()):.2g} ± {float(gain.std()):.2g})"
        more = f"{say}, as in {len(known) - 1} other norms"
        yield fail(first, more, "use 1 + w for a gain that is kept as an offset, or draw it as ones")
    needs(step.scaled.runs or normed, "no module is a norm, and no stack adds to a stream")
    yield from _before_the_head(step)


def _before_the_head(step: StepUnderTest) -> Answers:
    factors, _, runs = step.scaled
    last = next((path for path in reversed(step.facts.order) if path in factors), None)
    if last is None or factors[last] != 1.0:
        return
    streams = _streams_with(step, last)
    # other stacks have streams of their own, such as those of heads
    if len(streams) < len(step.facts.entering):
        runs = stacks.scaled_streams(step.exact, streams).runs
    declared, grow = step.declare.final_norm, stacks.grown(*map(step.comparison.logits, runs))
    if not grow and declared is False:
        say = "no final norm is declared, but the logits do not grow with its stream"
        yield fail(last, say, "declare what the model has")
    if not grow:
        return
    if declared is not None:
        meant = not declared
    elif not step.facts.is_scored:
        meant = True  # the size of what is regressed is a size of the data, and no confidence
    elif (own := step.fresh.exact(step.unchanged)) is not None:
        meant = stacks.grown(*map(step.comparison.logits, stacks.scaled_streams(own, streams).runs))
    else:
        meant = from_library(step.model.get_submodule(last)) and not from_library(step.model)
    what = "logits grow" if step.facts.is_scored else "outputs grow"
    say = f"the {what} in proportion to the last block's stream: there is no norm between them"
    do = "norm the stream before the head, or declare final_norm=False"
    yield note(last, say) if meant else fail(last, say, do)


def _streams_with(step: StepUnderTest, path: str) -> dict[str, Tensor]:
    """Return what the blocks of the same stack read."""
    stack = next(blocks for blocks in step.facts.stacks.values() if any(b.path == path for b in blocks))
    return {b.path: step.facts.entering[b.path] for b in stack if b.path in step.facts.entering}


@property_of("structure", explains=["overfit", "siblings", "state_dict"], passes=5, uses=FORWARD)
def attention_scale(step: StepUnderTest) -> Answers:
    """Attention scores are divided by the root of the head's width; the softmax runs over the keys."""
    read = step.wiring
    if read.over_queries:
        yield fail(read.over_queries[0], "the softmax of the scores is not over the keys", "softmax(dim=-1)")
    needs(read.scores, "no product of queries and keys whose scale can be read goes into a softmax")
    for here in alike(step.facts.stacks, read.scores):
        odd = stacks.odd_one({m: round(s.factor * s.width**0.5, 5) for m, s in here.items()})
        if odd is not None and not step.scales_by_class(alone := here[odd.key]):
            rest = odd.rest / alone.width**0.5
            say = f"scores are scaled by {alone.factor:.4g}, in the other layers by {rest:.4g}"
            yield fail(alone.module, say, "scale the scores alike in all layers")
    one = next((s for s in read.scores if not s.is_by_width), None)
    if one is not None:
        stream = next(iter(step.facts.entering.values()), torch.ones(one.width)).shape
        say = f"scores are scaled by {one.factor:.4g}, but heads of {one.width} need {one.width**-0.5:.4g}"
        module = step.model.get_submodule(one.module)
        held = [n for n, b in module.named_buffers() if b.numel() and bool((b == one.factor).all())]
        if held:
            say += f"; its buffer {held[0]} is {one.factor:.4g}"
        meant = not one.is_by_another(stream) or step.scales_by_class(one) or step.facts.trained
        yield note(one.module, say) if meant else fail(one.module, say, "divide by the root of that width")


@property_of("structure", passes=1, uses=FORWARD)
def nonlinear(step: StepUnderTest) -> Answers:
    """Two linear maps without a nonlinearity between them are not wider inside than outside."""
    for first, second, width in step.wiring.chains[:1]:
        say = f"{second} reads the {width} features of {first} as they are (1 of {len(step.wiring.chains)})"
        yield fail(stacks.common([first, second]), say, "put an activation between the two maps")

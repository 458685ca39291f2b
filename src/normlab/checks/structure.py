"""Test how a model is built: its residual stream, norms, the scale of attention, and maps in a row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from normlab.checks.property import FORWARD, Answers, fail, needs, note, property_of
from normlab.trace.facts import stacks
from normlab.trace.facts.stacks import Response, gains, responses, scatters
from normlab.trace.facts.wiring import alike
from normlab.trace.starts import from_library
from normlab.trace.step_under_test import StepUnderTest

ADDED = "x = x + branch(norm(x)) for each branch"


@property_of(
    "structure", explains=["gradients", "derivative", "norms", "overfit", "siblings"], passes=10, uses=FORWARD
)
def residual(step: StepUnderTest) -> Answers:
    """Blocks run in order, each on the output of the one before, and scale the residual stream alike.

    x[l + 1] = a·x[l] + branch(x[l]), with one a for all blocks: 1 where a branch is added, 0 where a norm
    follows the sum. The factor is read off what a much larger x changes.
    """
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
    """Every block of a stack runs, in the order of their numbers, and reads what the one before wrote."""
    by_path = {block.path: block for block in blocks}
    calls = [call for call in step.facts.calls if call.path in by_path]
    ran = {id(by_path[call.path].module) for call in calls}
    classes = {type(by_path[call.path].module) for call in calls}
    yield from _idle(blocks, ran, classes)
    # a block that stands in several places runs once in each
    planned = [id(block.module) for block in blocks if id(block.module) in ran]
    order = [id(by_path[call.path].module) for call in calls]
    if sorted(order) != sorted(planned):  # some run more often than they stand there, as in a loop
        return
    if order not in (planned, planned[::-1]):
        numbers = [by_path[call.path].index for call in calls]
        evidence = f"blocks run in the order {numbers}"
        yield fail(name, evidence, "run them in the order of their numbers")
    for before, after in pairwise(calls):
        if before.read is None or before.written is None or after.read is None:
            continue
        if torch.equal(before.read, before.written):  # it leaves its stream as it is
            continue
        if torch.equal(before.read, after.read) and not step.comparison.uses(before.path, before.number):
            evidence = f"reads what {before.path} read, whose output is lost"
            yield fail(after.path, evidence, "pass each output on")


def _idle(blocks: Sequence[stacks.Block], ran: Collection[int], classes: Collection[type]) -> Answers:
    """Blocks that never run, although others of their class do.

    The last ones of a frozen stack need not run: its features may be taken before them.
    """
    idle = [block for block in blocks if id(block.module) not in ran and type(block.module) in classes]
    if not idle:
        return
    evidence = f"{len(idle)} of {len(blocks)} blocks never run"
    is_frozen = not any(p.requires_grad for block in blocks for p in block.module.parameters())
    are_last = idle == list(blocks[len(blocks) - len(idle) :])
    if is_frozen and are_last:
        yield note(idle[0].path, f"{evidence}: features of a frozen stack are taken before its end")
    else:
        yield fail(idle[0].path, evidence, "run every block")


def _passes_through(step: StepUnderTest, streams: Mapping[str, tuple[bool, bool]]) -> Answers:
    """Each output holds its block's input, unless none does and none attends.

    ``streams`` says, by block, whether its output holds its input unchanged, and whether it does so at all.
    """
    lost = [path for path, (kept, _) in streams.items() if not kept]
    attending = any(stacks.within(module, path) for module in step.wiring.attending for path in streams)
    # a stack without any stream may be a plain network, unless it is one of attention
    if lost and (len(lost) < len(streams) or attending):
        _, any_way = streams[lost[0]]
        cut = "every way crosses a matrix product" if any_way else "no gradient flows"
        evidence = f"{cut} from its output to its input ({len(lost)} of {len(streams)} blocks)"
        yield fail(lost[0], evidence, ADDED)


def _dropped(step: StepUnderTest) -> Answers:
    """Dropout acts on branches: on the sum, it would drop entries of the stream once more in each block."""
    factors = step.scaled.factors
    if not factors:
        return
    drawn = step.exact.again(training=True, dropout=True)
    dropped = factors.keys() & stacks.scaled_streams(drawn, step.facts.entering).mixing
    adding = (block.path for block in step.facts.blocks if block.path in dropped and factors[block.path])
    first = next(adding, None)
    if first is not None:
        share = f"{len(dropped)} of {len(factors)} blocks"
        evidence = f"in training it does not pass its stream on unchanged ({share})"
        yield fail(first, evidence, "drop entries of the branch, not of the sum")


def _by_one_factor(blocks: Sequence[stacks.Block], factors: Mapping[str, float]) -> Answers:
    """All blocks of a stack pass their stream on times the same factor."""
    # without matrices it is a norm between two blocks, or behind the last one, in the same list
    mapping = [block for block in blocks if any(p.ndim > 1 for p in block.module.parameters())]
    by_block = {block.path: factors[block.path] for block in mapping if block.path in factors}
    odd = stacks.odd_one(by_block)
    # the first and the last one may begin or end the stream, without or with a norm
    at_an_end = odd is not None and odd.key in (mapping[0].path, mapping[-1].path)
    if odd is not None and not (at_an_end and odd.value in (0.0, 1.0)):
        evidence = f"passes on {odd.value:g} times its input, the others {odd.rest:g} times"
        yield fail(odd.key, evidence, ADDED)
    different = {*by_block.values()}
    if len(by_block) > 1 and len(different) == 1 and not different <= {0.0, 1.0}:
        path, factor = next(iter(by_block.items()))
        evidence = f"each of {len(by_block)} blocks passes on {factor:g} times its input"
        # a whole number is a stream that is added twice; another factor was chosen
        if factor.is_integer():
            yield fail(path, evidence, "add the stream once")
        else:
            yield note(path, evidence)


@property_of("structure", explains=["siblings", "start", "initial_loss", "overfit"], passes=4, uses=FORWARD)
def norms(step: StepUnderTest) -> Answers:
    """A norm brings each token's features to one size, whatever their scale, and one precedes the logits.

    norm(c·x) = norm(x) for each token, and logits(c·x) = logits(x) for the stream x of the last block.
    """
    tried = responses(step.exact)
    for response in tried:
        if response.grows and response.mixes and response.has_vector and not response.leaks:
            change = f"{response.grows:.1g} of its size when its input is ten times as large"
            advice = "divide by the root mean square, or the deviation, of the features"
            yield fail(response.module, f"its output changes by {change}", advice)
        if response.leaks and not response.grows:
            evidence = "what it makes of a token depends on others"
            yield fail(response.module, evidence, "norm over features")
    normed = [response for response in tried if response.mixes and not response.grows]
    yield from _scattering_gains(step, normed)
    needs(step.scaled.runs or normed, "no module is a norm, and no stack adds to a stream")
    yield from _before_the_head(step)


def _scattering_gains(step: StepUnderTest, normed: Sequence[Response]) -> Answers:
    """Gains of all norms that scatter around zero, as offsets from 1 do that are multiplied as they are."""
    gains_by_norm = gains(step.unchanged, normed)
    if len(gains_by_norm) > 1 and all(map(scatters, gains_by_norm.values())):
        first, gain = next(iter(gains_by_norm.items()))
        evidence = f"its gains scatter around zero ({float(gain.mean()):.2g} ± {float(gain.std()):.2g})"
        evidence += f", as in {len(gains_by_norm) - 1} other norms"
        yield fail(first, evidence, "use 1 + w for a gain that is kept as an offset, or draw it as ones")


def _before_the_head(step: StepUnderTest) -> Answers:
    """Logits do not grow with the last block's stream, if blocks add to it: then a norm is between them.

    Each block adds to the stream, so that logits without a norm grow with the depth (Xiong et al. 2020,
    Section 3, arXiv 2002.04745: Pre-LN has a final norm).
    """
    factors, _, runs = step.scaled
    last = next((path for path in reversed(step.facts.order) if path in factors), None)
    if last is None or factors[last] != 1.0:
        return
    streams = _streams_with(step, last)
    # other stacks have streams of their own, such as those of heads
    if len(streams) < len(step.facts.entering):
        runs = stacks.scaled_streams(step.exact, streams).runs
    logits_grow = stacks.grown(*map(step.comparison.logits, runs))
    if not logits_grow:
        if step.declare.final_norm is False:
            evidence = "no final norm is declared, but the logits do not grow with its stream"
            yield fail(last, evidence, "declare what the model has")
        return
    what = "logits grow" if step.facts.is_scored else "outputs grow"
    evidence = f"the {what} in proportion to the last block's stream: there is no norm between them"
    if _is_meant_to_grow(step, last, streams):
        yield note(last, evidence)
    else:
        yield fail(last, evidence, "norm the stream before the head, or declare final_norm=False")


def _is_meant_to_grow(step: StepUnderTest, last: str, streams: Mapping[str, Tensor]) -> bool:
    """Return whether the model is meant to have no final norm, by the first of these that can be asked: what
    is declared, what is predicted, what the model's own class does, and who wrote the last block.
    """
    declared = step.declare.final_norm
    if declared is not None:
        return not declared
    if not step.facts.is_scored:
        return True  # the size of what is regressed is a size of the data, and no confidence
    of_class = step.fresh.exact(step.unchanged)
    if of_class is not None:
        runs = stacks.scaled_streams(of_class, streams).runs
        return stacks.grown(*map(step.comparison.logits, runs))
    # a library's blocks in a model of the user's: libraries leave the final norm to whoever stacks them
    return from_library(step.model.get_submodule(last)) and not from_library(step.model)


def _streams_with(step: StepUnderTest, path: str) -> dict[str, Tensor]:
    """Return what the blocks of the same stack read."""
    stack = next(blocks for blocks in step.facts.stacks.values() if any(b.path == path for b in blocks))
    return {b.path: step.facts.entering[b.path] for b in stack if b.path in step.facts.entering}


@property_of("structure", explains=["overfit", "siblings", "state_dict"], passes=5, uses=FORWARD)
def attention_scale(step: StepUnderTest) -> Answers:
    """Attention scores are divided by the root of the head's width; the softmax runs over the keys.

    q·k of two independent vectors of d entries has the variance d, so that q·k / √d has that of one entry
    (Vaswani et al. 2017, Section 3.2.1, arXiv 1706.03762).
    """
    wiring = step.wiring
    if wiring.over_queries:
        evidence = "the softmax of the scores is not over the keys"
        yield fail(wiring.over_queries[0], evidence, "softmax(dim=-1)")
    needs(wiring.scores, "no product of queries and keys whose scale can be read goes into a softmax")
    yield from _one_scale(step)
    other = next((score for score in wiring.scores if not score.is_by_width), None)
    if other is None:
        return
    needed = f"heads of {other.width} need {other.width**-0.5:.4g}"
    evidence = f"scores are scaled by {other.factor:.4g}, but {needed}"
    module = step.model.get_submodule(other.module)
    holding = [name for name, b in module.named_buffers() if b.numel() and bool((b == other.factor).all())]
    if holding:
        evidence += f"; its buffer {holding[0]} is {other.factor:.4g}"
    stream = next(iter(step.facts.entering.values()), torch.ones(other.width)).shape
    # a slip is a width that is not the head's, such as that of the stream; another constant was chosen
    is_meant = not other.is_by_another(stream) or step.scales_by_class(other) or step.facts.trained
    if is_meant:
        yield note(other.module, evidence)
    else:
        yield fail(other.module, evidence, "divide by the root of that width")


def _one_scale(step: StepUnderTest) -> Answers:
    """One layer whose scores are scaled in another way than those of all others."""
    for scores in alike(step.facts.stacks, step.wiring.scores):
        # times the root of the width, since layers may have heads of different widths
        relative = {module: round(s.factor * s.width**0.5, 5) for module, s in scores.items()}
        odd = stacks.odd_one(relative)
        if odd is None or step.scales_by_class(scores[odd.key]):
            continue
        score = scores[odd.key]
        usual = odd.rest / score.width**0.5
        evidence = f"scores are scaled by {score.factor:.4g}, in the other layers by {usual:.4g}"
        yield fail(score.module, evidence, "scale the scores alike in all layers")


@property_of("structure", passes=1, uses=FORWARD)
def nonlinear(step: StepUnderTest) -> Answers:
    """Two linear maps without a nonlinearity between them are not wider inside than outside.

    W₂ W₁ is one map, whose rank is at most the smaller of its two outer widths: what is wider inside is
    wasted. What is narrower inside, as an adapter, is a factorisation.
    """
    for first, second, width in step.wiring.chains[:1]:
        share = f"1 of {len(step.wiring.chains)}"
        evidence = f"{second} reads the {width} features of {first} as they are ({share})"
        yield fail(stacks.common([first, second]), evidence, "put an activation between the two maps")

"""Properties of the loss: what it asks for, where and with what weight, and its gradient in every part."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from math import isclose

import torch
from torch import Tensor

from normlab.base.units import told_apart
from normlab.checks.property import Answers, fail, needs, note, property_of
from normlab.errors import UserError
from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.stacks import block_of, siblings
from normlab.trace.facts.targets import CLOSE, bypassed, cut_off, over_one
from normlab.trace.facts.wiring import MULTIPLIED
from normlab.trace.gradients import HARMLESS, Along, Found, asleep, hole, lost_results, silent_parameters
from normlab.trace.optimizers import factors
from normlab.trace.step_under_test import StepUnderTest

SHIFTS = {0: "the loss asks to copy", 2: "they are shifted twice", -1: "they are shifted the wrong way"}


@property_of("loss", explains=["counted", "explained", "initial_loss", "reach", "overfit"], passes=3)
def targets(step: StepUnderTest) -> Answers:
    """Each target is the token right after the last one that its prediction sees, or its row's label."""
    facts, asked = step.facts, step.facts.targets
    shift = facts.shift if asked.ids.ndim == 2 else None
    if shift is None:
        yield from _elsewhere(step)
        return
    entry = facts.tokens.entry
    whole = facts.tokens.column >= 0 and entry.shape[1] == asked.ids.shape[1] > 2
    if shift == 1 and whole and (asked.counted[:, -1] & (asked.ids[:, -1] == entry[:, 0])).all():
        say = "the target at the last position is its row's first token: labels are rolled, not shifted"
        yield fail("loss", say, "ignore the last position, or take one token more")
    elif shift < 0 or (shift != 1 and step.sees(max(shift - 1, 0)) is (shift == 0)):
        share, why = facts.shift_rates[shift], SHIFTS.get(shift, "they are too far ahead")
        say = f"{share:.0%} of {int(asked.counted.sum())} targets are the token at distance {shift:+d}: {why}"
        yield fail("loss", say, "shift exactly once: the prediction at t is for the token at t + 1")


def _elsewhere(step: StepUnderTest) -> Answers:
    """If the targets are not tokens at one distance, they may be classes of the same rows in the batch."""
    facts, ids, counted = step.facts, step.facts.targets.ids, step.facts.targets.counted
    if ids.ndim == 2 and 2 * facts.shift_rates[0] > 1 and step.sees(0):
        say = f"{facts.shift_rates[0]:.0%} of them are the input at their own place, which the model sees"
        yield fail("loss", say, "count only what the input hides, or shift the labels by one")
    for ahead in (1, 0, 2) if ids.ndim == 2 else ():
        best, row = facts.targets.by_row(facts.tokens.entry, ahead + facts.offset).max(1)
        if (best > 0.9).all() and (row != torch.arange(len(row))).any():
            yield fail("loss", "the targets are tokens of other rows", "keep rows and labels together")
    whole = {p: x.cpu().long() for p, x in facts.entries.items() if not x.is_floating_point()}
    held = {p: x for p, x in whole.items() if x.shape == ids.shape}
    if any((x == ids)[counted].all() for x in held.values()):
        return
    for place, x in held.items():
        if counted.all() and x.sort(0).values.equal(ids.sort(0).values):
            agree = f"{int((x == ids).sum())} of {ids.numel()} are those of their own row"
            say = f"it asks for the classes of {'.'.join(map(str, place))} in another order: {agree}"
            yield fail("loss", say, "pass the labels of the same rows")
    raise Unknown("the targets are neither tokens of the batch nor labels that it holds")


@property_of("loss", explains=["initial_loss", "overfit"], passes=1)
def counted(step: StepUnderTest) -> Answers:
    """The loss leaves out padding, but counts the token that ends a text."""
    facts, asked, shift = step.facts, step.facts.targets, step.facts.shift or 0
    entry, ahead = facts.tokens.entry, shift + facts.offset
    ends = {facts.declared.eos_id, facts.configured("eos_token_id")} - {None}
    pad, real = None, torch.ones_like(entry, dtype=torch.bool)
    try:
        pad, held = facts.padding.pad_id, facts.padding.real
    except Unknown as reason:
        if not ends:
            raise Unknown(f"{reason}; declare eos_id for the end of a text") from reason
    else:
        real = real if pad is None or pad in ends else entry != pad
        real[:, facts.tokens.columns] = held
    padding = asked.ahead(~real, ahead)
    if pad in ends:  # the first padding token may mark the end
        padding &= ~asked.ahead(real, ahead - 1)
    elif pad is not None and shift:
        padding = asked.ids == pad  # the end of a text may be the target of an input that is already padding
    if bad := int((asked.counted & padding).sum()):
        say = f"{bad} of {int(asked.counted.sum())} counted targets are padding"
        yield fail("loss", say, "ignore the labels under padding (-100)")
    is_end = torch.isin(entry, torch.tensor(list(ends), dtype=entry.dtype))
    end = asked.ahead(is_end & (real | (pad in ends)), ahead)
    if shift and end.any() and not (end & asked.counted).any():
        say = f"a text ends at {int(end.sum())} places, but no counted target is that end"
        yield fail("loss", say, "count the label of the first end token, even if that is the padding's id")
    if shift and (left := int((asked.ahead(real, ahead) & ~asked.counted).sum())):
        yield note("loss", f"{left} targets that are not padding are not counted")


@property_of("loss", explains=["overfit"], passes=6)
def reduction(step: StepUnderTest) -> Answers:
    """The loss is a mean over the counted targets: their weights add up to the same for any set of rows."""
    asked, part = step.facts.targets, step.half
    weight, places = asked.weight[asked.counted], asked.ids.numel()
    count, total = len(weight), float(weight.sum())
    least, most = float(weight.min()), float(weight.max())
    if not isclose(least, most, rel_tol=asked.rounding):
        yield note("loss", "counted positions weigh from {} to {}".format(*told_apart(least, most)))
    if part is None:
        raise Unknown("the batch has one row, or rows cannot be left out")
    ratio, share = float(part.weight.sum()) / total, int(part.counted.sum()) / count
    over_all = f"it is divided by all {places} positions, of which {count} are counted"
    near = partial(isclose, rel_tol=max(asked.rounding, part.rounding))
    if near(ratio, 1):
        if count < places and near(total, count / places):
            yield note("loss", over_all)
    elif len(factors(step)) > 1:
        say = f"each of {count} positions weighs {total / count:.3g} in any batch: a sum, which grows with it"
        divided, advice = step.setup.step is not None, "take the mean over the counted positions"
        yield note("loss", say) if divided else fail("loss", say, advice)
    elif near(ratio, share * places / part.ids.numel()):
        yield fail("loss", over_all, "divide by the number of counted positions")
    else:
        yield note("loss", f"its weights add up to {total:.4g}, of half the rows to {ratio:.4g} of that")


@property_of("loss", explains=["initial_loss", "overfit"], passes=8)
def explained(step: StepUnderTest) -> Answers:
    """The loss is the cross-entropy of the logits, and any further term has a gradient of its own."""
    if (size := over_one(step.exact)) is not None:
        say = f"nll_loss is given numbers whose exponentials add up to {size:.3g}: not log-probabilities"
        yield fail("loss", say, "use cross_entropy, or log_softmax before it")
    z, rest, size = step.facts.logits.value, step.facts.unexplained, abs(float(step.exact.loss))
    if cut := cut_off(step.exact, z):
        say = f"{cut.size:.0%} of the logits do not move with the product that makes them"
        yield fail(cut.module, say, "put nothing but a scale, a bias or a smooth cap after the head")
    if (z >= 0).all() and distance(z.sum(-1), torch.ones_like(z[..., 0])) <= step.rounding:
        say = "the logits are probabilities: softmax is applied twice, and no prediction can be certain"
        yield fail("loss", say, "pass the logits, not their softmax, to the loss")
    if abs(rest) <= max(step.facts.targets.rounding, step.rounding) * size:
        return
    say = f"{rest:+.4g} of {size:.5g} is not the cross-entropy of the logits"
    if step.facts.targets.excess > CLOSE or bypassed(step.exact) or not step.is_exact:
        yield note("loss", f"{say}, and has a gradient of its own")
        return
    live = [(n, p.detach()) for n, p in step.exact.model.named_parameters() if p.is_floating_point()]
    weights = {n: p + 1e-3 * p.roll(1) for n, p in live}
    other, own = Facts(step.exact.again(weights=weights), step.declare), step.facts.targets.weight
    if isclose(other.unexplained, rest, rel_tol=CLOSE):
        yield note("loss", f"{say}, but a constant")
    elif not torch.allclose(other.targets.weight, own, rtol=CLOSE, atol=0):
        yield note("loss", f"{say}, but a function of it: its weights move with the predictions")
    else:
        advice = "add the term itself, not its value (item(), detach())"
        yield fail("loss", f"{say}, moves with the weights and has no gradient", advice)


@property_of("gradients", explains=["step", "overfit", "repeats"], passes=16)
def derivative(step: StepUnderTest) -> Answers:
    """The gradient is the derivative of the loss."""
    along = Along(step.exact if step.moving else step.training, step.declare.is_frozen)
    needs(step.is_exact, step.why_inexact)
    needs(along.gradients, "no parameter gets a gradient")
    why = "the loss has a kink or a jump here at every step size, so it has no derivative"
    needs(along.all.error <= 1e-3 * along.all.expected, why)
    if along.attached:
        yield note("", f"{len(along.attached)} numbers get a gradient but are not part of the loss")
    if not along.all.disagrees:
        return
    place = along.first_wrong(step.facts.order)
    moved = along.compare([place])
    if abs(moved.measured) <= 10 * moved.error:
        yield note(place, "it gets a gradient, but the loss does not move with it: a surrogate gradient")
    else:
        say = f"the loss moves by {moved.measured:.4g} along it where its gradient has {moved.expected:.4g}"
        advice = "look for a detach(), a no_grad() or a backward of yours between it and the loss; or declare"
        yield fail(place, say, f"{advice} frozen= the parameters that it cuts off on purpose")


@property_of("gradients", explains=["derivative", "step", "overfit", "repeats", "update"], passes=8)
def gradients(step: StepUnderTest) -> Answers:
    """Every trainable parameter, and every row and column of it, gets a gradient in a training step."""
    try:
        found, why = silent_parameters(step)
    except UserError as error:
        yield fail("loss", str(error), "keep the graph from the parameters to the loss")
        return
    for harmless in HARMLESS:
        if names := [n for n in why if why[n] == harmless]:
            yield note(names[0], f"{len(names)} parameters get no gradient, {harmless}")
    if bad := [n for n in why if why[n] not in HARMLESS]:
        say = f"{len(bad)} of {len(found)} parameters get no gradient in training, up to {bad[-1]}"
        advice = "look for detach(), no_grad(), re-entrant checkpoints, a factor of 0; freeze what is spare"
        yield fail(bad[0], f"{say}: {why[bad[0]]}", advice)
    yield from chain(_asleep(step, why), _lost(step), _parts(step, found))


def _asleep(step: StepUnderTest, why: Mapping[str, str]) -> Answers:
    """Parameters that start at zero, as does what multiplies them: neither ever wakes the other."""
    zero = [n for n, p in step.model.named_parameters() if p.requires_grad and p.numel() and not p.any()]
    if all(step.facts.roles.get(n) == "bias" for n in zero):
        return
    idle = [n for n, reason in why.items() if reason != HARMLESS[0]]
    if dead := asleep(step.plain.again(training=not step.draws, dropout=False), idle):
        say = f"it starts at 0, and so does what multiplies it: {len(dead)} parameters never learn"
        yield fail(next((n for n in zero if n in dead), dead[0]), say, "draw one of the two at random")


def _lost(step: StepUnderTest) -> Answers:
    """What is computed with a graph, for the loss, but is not part of it."""
    (lost, kept), say = lost_results(step.training), "has a graph but is not part of the loss"
    for place in lost[:1]:
        yield fail(place, f"no result of an autograd function that {say}", "pass its result on")
    yield from (note(place, f"a number that it keeps {say}") for place in kept[:1])


def _parts(step: StepUnderTest, found: Found) -> Answers:
    """Rows or columns of matrices, in whole heads, that get no gradient, not even from other tokens."""
    facts = step.facts
    lengths = {n for pair in facts.streams.values() for x in pair if x is not None for n in x.shape[:-1]}
    calls, own = step.exact.functions(*MULTIPLIED), dict(step.exact.model.named_parameters())
    whole = {id(a._base if a._is_view() else a) for c in calls for a in c.args if isinstance(a, Tensor)}
    with suppress(Unknown):  # a table of positions may be longer, and is read from either end
        lengths.add(facts.tokens.ids.shape[1])
        lengths.add(int(facts.padding.real.any(0).nonzero().max()) + 1)
    matrices = {n: g for n, g in found.items() if g is not None and facts.roles.get(n) == "hidden"}
    holes = [(n, axis, hole(g, axis)) for n, g in matrices.items() if g.ndim == 2 for axis in (0, 1)]
    bad = [
        (n, a, one) for n, a, one in holes if one and (id(own[n]) in whole or lengths.isdisjoint(one[::2]))
    ]
    if not bad:
        return
    everywhere = torch.ones_like(facts.tokens.ids, dtype=torch.bool)
    other = step.training.again(batch=facts.other_tokens(everywhere)).gradients
    for name, axis, (start, end, _) in bad:
        g, what = other[name], f"{'columns' if axis else 'rows'} {start} to {end - 1}"
        if g is not None and hole(g, axis) is None:
            yield note(name, f"{what} get no gradient from this batch")
        else:
            yield fail(name, f"{what} get no gradient, but others do", "a head or a part of it is not used")


@property_of("gradients", explains=["siblings"], passes=1)
def frozen(step: StepUnderTest) -> Answers:
    """No parameter between trained parts is frozen, unless it is declared."""
    facts, own = step.facts, dict(step.exact.model.named_parameters())
    held = [n for n, p in own.items() if not p.requires_grad]
    bad = [n for n in held if not step.declare.is_frozen(n)]
    for names in siblings(facts.stacks, own).values():
        trained = [i for i, n in enumerate(names) if own[n].requires_grad]
        between = [n for i, n in enumerate(names) if n in bad and trained and i > trained[0]]
        if between:
            say = f"frozen, while {len(trained)} of its {len(names) - 1} siblings train, some before it"
            yield fail(between[0], say, "set requires_grad, or declare it frozen")
    read = [(f.argument(0, "input").cpu(), f.argument(1, "weight")) for f in facts.lookups]
    tables = {id(w) for ids, w in read if any(torch.equal(ids.long(), t.ids) for t in facts.sources)}
    ends = [n for n in bad if id(own[n]) in tables or facts.roles.get(n) == "head"]
    blocks = [p.requires_grad for n, p in own.items() if block_of(facts.stacks, n)]
    with suppress(Unknown):
        if ends and all(blocks) and not facts.trained:
            yield fail(ends[0], "frozen as drawn while every block trains", "train it, or declare it frozen")
    if held:
        yield note(held[0], f"{len(held)} of {len(own)} parameters are frozen")

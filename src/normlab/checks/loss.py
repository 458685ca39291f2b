"""Properties of the loss: what it asks for, where, with what weight, and what it holds besides."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from math import isclose

import torch

from normlab.base.units import told_apart
from normlab.checks.property import Answers, fail, note, property_of
from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.targets import CLOSE, Targets, bypassed, cut_off, over_one
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


@property_of("loss", explains=["overfit"], passes=8)
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
        return
    each, rows = total / count, len(asked.ids)
    if len(factors(step)) > 1:
        say = f"each of {count} positions weighs {each:.3g} in any batch: a sum, which grows with it"
        divided, advice = step.setup.step is not None, "take the mean over the counted positions"
        yield note("loss", say) if divided else fail("loss", say, advice)
        return
    by_places = None
    if near(ratio, share * places / part.ids.numel()):  # or by rows, which are as many times fewer
        by_places = _falls_with_length(step)
        if by_places is None and near(each, 1 / places):
            by_places = True
    if by_places:
        yield fail("loss", over_all, "divide by the number of counted positions")
    elif by_places is False:
        say = f"each of {count} counted positions weighs {each:.3g}, {each * rows:.3g} over the {rows} rows"
        yield note("loss", f"{say}: the loss sums over a row's positions, and grows with its length")
    else:
        yield note("loss", f"its weights add up to {total:.4g}, of half the rows to {ratio:.4g} of that")


def _falls_with_length(step: StepUnderTest) -> bool | None:
    """Whether one more column of padding makes the weights smaller, in proportion to the number of positions,
    or leaves them as they are; None if there is no padding, or it does something else.
    """
    facts, seen = step.facts, list[Targets]()
    with suppress(Exception):  # a model may accept one width alone
        more = facts.padding.arranged()["more"]
        for arranged in (more._replace(columns=None), more):
            batch = facts.rearranged(arranged, facts.tokens)
            seen.append(Facts(step.exact.again(batch=batch), step.declare).targets)
    if len(seen) < 2 or seen[0].ids.numel() == seen[1].ids.numel():
        return None
    before, after = (float(asked.weight.sum()) for asked in seen)
    if isclose(after / before, seen[0].ids.numel() / seen[1].ids.numel(), rel_tol=CLOSE):
        return True
    return False if isclose(after, before, rel_tol=CLOSE) else None


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
    live = {n: p for n, p in step.exact.parameters.items() if p.is_floating_point()}
    weights = {n: p + 1e-3 * p.roll(1) for n, p in live.items()}
    other, own = Facts(step.exact.again(weights=weights), step.declare), step.facts.targets.weight
    if isclose(other.unexplained, rest, rel_tol=CLOSE):
        yield note("loss", f"{say}, but a constant")
    elif not torch.allclose(other.targets.weight, own, rtol=CLOSE, atol=0):
        yield note("loss", f"{say}, but a function of it: its weights move with the predictions")
    else:
        advice = "add the term itself, not its value (item(), detach())"
        yield fail("loss", f"{say}, moves with the weights and has no gradient", advice)

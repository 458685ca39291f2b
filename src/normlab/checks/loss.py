"""Properties of the loss: what it asks for, where, with which weight, and that it is made of that."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from math import isclose

import torch

from normlab.checks.property import Answers, Untestable, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.compare import distance, part_of
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.targets import Targets

CLOSE = 1e-6
"""Relative difference of sums of weights, which are read off gradients in float64."""
SHIFTS = {0: "the loss asks to copy", 2: "they are shifted twice", -1: "they are shifted the wrong way"}
_near = partial(isclose, rel_tol=CLOSE)


@property_of("loss", explains=["counted", "explained", "initial_loss", "reach", "overfit"], passes=3)
def targets(step: Step) -> Answers:
    """Each target is the token one ahead of the last one that its prediction sees, or its own row's label."""
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
    elif shift < 0 or (shift != 1 and _sees(step, max(shift - 1, 0)) is (shift == 0)):
        share, why = facts.shift_rates[shift], SHIFTS.get(shift, "they are too far ahead")
        say = f"{share:.0%} of {int(asked.counted.sum())} targets are the token at distance {shift:+d}: {why}"
        yield fail("loss", say, "shift exactly once: the prediction at t is for the token at t + 1")


def _sees(step: Step, distance: int) -> bool:
    """Whether a counted prediction depends on the token at this distance from its position."""
    facts, shape = step.facts, step.facts.tokens.ids.shape
    counted = facts.targets.counted.any(0).nonzero()[:, 0]
    place = int(counted[len(counted) // 2])
    if facts.targets.ids.shape[1] != shape[1] or not 0 <= place + distance < shape[1]:
        return distance <= 0
    here, there = ((torch.arange(shape[1]) == i).expand(shape) for i in (place, place + distance))
    changed = step.exact.again(batch=facts.other_tokens(there))
    return step.difference(step.exact, changed, part_of(here)) is not None


def _elsewhere(step: Step) -> Answers:
    """Targets that are not tokens at one distance may be classes that the batch holds, of the same rows."""
    facts, ids, counted = step.facts, step.facts.targets.ids, step.facts.targets.counted
    if ids.ndim == 2 and 2 * facts.shift_rates[0] > 1 and _sees(step, 0):
        say = f"{facts.shift_rates[0]:.0%} of them are the input at their own place, which the model sees"
        yield fail("loss", say, "count only what the input hides, or shift the labels by one")
    for ahead in (1, 0, 2) if ids.ndim == 2 else ():
        best, row = facts.targets.by_row(facts.tokens.entry, ahead + facts.offset).max(1)
        if (best > 0.9).all() and (row != torch.arange(len(row))).any():
            yield fail("loss", "the targets are the tokens of other rows", "keep rows and labels together")
    whole = {p: x.cpu().long() for p, x in facts.entries.items() if not x.is_floating_point()}
    held = {p: x for p, x in whole.items() if x.shape == ids.shape}
    if any((x == ids)[counted].all() for x in held.values()):
        return
    for place, x in held.items():
        if counted.all() and x.sort(0).values.equal(ids.sort(0).values):
            agree = f"{int((x == ids).sum())} of {ids.numel()} are those of their own row"
            say = f"it asks for the classes of {'.'.join(map(str, place))} in another order: {agree}"
            yield fail("loss", say, "hand over the labels of the same rows")
    raise Untestable("the targets are neither tokens of the batch nor labels that it holds")


@property_of("loss", explains=["initial_loss", "overfit"], passes=1)
def counted(step: Step) -> Answers:
    """Padding is not counted, and the end of a text is."""
    facts, asked, shift = step.facts, step.facts.targets, step.facts.shift or 0
    entry, ahead = facts.tokens.entry, shift + facts.offset
    ends = {facts.declared.eos_id, facts.configured("eos_token_id")} - {None}
    pad, real = None, torch.ones_like(entry, dtype=torch.bool)
    try:
        pad, held = facts.padding.pad_id, facts.padding.real
    except Unknown as reason:
        if not ends:
            raise Untestable(f"{reason}; declare eos_id for the end of a text") from reason
    else:
        real = real if pad is None or pad in ends else entry != pad
        real[:, facts.tokens.columns] = held
    padding = asked.ahead(~real, ahead)
    if pad in ends:  # the first of the padding may stand for the end
        padding &= ~asked.ahead(real, ahead - 1)
    elif pad is not None and shift:
        padding = asked.ids == pad  # the end of a text is asked where the input may be padding already
    if bad := int((asked.counted & padding).sum()):
        say = f"{bad} of {int(asked.counted.sum())} counted targets are padding"
        yield fail("loss", say, "ignore the labels under padding (-100)")
    is_end = torch.isin(entry, torch.tensor(list(ends), dtype=entry.dtype))
    end = asked.ahead(is_end & (real | (pad in ends)), ahead)
    if shift and end.any() and not (end & asked.counted).any():
        say = f"a text ends at {int(end.sum())} places, and no counted target is that end"
        yield fail("loss", say, "count the label of the first end token, also where it is the padding's id")
    if shift and (left := int((asked.ahead(real, ahead) & ~asked.counted).sum())):
        yield note("loss", f"{left} targets that are no padding are not counted")


@property_of("loss", explains=["overfit"], passes=6)
def reduction(step: Step) -> Answers:
    """The loss is a mean over what is counted: its weights add up to the same for any part of the rows."""
    asked, part = step.facts.targets, _half(step)
    weight, places = asked.weight[asked.counted], asked.ids.numel()
    count, total = len(weight), float(weight.sum())
    if not _near(weight.min(), weight.max()):
        yield note("loss", f"counted positions weigh from {weight.min():.3g} to {weight.max():.3g}")
    if part is None:
        raise Untestable("the batch has one row, or rows cannot be left out")
    ratio, share = float(part.weight.sum()) / total, int(part.counted.sum()) / count
    over_all = f"it is divided by all {places} positions, of which {count} are counted"
    if _near(ratio, 1):
        if count < places and _near(total, count / places):
            yield note("loss", over_all)
    elif _near(ratio, share):
        say = f"each of {count} positions weighs {total / count:.3g} in any batch: a sum, which grows with it"
        divided, advice = step.setup.step is not None, "take the mean over the counted positions"
        yield note("loss", say) if divided else fail("loss", say, advice)
    elif _near(ratio, share * places / part.ids.numel()):
        yield fail("loss", over_all, "divide by the number of counted positions")
    else:
        yield note("loss", f"its weights add up to {total:.4g}, of half the rows to {ratio:.4g} of that")


def _half(step: Step) -> Targets | None:
    """The targets of half of the rows, those of which the most is counted."""
    asked, rows = step.facts.targets, step.facts.rows
    if rows > 1 and len(asked.ids) == rows:
        order = asked.counted.reshape(rows, -1).sum(1).argsort(descending=True, stable=True)
        with suppress(Exception):  # the model may want a batch of its own size
            half = step.facts.with_rows(order[: rows // 2].sort().values)
            return Facts(step.exact.again(batch=half), step.declare).targets
    return None


@property_of("loss", explains=["initial_loss", "overfit"], passes=8)
def explained(step: Step) -> Answers:
    """The loss is the cross-entropy of its logits, and what it holds besides has a gradient of its own."""
    z, rest, size = step.facts.logits.value, step.facts.unexplained, abs(float(step.exact.loss))
    if (z >= 0).all() and distance(z.sum(-1), torch.ones_like(z[..., 0])) <= step.rounding:
        say = "the logits are probabilities, so that softmax is taken twice and no prediction can be sure"
        yield fail("loss", say, "hand the loss the logits before the softmax")
    if abs(rest) <= max(CLOSE, step.rounding) * size:
        return
    say = f"{rest:+.4g} of {size:.5g} is not the cross-entropy of the logits"
    if step.facts.targets.excess > CLOSE or _reaches(step) or not step.is_exact:
        yield note("loss", f"{say}, and has a gradient of its own")
        return
    own = step.exact.model.named_parameters()
    weights = {n: p.detach() + 1e-3 * p.detach().roll(1) for n, p in own if p.is_floating_point()}
    if _near(Facts(step.exact.again(weights=weights), step.declare).unexplained, rest):
        yield note("loss", f"{say}, but a constant")
    else:
        advice = "add the term itself, not its value (item(), detach())"
        yield fail("loss", f"{say}, moves with the weights and has no gradient", advice)


def _reaches(step: Step) -> bool:
    """Whether the loss has a gradient that does not pass through the logits that explain the rest."""
    own = [p for p in step.exact.model.parameters() if p.requires_grad]
    with step.exact.with_graph() as passed:
        taps = [t for t in passed.taps.values() if t.requires_grad]
        if passed.loss is None or not taps:
            return True
        found = torch.autograd.grad(passed.loss, [*own, *taps], retain_graph=True, allow_unused=True)
        through = torch.autograd.grad(taps, own, found[len(own) :], allow_unused=True)
    pairs = zip(found, through, strict=False)
    return any(a is not None and (b is None or distance(a, b) > CLOSE) for a, b in pairs)

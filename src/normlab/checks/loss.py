"""Properties of the loss: what it asks for, where, with which weight, and that it is made of that."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.compare import distance, part_of
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.targets import Targets

CLOSE = 1e-6
"""Relative difference of sums of weights, which are read off gradients in float64."""
SHIFTS = {0: "the loss asks to copy", 2: "they are shifted twice", -1: "they are shifted the wrong way"}


@property_of("loss", explains=["counted", "explained", "initial_loss", "reach", "overfit"], passes=3)
def targets(step: Step) -> Iterator[Violation | Note]:
    """Each target is the token one ahead of the last one that its prediction sees, or its own row's label."""
    facts, asked = step.facts, step.facts.targets
    if asked.ids.ndim != 2:
        yield from _labels(facts, asked)
        return
    shift, rates = facts.shift, facts.shift_rates
    if shift is None:
        yield from _unaligned(step, asked, rates[0])
        return
    share = f"{rates[shift]:.0%} of {int(asked.counted.sum())} targets are"
    entry = facts.tokens.entry
    if shift == 1:
        first = (asked.ids[:, -1] == entry[:, 0]) & (facts.tokens.column >= 0)
        if entry.shape[1] == asked.ids.shape[1] > 2 and bool((asked.counted[:, -1] & first).all()):
            yield fail(
                "loss",
                "the target at the last position is its row's first token: labels are rolled, not shifted",
                "ignore the last position, or take one token more",
            )
    elif shift < 0 or (_sees(step, shift) if shift == 0 else not _sees(step, shift - 1)):
        yield fail(
            "loss",
            f"{share} the token at distance {shift:+d}: {SHIFTS.get(shift, 'they are too far ahead')}",
            "shift exactly once: the prediction at t is for the token at t + 1",
        )


def _sees(step: Step, distance: int) -> bool:
    """Whether a counted prediction depends on the token at this distance from its position."""
    facts = step.facts
    width = facts.tokens.ids.shape[1]
    counted = facts.targets.counted.any(0).nonzero()[:, 0]
    place = int(counted[len(counted) // 2])
    if facts.targets.ids.shape[1] != width or not 0 <= place + distance < width:
        return distance <= 0
    here, there = (
        (torch.arange(width) == i).expand(facts.tokens.ids.shape) for i in (place, place + distance)
    )
    changed = step.exact.again(batch=facts.other_tokens(there))
    return step.difference(step.exact, changed, part_of(here)) is not None


def _unaligned(step: Step, asked: Targets, copied: float) -> Iterator[Violation]:
    """Targets of which most are not tokens at one distance."""
    facts = step.facts
    if 2 * copied > 1 and _sees(step, 0):
        yield fail(
            "loss",
            f"{copied:.0%} of the counted targets are the input at their own place, which the model sees",
            "count only what the input hides, or shift the labels by one",
        )
        return
    for ahead in (1, 0, 2):
        best, row = asked.by_row(facts.tokens.entry, ahead + facts.offset).max(1)
        if bool((best > 0.9).all()) and bool((row != torch.arange(len(row))).any()):
            yield fail("loss", "the targets are the tokens of other rows", "keep rows and labels together")
            return
    yield from _labels(facts, asked)


def _labels(facts: Facts, asked: Targets) -> Iterator[Violation]:
    """Classes that the batch holds: those of the same rows, where it holds them at all."""
    whole = {p: x.cpu().long() for p, x in facts.entries.items() if not x.is_floating_point()}
    held = {p: x for p, x in whole.items() if x.shape == asked.ids.shape}
    if any(bool((x == asked.ids)[asked.counted].all()) for x in held.values()):
        return
    for place, x in held.items():
        if bool(asked.counted.all()) and torch.equal(x.sort(0).values, asked.ids.sort(0).values):
            agree = int((x == asked.ids).sum())
            yield fail(
                "loss",
                f"it asks for the classes of {'.'.join(map(str, place))} in another order: {agree} of "
                f"{asked.ids.numel()} are those of their own row",
                "hand over the labels of the same rows",
            )
            return
    raise Untestable("the targets are neither tokens of the batch nor labels that it holds")


@property_of("loss", explains=["initial_loss", "overfit"], passes=1)
def counted(step: Step) -> Iterator[Violation | Note]:
    """Padding is not counted, and the end of a text is."""
    facts, asked = step.facts, step.facts.targets
    if asked.ids.ndim != 2 or asked.ids.shape[0] != facts.tokens.ids.shape[0]:
        raise Untestable("the loss has no target at each token")
    shift = facts.shift or 0
    entry = facts.tokens.entry
    ends = {facts.declared.eos_id, facts.configured("eos_token_id")} - {None}
    try:
        padding = facts.padding
    except Unknown as reason:
        if not ends:
            raise Untestable(f"{reason}; declare eos_id for the end of a text") from reason
        padding, pad, real = None, None, torch.ones_like(entry, dtype=torch.bool)
    else:
        pad = padding.pad_id
        real = torch.ones_like(entry, dtype=torch.bool) if pad is None or pad in ends else entry != pad
        real[:, facts.tokens.columns] = padding.real
    there = asked.ahead(real, shift + facts.offset, torch.ones_like(asked.counted))
    if pad in ends:  # the first of the padding may stand for the end
        there = there | asked.ahead(real, shift - 1 + facts.offset, torch.zeros_like(asked.counted))
    elif pad is not None and shift:
        there = asked.ids != pad  # the end of a text is asked where the input may be padding already
    bad = asked.counted & ~there
    if bool(bad.any()):
        yield fail(
            "loss",
            f"{int(bad.sum())} of {int(asked.counted.sum())} counted targets are padding",
            "ignore the labels under padding (-100)",
        )
        return
    is_end = torch.isin(entry, torch.tensor(sorted(ends), dtype=entry.dtype))
    asked_end = asked.ahead(is_end & (real | (pad in ends)), shift + facts.offset, asked.counted & False)
    if shift and bool(asked_end.any()) and not bool((asked_end & asked.counted).any()):
        yield fail(
            "loss",
            f"a text ends at {int(asked_end.sum())} places, and no counted target is that end",
            "count the label of the first end token, also where it is the padding's id",
        )
        return
    left = asked.ahead(real, shift + facts.offset, asked.counted) & ~asked.counted
    if shift and bool(left.any()):
        yield note("loss", f"{int(left.sum())} targets that are no padding are not counted")


@property_of("loss", explains=["overfit"], passes=6)
def reduction(step: Step) -> Iterator[Violation | Note]:
    """The loss is a mean over what is counted: its weights add up to the same for any part of the rows."""
    asked = step.facts.targets
    weight, part = asked.weight[asked.counted], _half(step, asked)
    if not _near(float(weight.min()), float(weight.max())):
        yield note("loss", f"counted positions weigh from {weight.min():.3g} to {weight.max():.3g}")
    if part is None:
        raise Untestable("the batch has one row, or rows cannot be left out")
    places, count = asked.ids.numel(), len(weight)
    some, few = part.ids.numel(), int(part.counted.sum())
    ratio = float(part.weight.sum() / weight.sum())
    if _near(ratio, 1):
        if count < places and _near(float(weight.sum()), count / places):
            yield note("loss", f"it is divided by all {places} positions, of which {count} are counted")
    elif _near(ratio, few / count) and step.setup.step is not None:
        yield note("loss", "it is a sum over positions, which the step has to divide")
    elif _near(ratio, few / count):
        yield fail(
            "loss",
            f"each of {count} positions weighs {weight.mean():.3g} in any batch: a sum, which grows with it",
            "take the mean over the counted positions",
        )
    elif _near(ratio, few / some * places / count):
        yield fail(
            "loss",
            f"it is divided by all {places} positions, of which {count} are counted",
            "divide by the number of counted positions",
        )
    else:
        yield note(
            "loss", f"its weights add up to {weight.sum():.4g}, of half the rows to {ratio:.4g} of that"
        )


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(abs(a), abs(b))


def _half(step: Step, asked: Targets) -> Targets | None:
    """The targets of half of the rows, those of which the most is counted."""
    rows = step.facts.rows
    if rows < 2 or asked.ids.shape[0] != rows:
        return None
    order = asked.counted.reshape(rows, -1).sum(1).argsort(descending=True, stable=True)
    keep = order[: rows // 2].sort().values
    try:
        return Facts(step.exact.again(batch=step.facts.with_rows(keep)), step.declare).targets
    except Exception:  # the model may want a batch of its own size
        return None


@property_of("loss", explains=["initial_loss", "overfit"], passes=8)
def explained(step: Step) -> Iterator[Violation | Note]:
    """The loss is the cross-entropy of its logits, and what it holds besides has a gradient of its own."""
    z, asked = step.facts.logits.value, step.facts.targets
    if bool((z >= 0).all()) and distance(z.sum(-1), torch.ones_like(z[..., 0])) <= step.rounding:
        yield fail(
            "loss",
            "the logits are probabilities, so that softmax is taken twice and no prediction can be sure",
            "hand the loss the logits before the softmax",
        )
        return
    rest, size = _rest(step.facts), abs(float(step.exact.loss))
    if abs(rest) <= max(CLOSE, step.rounding) * size:
        return
    what = f"{rest:+.4g} of {size:.5g} is not the cross-entropy of the logits"
    if asked.excess > CLOSE or _reaches(step) or not step.is_exact:
        yield note("loss", f"{what}, and has a gradient of its own")
        return
    own = step.exact.model.named_parameters()
    weights = {n: p.detach() + 1e-3 * p.detach().roll(1) for n, p in own if p.is_floating_point()}
    if _near(_rest(Facts(step.exact.again(weights=weights), step.declare)), rest):
        yield note("loss", f"{what}, but a constant")
    else:
        yield fail(
            "loss",
            f"{what}, moves with the weights and has no gradient",
            "add the term itself, not its value (item(), detach())",
        )


def _rest(facts: Facts) -> float:
    """What is left of the loss without the cross-entropies that its gradient shows."""
    whole = 0.0 if facts.loss is None else float(facts.loss)
    return whole - sum(asked.value(logits.value) for logits, asked in facts.scores)


def _reaches(step: Step) -> bool:
    """Whether the loss has a gradient that does not pass through the logits that explain the rest."""
    own = [p for p in step.exact.model.parameters() if p.requires_grad]
    with step.exact.with_graph() as passed:
        taps = [t for t in passed.taps.values() if t.requires_grad]
        if passed.loss is None or not taps:
            return True
        whole = torch.autograd.grad(passed.loss, own, retain_graph=True, allow_unused=True)
        at = torch.autograd.grad(passed.loss, taps, retain_graph=True)
        through = torch.autograd.grad(taps, own, at, allow_unused=True)
    pairs = zip(whole, through, strict=True)
    return any(a is not None and (b is None or distance(a, b) > CLOSE) for a, b in pairs)

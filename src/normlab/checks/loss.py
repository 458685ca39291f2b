"""Properties of the loss: what it asks for, where, with which weight, and that it is made of that."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step, distance
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.targets import Targets
from normlab.trace.facts.unknown import Unknown

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
        first = asked.ids[:, -1] == entry[:, 0]
        if entry.shape[1] == asked.ids.shape[1] > 2 and bool((asked.counted[:, -1] & first).all()):
            yield fail(
                "loss",
                "the target at the last position is its row's first token: labels are rolled, not shifted",
                "ignore the last position, or take one token more",
            )
    elif shift < 0 or (_sees(step, shift) if shift == 0 else not _sees(step, shift - 1)):
        yield fail(
            "loss",
            f"{share} the token at distance {shift:+d} from their own position: {SHIFTS.get(shift, 'too far')}",
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
    return step.difference(step.exact, changed, step.part(here)) is not None


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
    for distance in (1, 0, 2):
        place = _share_by_row(asked, facts.tokens.entry, distance + facts.offset)
        best, row = place.max(1)
        if bool((best > 0.9).all()) and bool((row != torch.arange(len(row))).any()):
            yield fail("loss", "the targets are the tokens of other rows", "keep rows and labels together")
            return
    yield from _labels(facts, asked)


def _share_by_row(asked: Targets, entry: Tensor, distance: int) -> Tensor:
    """`[B, B]`, the share of each row's counted targets that are the tokens of each row at a distance."""
    low = max(0, -distance)
    width = min(asked.ids.shape[1], entry.shape[1] - distance) - low
    here, there = slice(low, low + width), slice(low + distance, low + distance + width)
    counted = asked.counted[:, None, here]
    same = (asked.ids[:, None, here] == entry[None, :, there]) & counted
    return same.sum(-1) / counted.sum(-1).clamp_min(1)


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
    there = _ahead(real, asked, shift + facts.offset, torch.ones_like(asked.counted))
    if pad in ends:  # the first of the padding may stand for the end
        there = there | _ahead(real, asked, shift - 1 + facts.offset, torch.zeros_like(asked.counted))
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
    asked_end = _ahead(is_end & (real | (pad in ends)), asked, shift + facts.offset, asked.counted & False)
    if shift and bool(asked_end.any()) and not bool((asked_end & asked.counted).any()):
        yield fail(
            "loss",
            f"a text ends at {int(asked_end.sum())} places, and no counted target is that end",
            "count the label of the first end token, also where it is the padding's id",
        )
        return
    left = _ahead(real, asked, shift + facts.offset, asked.counted) & ~asked.counted
    if shift and bool(left.any()):
        yield note("loss", f"{int(left.sum())} targets that are no padding are not counted")


def _ahead(entry: Tensor, asked: Targets, distance: int, otherwise: Tensor) -> Tensor:
    """What an entry `[B, W]` has at a distance from each target, and something else where it has nothing."""
    width = asked.ids.shape[1]
    place = torch.arange(width) + distance
    inside = (place >= 0) & (place < entry.shape[1])
    return torch.where(inside, entry[:, place.clamp(0, entry.shape[1] - 1)], otherwise)


@property_of("loss", explains=["overfit"], passes=6)
def reduction(step: Step) -> Iterator[Violation | Note]:
    """The loss is a mean over what is counted: its weights add up to the same for any part of the rows."""
    asked = step.facts.targets
    weight = asked.weight[asked.counted]
    if float(weight.max() - weight.min()) > CLOSE * float(weight.max()):
        yield note(
            "loss", f"counted positions weigh from {float(weight.min()):.3g} to {float(weight.max()):.3g}"
        )
    total = float(weight.sum())
    part = _half(step, asked)
    if part is None:
        raise Untestable("the batch has one row, or rows cannot be left out")
    few, every = part.weight[part.counted], asked.ids.numel() / part.ids.numel()
    ratio, count = float(few.sum()) / total, len(few) / len(weight)
    if abs(ratio - 1) <= CLOSE:
        ignored = asked.ids.numel() - len(weight)
        if ignored and abs(total * asked.ids.numel() / len(weight) - 1) <= CLOSE:
            yield note(
                "loss", f"it is divided by all {asked.ids.numel()} positions, {ignored} ignored ones too"
            )
    elif abs(ratio / count - 1) <= CLOSE:
        if step.setup.step is not None:
            yield note("loss", "it is a sum over positions; the step divides it, or the gradient grows")
            return
        yield fail(
            "loss",
            f"each of the {len(weight)} counted positions weighs {float(weight.mean()):.3g} in any batch: it is a "
            "sum, and its gradient grows with the batch",
            "take the mean over the counted positions",
        )
    elif abs(ratio / (count * every) - 1) <= CLOSE:
        yield fail(
            "loss",
            f"it is divided by all {asked.ids.numel()} positions, of which {len(weight)} are counted",
            "divide by the number of counted positions",
        )
    else:
        yield note(
            "loss", f"the weights add up to {total:.4g}, and to {ratio * total:.4g} for half of the rows"
        )


def _half(step: Step, asked: Targets) -> Targets | None:
    """The targets of half of the rows, those of which the most is counted."""
    rows = step.facts.rows
    if rows < 2 or asked.ids.shape[0] != rows:
        return None
    order = asked.counted.reshape(rows, -1).sum(1).argsort(descending=True, stable=True)
    keep = order[: max(rows // 2, 1)].sort().values
    try:
        return Facts(step.exact.again(batch=step.facts.with_rows(keep)), step.declare).targets
    except Exception:  # the model may want a batch of its own size
        return None


@property_of("loss", explains=["initial_loss", "overfit"], passes=8)
def explained(step: Step) -> Iterator[Violation | Note]:
    """The loss is the cross-entropy of its logits, and what it holds besides has a gradient of its own."""
    facts = step.facts
    z, asked = facts.logits.value, facts.targets
    if bool((z >= 0).all()) and distance(z.sum(-1), torch.ones_like(z[..., 0])) <= step.rounding:
        yield fail(
            "loss",
            "the logits are probabilities, so that softmax is taken twice and no prediction can be sure",
            "hand the loss the logits before the softmax",
        )
        return
    rest = float(step.exact.loss) - sum(_value(logits.value, t) for logits, t in facts.scores)
    size = abs(float(step.exact.loss))
    if abs(rest) <= max(CLOSE, step.rounding) * size:
        return
    if asked.excess > CLOSE:
        yield note("loss", f"{rest:+.4g} of {size:.5g} is another term on the logits")
        return
    if _reaches(step):
        yield note(
            "loss", f"{rest:+.4g} of {size:.5g} is not the cross-entropy, and has a gradient of its own"
        )
    elif step.is_exact and _constant(step, rest):
        yield note("loss", f"{rest:+.4g} of {size:.5g} is a constant")
    elif step.is_exact:
        yield fail(
            "loss",
            f"{rest:+.4g} of {size:.5g} is not the cross-entropy of the logits, moves with the weights and has no "
            "gradient",
            "add the term itself, not its value (item(), detach())",
        )


def _value(z: Tensor, asked: Targets) -> float:
    """The cross-entropy that these targets make, with its label smoothing."""
    smooth = -z.double().log_softmax(-1).mean(-1).cpu().reshape(asked.weight.shape)
    return float((asked.weight * (asked.nll + asked.smoothing * smooth))[asked.counted].sum())


def _rest(step: Step, trace: object) -> float:
    facts = Facts(trace, step.declare)  # type: ignore[arg-type]
    return float(facts.loss) - sum(_value(logits.value, t) for logits, t in facts.scores)  # type: ignore[arg-type]


def _constant(step: Step, rest: float) -> bool:
    """Whether what is left of the loss does not move with the weights."""
    weights = {
        n: p.detach() + 1e-3 * p.detach().roll(1)
        for n, p in step.exact.model.named_parameters()
        if p.is_floating_point()
    }
    return abs(_rest(step, step.exact.again(weights=weights)) - rest) <= CLOSE * abs(rest)


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
    return any(
        a is not None and (b is None or distance(a, b) > 1e3 * step.rounding)
        for a, b in zip(whole, through, strict=True)
    )

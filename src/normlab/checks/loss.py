"""Test the loss: what it asks for, where, with what weight, and what it holds besides.

What it asks for is read off its gradient at the logits, which for a cross-entropy is a·p − b − w·onehot(y):
the fit gives the target y of each position, its weight w, and whether it is counted (``facts.targets``).
``asked`` stands for these ``Targets`` throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.base.units import told_apart
from normlab.checks.property import BACKWARD, FORWARD, OTHER_BATCHES, Answers, fail, needs, note, property_of
from normlab.checks.step import step_and_whole
from normlab.trace.autograd import gradients_in
from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.drawn import predicts_from_a_code
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.padding import Arranged, Padding
from normlab.trace.facts.targets import (
    CLOSE,
    Logits,
    Targets,
    bypassed,
    cut_off,
    is_joined_elsewhere,
    over_one,
)
from normlab.trace.facts.tokens import Tokens
from normlab.trace.rearranged import with_more_padding
from normlab.trace.starts import is_of_library
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import Place, place_name
from normlab.trace.trace import Trace
from normlab.trace.updates import factors

BACKWARDS = "they are shifted the wrong way"
SHIFTS = {0: "the loss asks to copy", 2: "they are shifted twice", -1: BACKWARDS, -2: BACKWARDS}


@property_of(
    "loss",
    explains=["counted", "explained", "initial_loss", "padded_loss", "reach", "overfit"],
    passes=2,
    uses=OTHER_BATCHES,
)
def targets(step: StepUnderTest) -> Answers:
    """Each target is the token right after the last one that its prediction sees, or its row's label; heads
    that see equally far may ask for further tokens besides, and what sees only a code of its row for all of
    them.

    y[t] = x[t + 1] for a model that looks back. How far a prediction sees is measured, so that the same
    holds for a head that looks further ahead, or backwards.
    """
    facts, asked = step.facts, step.facts.targets
    shift = facts.shift if asked.ids.ndim == 2 else None
    if shift is None:
        yield from _elsewhere(step)
        return
    entry = facts.tokens.entry
    as_long_as_tokens = facts.tokens.column >= 0 and entry.shape[1] == asked.ids.shape[1] > 2
    if shift == 1 and as_long_as_tokens:
        wraps = asked.counted[:, -1] & (asked.ids[:, -1] == entry[:, 0])
        if wraps.all():
            evidence = (
                "the target at the last position is its row's first token: labels are rolled, not shifted"
            )
            yield fail("loss", evidence, "ignore the last position, or take one token more")
    yield from _not_next(step)


@dataclass(frozen=True, eq=False)
class _Head:
    """Logits that the loss scores at tokens: their targets, how far ahead these are, and the last token that
    the predictions see.
    """

    asked: Targets
    ahead: int
    sight: int

    @property
    def is_next(self) -> bool:
        """Whether the targets are the first tokens that the predictions do not see."""
        return self.ahead == self.sight + 1

    @property
    def is_seen(self) -> bool:
        """Whether the predictions see their targets."""
        return self.ahead <= self.sight


def _not_next(step: StepUnderTest) -> Answers:
    """Heads whose targets are tokens that they see, or further ones where no head that sees as far is asked
    for the next token.
    """
    heads = [head for scored in step.facts.heads if (head := _head(step, scored)) is not None]
    sights_asked_for_next = {head.sight for head in heads if head.is_next}
    wrong = [
        head
        for head in heads
        if not head.is_next and (head.is_seen or head.sight not in sights_asked_for_next)
    ]
    if not wrong:
        return
    head = wrong[0]
    if head.is_seen and _predicts_from_a_code(step):
        return
    of_head = f" of head {heads.index(head) + 1} of {len(heads)}" if len(heads) > 1 else ""
    share = step.facts.shift_rates_of(head.asked)[head.ahead]
    evidence = f"{share:.0%} of {int(head.asked.counted.sum())} targets{of_head} are the token at distance "
    evidence += f"{head.ahead:+d}"
    if not head.is_seen and _reads_frozen_model(step):
        why = "what it reads is frozen, and may predict the next token already"
        yield note("loss", f"{evidence}; {why}")
    elif len(heads) > 1:
        why = f"it sees the token at {head.sight:+d}"
        if not head.is_seen:
            why += ", and no head is asked for the one after that"
        yield fail("loss", f"{evidence}: {why}", "shift each head's labels once for each token that it skips")
    else:
        why = SHIFTS.get(head.ahead, "they are too far ahead")
        advice = "shift exactly once: the prediction at t is for the token at t + 1"
        yield fail("loss", f"{evidence}: {why}", advice)


def _predicts_from_a_code(step: StepUnderTest) -> bool:
    """Return whether the logits know of the tokens only what a code of the row holds."""
    return predicts_from_a_code(step.exact, step.facts.tokens, step.facts.scored_places)


def _head(step: StepUnderTest, scored: tuple[Logits, Targets]) -> _Head | None:
    """Return what logits are asked for and see; None if their targets are no tokens, or are earlier ones that
    a head other than the main one does not see, because it reads the text backwards.

    Whether the main logits see the next token is a question of causality.
    """
    _, asked = scored
    ahead, is_main = step.facts.shift_of(asked), asked is step.facts.targets
    if ahead is None:
        return None
    if ahead < 0:
        sees = is_main or step.comparison.sees(ahead, scored)
        return _Head(asked, ahead, 0) if sees else None
    if is_main and ahead == 1:
        return _Head(asked, ahead, 0)  # as it should be, unless causality says otherwise
    nearest = ahead - 1 if is_main and ahead else ahead
    for distance_ahead in range(nearest, -1, -1):
        if step.comparison.sees(distance_ahead, scored):
            return _Head(asked, ahead, distance_ahead)
    return _Head(asked, ahead, -1)


def _reads_frozen_model(step: StepUnderTest) -> bool:
    """Return whether the tables and the stack that read the tokens are frozen: heads on top of a model that
    was trained before.
    """
    facts = step.facts
    tables = [call.argument(1, "weight") for call in facts.lookups]
    first = next((block for path in facts.order for block in facts.blocks if block.path == path), None)
    if first is None:
        return False
    stack = next(blocks for blocks in facts.stacks.values() if first in blocks)
    below = [*tables, *(p for block in stack for p in block.module.parameters())]
    return not any(p.requires_grad for p in below)


def _elsewhere(step: StepUnderTest) -> Answers:
    """If the targets are not tokens at one distance, they may be classes of the same rows in the batch."""
    facts, ids, counted = step.facts, step.facts.targets.ids, step.facts.targets.counted
    if ids.ndim == 2:
        yield from _sees_its_targets(step)
        yield from _of_other_rows(step)
    entries = {p: x.cpu().long() for p, x in facts.entries.items() if not x.is_floating_point()}
    labels = {place: entry for place, entry in entries.items() if entry.shape == ids.shape}
    if any((entry == ids)[counted].all() for entry in labels.values()):
        return
    for place, entry in labels.items():
        if counted.all() and entry.sort(0).values.equal(ids.sort(0).values):
            agree = f"{int((entry == ids).sum())} of {ids.numel()} are those of their own row"
            evidence = f"it asks for the classes of {'.'.join(map(str, place))} in another order: {agree}"
            yield fail("loss", evidence, "pass the labels of the same rows")
    raise Unknown("the targets are neither tokens of the batch nor labels that it holds")


def _sees_its_targets(step: StepUnderTest) -> Answers:
    """Targets most of which are the inputs at their own places, which the model is shown."""
    share = step.facts.shift_rates[0]
    if 2 * share > 1 and step.comparison.sees(0) and not _predicts_from_a_code(step):
        evidence = f"{share:.0%} of the targets are the input at their place, which the model sees"
        yield fail("loss", evidence, "count only what the input hides, or shift the labels by one")


def _of_other_rows(step: StepUnderTest) -> Answers:
    """Targets that are, in every row, the tokens of some row, but not all of their own."""
    facts = step.facts
    for ahead in (1, 0, 2):
        agreement, row = facts.targets.by_row(facts.tokens.entry, ahead + facts.offset).max(1)
        is_of_another = row != torch.arange(len(row))
        if (agreement > 0.9).all() and is_of_another.any():
            evidence = (
                f"the targets of {int(is_of_another.sum())} of {len(row)} rows are tokens of another row"
            )
            yield fail("loss", evidence, "keep rows and labels together")


@property_of("loss", explains=["initial_loss", "overfit", "padded_loss"], passes=2, uses=OTHER_BATCHES)
def counted(step: StepUnderTest) -> Answers:
    """The loss leaves out padding, what labels hide and places of images, but counts the end of a text.

    w[t] = 0 where y[t] is no word that could be predicted, and w[t] > 0 where y[t] ends a text: a model that
    never learns to end goes on for ever.
    """
    if (frames := step.facts.frames) is not None:
        yield from _reads_padding(step, frames.real)
    if frames is None or step.facts.sources:
        yield from _counts_tokens(step)


def _counts_tokens(step: StepUnderTest) -> Answers:
    """Padding among the counted tokens, and ends of texts that are not counted."""
    yield from _hidden(step)
    yield from _keeping_places(step)
    facts, asked, shift = step.facts, step.facts.targets, step.facts.shift or 0
    entry, ahead = facts.tokens.entry, shift + facts.offset
    ends, pad, real, end_is_real = _ends_and_padding(step)
    is_padding = asked.ahead(~real, ahead)
    if pad in ends:
        if not end_is_real:  # the first padding token may mark the end
            is_padding &= ~asked.ahead(real, ahead - 1)
    elif pad is not None and shift:
        # the end of a text may be the target of an input that is already padding
        is_padding = asked.ids == pad
    if padding := int((asked.counted & is_padding).sum()):
        evidence = f"{padding} of {int(asked.counted.sum())} counted targets are padding"
        yield fail("loss", evidence, "ignore the labels under padding (-100)")
    if shift:
        is_end = torch.isin(entry, torch.tensor(list(ends), dtype=entry.dtype))
        yield from _ends_and_words(asked, asked.ahead(is_end & (real | (pad in ends)), ahead), real, ahead)


class _EndsAndPadding(NamedTuple):
    """What is known of the ends of texts and of padding."""

    ends: set[int | None]
    """Ids that end a text."""
    pad: int | None
    """The id of padding, if it has one."""
    real: Tensor
    """Where the entry of the tokens holds no padding, `[B, T]`."""
    end_is_real: bool
    """Whether the last real token of a row has the id of padding, too: then it is the end of the text."""


def _ends_and_padding(step: StepUnderTest) -> _EndsAndPadding:
    """Read the ends of texts and the padding. Raises Unknown if neither is known."""
    facts = step.facts
    entry = facts.tokens.entry
    ends = {facts.declared.eos_id, facts.configured("eos_token_id")} - {None}
    everywhere = torch.ones_like(entry, dtype=torch.bool)
    try:
        padding = facts.padding
    except Unknown as reason:
        if not ends:
            raise Unknown(f"{reason}; declare eos_id for the end of a text") from reason
        return _EndsAndPadding(ends, None, everywhere, end_is_real=False)
    pad = padding.pad_id
    behind_start = padding.real & (padding.real.cumsum(1) > 1)  # a row may begin with it, as T5's do
    if pad in facts.tokens.ids[behind_start].unique():  # it is a word, too: one that ends texts, or turns
        ends.add(pad)
    real = everywhere if pad is None or pad in ends else entry != pad
    real[:, facts.tokens.columns] = padding.real
    return _EndsAndPadding(ends, pad, real, padding.ends_texts)


def _ends_and_words(asked: Targets, ends: Tensor, real: Tensor, ahead: int) -> Answers:
    """Ends of texts, of which none is a counted target, and words that are none."""
    if ends.any() and not (ends & asked.counted).any():
        evidence = f"a text ends at {int(ends.sum())} places, but no counted target is that end"
        advice = "count the label of the first end token, even if that is the padding's id"
        yield fail("loss", evidence, advice)
    if uncounted := int((asked.ahead(real, ahead) & ~asked.counted).sum()):
        yield note("loss", f"{uncounted} targets that are not padding are not counted")


def _keeping_places(step: StepUnderTest) -> Answers:
    """Counted targets that are no words, but ids in whose places the model reads something else."""
    asked = step.facts.targets
    if step.facts.shift is None:  # other classes may have the same numbers
        return
    ids = torch.tensor(step.facts.placeholders(step.facts.tokens), dtype=asked.ids.dtype)
    if placeholders := int((asked.counted & torch.isin(asked.ids, ids)).sum()):
        evidence = f"{placeholders} of {int(asked.counted.sum())} counted targets only keep places "
        evidence += "for something else that the model reads there, such as an image"
        yield fail("loss", evidence, "ignore their labels (-100)")


def _reads_padding(step: StepUnderTest, real: Tensor) -> Answers:
    """Places of the model's outputs at which the loss has a gradient although their frames are padding."""
    with step.training.with_graph(outputs=True) as passed:
        outputs = [x for x in passed.outputs if x.requires_grad and x.ndim > 2 and x.shape[:2] == real.shape]
        if passed.loss is None or not passed.runs_whole or not outputs:
            raise Unknown("no output of the model has a place for each frame")
        slopes = gradients_in(passed.loss, outputs, step.training.model)
    read = torch.zeros_like(real)
    for slope in slopes:
        if slope is not None:
            read |= slope.flatten(2).any(-1).cpu()
    if padding := int((read & ~real).sum()):
        others = int((read & real).sum())
        evidence = f"the loss has a gradient at {padding} places of padding, and at {others} others"
        yield fail("loss", evidence, "choose masked places, negatives and targets among real frames alone")


def _hidden(step: StepUnderTest) -> Answers:
    """Counted targets where labels of the batch, which are its tokens elsewhere, are negative: of a prompt.

    Hidden targets that have another weight than the others are counted on purpose.
    """
    asked = step.facts.targets
    for place, labels, distance_ahead in _labels(step):
        hidden = asked.ahead(labels < 0, distance_ahead)
        if not (asked.counted & hidden).any():
            continue
        of_hidden = int((asked.counted & hidden).sum())
        evidence = (
            f"{of_hidden} of {int(asked.counted.sum())} counted targets are hidden by {place_name(place)}"
        )
        weights = asked.weight[asked.counted]
        if isclose(float(weights.min()), float(weights.max()), rel_tol=asked.rounding):
            advice = "let the loss leave out negative labels"
            yield fail("loss", f"{evidence}, which is negative there", advice)
        else:
            yield note("loss", f"{evidence}, but have another weight than the others")


def _labels(step: StepUnderTest) -> Iterator[tuple[Place, Tensor, int]]:
    """Yield entries of the batch that are negative at some tokens and hold the tokens, or those one ahead,
    at all others: with the place, and how far ahead of a target's position its label is.
    """
    facts, tokens = step.facts, step.facts.tokens.entry
    if step.facts.targets.ids.ndim != 2 or len(step.facts.targets.ids) != len(tokens):
        return
    for place, entry in facts.entries.items():
        is_other = place != facts.tokens.place and entry.shape == tokens.shape
        if not is_other or entry.is_floating_point() or not bool((entry < 0).any()):
            continue
        labels = entry.cpu().long()
        for ahead in (0, 1):
            kept, their_tokens = labels[:, : labels.shape[1] - ahead], tokens[:, ahead:]
            shown = kept >= 0
            if shown.any() and bool((kept == their_tokens)[shown].all()):
                # a target is a token one ahead, whether or not the loss asks for it
                yield place, labels, 1 + facts.offset - ahead
                break


@property_of("loss", explains=["overfit", "padded_loss"], passes=3, uses=OTHER_BATCHES)
def reduction(step: StepUnderTest) -> Answers:
    """The loss is a mean over the counted targets: their weights add up to the same for any set of rows.

    Σ w[t] over a set of rows is the same for each set: tested on all rows and on half of them. Otherwise the
    size of the gradient depends on the size of the batch, as that of a sum does, or on how much of it is
    padding.
    """
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
        elif not near(total, 1):
            yield from _sum_over_positions(step, near)
        yield from _of_further_heads(step)
    elif len(factors(step)) > 1:
        yield from _sum_over_batch(step, near)
    # by all positions; or by rows, which are as many times fewer in half of them
    elif near(ratio, share * places / part.ids.numel()) and _is_divided_by_places(step, near):
        yield fail("loss", over_all, "divide by the number of counted positions")
    elif notes := list(_sum_over_positions(step, near)):
        yield from notes
    else:
        yield note("loss", f"its weights add up to {total:.4g}, of half the rows to {ratio:.4g} of that")


def _sum_over_batch(step: StepUnderTest, near: Callable[[float, float], bool]) -> Answers:
    """A position weighs the same in any set of rows: the loss is a sum, which somebody may divide later."""
    asked = step.facts.targets
    weight = asked.weight[asked.counted]
    each, total = float(weight.sum()) / len(weight), float(weight.sum())
    evidence = f"a position weighs {each:.3g} on average, in half of the rows as in all"
    if near(total, 1):  # such as the count of all micro-batches of a step, which is known before them
        yield note("loss", f"{evidence}: the loss is divided by a fixed number, the count of this batch")
    elif _step_divides(step):
        yield note("loss", f"{evidence}: a sum over the batch")
    else:
        advice = "take the mean over the counted positions"
        yield fail("loss", f"{evidence}: a sum over the batch", advice)


def _of_further_heads(step: StepUnderTest) -> Answers:
    """Heads that look further ahead than the main one, and are divided by its number of targets: theirs are
    fewer, by as many as there are ends of texts, and not by one share.
    """
    facts, half = step.facts, step.facts_of_half
    if half is None or not facts.sources or facts.shift is None:
        return
    main, main_half = facts.targets, half.targets
    in_half = {logits.where: asked for logits, asked in half.heads}
    for number, (logits, asked) in enumerate(facts.heads, start=1):
        part, shift = in_half.get(logits.where), facts.shift_of(asked)
        if part is None or shift is None or shift <= facts.shift:
            continue
        near = partial(isclose, rel_tol=max(asked.rounding, part.rounding))
        ratio = float(part.weight.sum()) / float(asked.weight.sum())
        targets_of_head, targets_of_main = int(asked.counted.sum()), int(main.counted.sum())
        share = int(part.counted.sum()) / targets_of_head
        share_of_main = int(main_half.counted.sum()) / targets_of_main
        if not near(ratio, 1) and near(ratio, share / share_of_main):
            evidence = (
                f"the {targets_of_head} targets of head {number}, which looks {shift} ahead, are divided "
            )
            evidence += (
                f"by the {targets_of_main} of the main head: half of the rows weigh {ratio:.4g} times as "
            )
            evidence += "much as all"
            yield fail("loss", evidence, "divide each head by the number of its own targets")


def _is_divided_by_places(step: StepUnderTest, near: Callable[[float, float], bool]) -> bool:
    """Return whether the weights fall with the number of positions or, without padding, are one over it."""
    asked, falls = step.facts.targets, _falls_with_length(step)
    each = float(asked.weight[asked.counted].mean())
    return near(each, 1 / asked.ids.numel()) if falls is None else falls


def _sum_over_positions(step: StepUnderTest, near: Callable[[float, float], bool]) -> Answers:
    """A note if a position weighs the same in rows of two lengths: their sum grows with the length."""
    facts, asked, (rows, width) = step.facts, step.facts.targets, step.facts.tokens.ids.shape
    each = float(asked.weight[asked.counted].mean())
    first_half = Arranged(torch.arange(rows), lambda wide: torch.arange(wide - width // 2).expand(rows, -1))
    try:
        batch = facts.rearranged(first_half, facts.tokens)
        shorter = Facts(step.exact.again(batch=batch), step.declare).targets
    except Exception:  # a model may accept one width alone
        return
    of_shorter, of_all = int(shorter.counted.sum()), int(asked.counted.sum())
    if of_shorter < of_all and near(float(shorter.weight[shorter.counted].mean()), each):
        evidence = f"a position weighs {each:.3g} on average, and as much in rows of half the length "
        evidence += f"({of_shorter} and {of_all} are counted): the loss is a sum over a row's positions, "
        evidence += "and grows with its length"
        yield note("loss", evidence)


def _step_divides(step: StepUnderTest) -> bool:
    """Return whether the user's own step divides the loss before its backward pass, or may do so."""
    if step.setup.step is None:
        return False
    if step.has_own_step_batch:  # the loss of the whole step is another one: a mean over micro-batches
        return True
    try:
        _, match = step_and_whole(step)
    except Unknown:
        return True
    return not isclose(match.factor, 1, rel_tol=CLOSE)


def _falls_with_length(step: StepUnderTest) -> bool | None:
    """Whether one more column of padding makes the weights smaller, in proportion to the number of positions,
    or leaves them as they are; None if there is no padding, or it does something else.
    """
    facts, asked_of_both = step.facts, list[Targets]()
    with suppress(Exception):  # a model may accept one width alone
        more = facts.padding.arranged()["more"]
        the_same_rows = more._replace(columns=None)
        for arranged in (the_same_rows, more):
            batch = facts.rearranged(arranged, facts.tokens)
            asked_of_both.append(Facts(step.exact.again(batch=batch), step.declare).targets)
    if len(asked_of_both) < 2:
        return None
    places_before, places_after = (asked.ids.numel() for asked in asked_of_both)
    if places_before == places_after:
        return None
    before, after = (float(asked.weight.sum()) for asked in asked_of_both)
    if isclose(after / before, places_before / places_after, rel_tol=CLOSE):
        return True
    return False if isclose(after, before, rel_tol=CLOSE) else None


def _padded(step: StepUnderTest) -> list[tuple[Tokens, Padding]]:
    """Return the tokens that are known to have padding. Raises Unknown if there are none."""
    padded, reasons = list[tuple[Tokens, Padding]](), list[str]()
    for tokens in step.facts.sources:
        try:
            padded.append((tokens, step.facts.padding_of(tokens)))
        except Unknown as reason:
            reasons.append(str(reason))
    needs(padded, reasons[0] if reasons else "no tensor of the batch is looked up in an embedding")
    return padded


@property_of("loss", passes=6, applies=_padded, uses=OTHER_BATCHES | BACKWARD)
def padded_loss(step: StepUnderTest) -> Answers:
    """More padding changes neither the loss nor its gradient.

    loss(x with more padding) = loss(x), and so is ∂loss/∂θ. The gradient is compared, too, since an autograd
    function may attach a term to it that the loss does not show.
    """
    needs(step.is_exact, step.why_inexact)
    needs(
        not step.comparison.draws,
        "in training it draws random numbers, other ones for rows of another length",
    )
    reasons: list[str] = []
    tested = False
    for tokens, padding in _padded(step):
        try:
            pair = with_more_padding(step, tokens, padding)
        except Unknown as reason:
            reasons.append(str(reason))
            continue
        if pair is None:
            reasons.append("the model does not run on the padded rows with one more column of padding")
            continue
        tested = True
        yield from _moved_by_padding(step, *pair)
    if not tested:
        raise Unknown(reasons[0])


def _moved_by_padding(step: StepUnderTest, as_it_is: Trace, longer: Trace) -> Answers:
    """The loss and its gradient of the batch, and of the same with one more column of padding."""
    before, after = as_it_is.slope, longer.slope
    differences = {name: float((after.gradients[name] - g).norm()) for name, g in before.gradients.items()}
    size = math.hypot(*(float(g.norm()) for g in before.gradients.values()))
    of_loss = abs(after.loss - before.loss) / max(abs(before.loss), 1e-300)
    of_gradient = math.hypot(*differences.values()) / max(size, 1e-300)
    if max(of_loss, of_gradient) <= step.rounding:
        return
    most = max(differences, key=lambda name: differences[name])
    evidence = f"one more column of padding moves the loss by {of_loss:.2g} of its size, and its gradient by "
    evidence += f"{of_gradient:.2g}, most in {most}"
    if step.setup.loss is None and is_of_library(step.model, ""):
        yield note("loss", f"{evidence}: so a library computes it")
    else:
        advice = "leave padding out of every term of the loss, and out of what it divides by"
        yield fail("loss", evidence, advice)


@property_of("loss", explains=["initial_loss", "overfit"], passes=4, uses=FORWARD)
def explained(step: StepUnderTest) -> Answers:
    """The loss is the cross-entropy of the logits, and any further term has a gradient of its own.

    loss = Σ w[t] · CE(logits[t], y[t]) + r, where ∂r/∂θ ≠ 0 if r ≠ 0: a term that moves with the weights
    but has no gradient trains nothing.
    """
    if (total := over_one(step.exact)) is not None:
        evidence = (
            f"nll_loss is given numbers whose exponentials add up to {total:.3g}: not log-probabilities"
        )
        yield fail("loss", evidence, "use cross_entropy, or log_softmax before it")
    logits, unexplained, size = step.facts.logits.value, step.facts.unexplained, abs(float(step.exact.loss))
    yield from _are_logits(step, logits)
    if abs(unexplained) <= max(step.facts.targets.rounding, step.rounding) * size:
        return
    evidence = f"{unexplained:+.4g} of {size:.5g} is not the cross-entropy of the logits"
    if step.facts.targets.excess > CLOSE or bypassed(step.exact) or not step.is_exact:
        yield note("loss", f"{evidence}, and has a gradient of its own")
        return
    # at other weights, a constant is the same, and a term without a gradient is not
    parameters = {name: p for name, p in step.exact.parameters.items() if p.is_floating_point()}
    weights = {name: p + 1e-3 * p.roll(1) for name, p in parameters.items()}
    at_others = Facts(step.exact.again(weights=weights), step.declare)
    if isclose(at_others.unexplained, unexplained, rel_tol=CLOSE):
        if is_joined_elsewhere(step.exact):
            advice = "look at the axes that the term takes its sums and means over"
            yield fail("loss", f"{evidence}; it is computed from the weights, and the same at others", advice)
        yield note("loss", f"{evidence}, but a constant")
    elif not torch.allclose(at_others.targets.weight, step.facts.targets.weight, rtol=CLOSE, atol=0):
        yield note("loss", f"{evidence}, but a function of it: its weights move with the predictions")
    else:
        advice = "add the term itself, not its value (item(), detach())"
        yield fail("loss", f"{evidence}, moves with the weights and has no gradient", advice)


def _are_logits(step: StepUnderTest, logits: Tensor) -> Answers:
    """What the loss takes for logits are logits, and all of them pass their gradient on to the head."""
    if cut := cut_off(step.exact, logits):
        evidence = f"{cut.size:.0%} of the logits pass no gradient on to the product that makes them"
        advice = "put nothing but a scale, a bias or a smooth cap after the head"
        yield fail(cut.module, evidence, advice)
    if (logits >= 0).all() and distance(logits.sum(-1), torch.ones_like(logits[..., 0])) <= step.rounding:
        evidence = "the logits are probabilities: softmax is applied twice, and no prediction can be certain"
        yield fail("loss", evidence, "pass the logits, not their softmax, to the loss")

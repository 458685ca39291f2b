"""Properties of tokens: which positions, rows and documents a prediction may depend on, and does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from normlab.checks.property import Answers, Untestable, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.compare import Part, distance, part_of
from normlab.trace.facts import Unknown
from normlab.trace.facts.padding import Padding, padding_of_tokens
from normlab.trace.facts.tokens import Tokens
from normlab.trace.tensors import Place, at, replaced


def moved(step: Step, batch: object, part: Part, what: str, do: str, *, training: bool = False) -> Answers:
    """A failure where another batch moves the outputs in a part in which it must not."""
    base = step.exact.again(training=True) if training else step.exact
    found = step.difference(base, base.again(batch=batch), part)
    if found is not None:
        mode = " in training mode" if training else ""
        say = f"outputs move by {found.size:.1e} of their size when {what} change{mode}"
        yield fail(found.module, say, do)


@property_of("tokens", explains=["causality", "reach", "padding", "documents", "order", "cache"], passes=3)
def rows(step: Step) -> Answers:
    """The other rows of a batch change nothing in a row, and outputs follow the order of the rows."""
    facts, count, logits = step.facts, step.facts.rows, step.logits(step.exact)
    if count < 2:
        raise Untestable("the batch holds one row; hand over a batch of two rows or more")
    if logits.ndim < 2 or count not in logits.shape[:2]:
        raise Untestable("the output has no axis for rows")
    if logits.shape == (count, count):
        raise Untestable("the output compares rows with each other")
    order, last = torch.arange(count), torch.arange(count) == count - 1
    changed = facts.with_rows(torch.cat([order[:-1].roll(1), order[-1:]]))
    if facts.sources:
        tokens = facts.sources[0]
        changed = facts.other_tokens(facts.real(tokens) & ~last[:, None], tokens)
    advice = "normalize and mix within a row only"
    yield from moved(step, changed, part_of(last), "only rows before the last", advice)
    shown = step.logits(step.exact.again(batch=facts.with_rows(order.roll(1))))
    axis = 0 if logits.shape[0] == count else 1
    size = distance(logits.roll(1, axis), shown) if logits.shape == shown.shape else 0.0
    if size > step.rounding and not distance(logits, step.logits(step.exact.again(seed=1))):
        # noise that is drawn goes by the row's place
        say = f"rows in another order change outputs by {size:.1e} of their size"
        yield fail("", say, "index nothing by row")


BESIDE = ("reach", "order", "overfit", "cache", "documents", "training_equals_evaluation")


@property_of("tokens", explains=BESIDE, passes=4)
def causality(step: Step) -> Answers:
    """No prediction depends on its target or on a later token.

    The ids after a position, another one in each row, are exchanged for others; the logits up to it, where
    the loss counts them, must stay, in evaluation and in training mode.
    """
    facts = step.facts
    if not facts.causal:
        raise Untestable("the targets are not the next tokens; declare causal=True if the model looks back")
    (count, width), tested = facts.tokens.ids.shape, False
    for start in (0.5, 0.02):
        cuts = ((torch.arange(count) / count + start) % 1 * (width - 1)).long()
        later = torch.arange(width) > cuts[:, None]
        part = ~later & facts.counted
        if not part.any() or not later.any():
            continue
        tested, batch = True, facts.other_tokens(later)
        advice = "mask the keys after each query; normalize and mix over features only"
        for training in (False, True):
            yield from moved(step, batch, part_of(part), "only later tokens", advice, training=training)
    if not tested:
        raise Untestable("no target is counted before a later token")


@property_of("tokens", explains=["order"], passes=3)
def reach(step: Step) -> Answers:
    """Predictions depend on the tokens that they may see: the one before, and earlier ones."""
    facts, base = step.facts, step.logits(step.exact)
    real, places = facts.real(facts.tokens), torch.arange(facts.tokens.ids.shape[1])
    last, shortest = (places * real).max(1).values, int(real.sum(1).min())
    if len(places) < 2:
        raise Untestable("rows hold one token each")
    by_position = _by_position(step, base)
    part = part_of(places == last[:, None] if by_position else torch.ones(len(real), dtype=torch.bool))
    shown, seen = part(base), dict[int, float]()
    if shown is None:
        raise Untestable("the output has no axis for positions or rows")
    for back in dict.fromkeys(d for d in (1, 2, shortest // 2, shortest - 1) if d > 0):
        batch = facts.other_tokens(places == (last - back)[:, None])
        other = part(step.logits(step.exact.again(batch=batch)))
        seen[back] = distance(shown, other) if other is not None else 0.0
    near = [d for d in seen if seen[d]]
    if not near:
        calls = step.exact.functions("scaled_dot_product_attention", "softmax")
        say = "the last position's output does not move when any earlier token changes"
        yield fail(
            calls[0].module if calls else "", say, "look at the mask's sign and what attention returns"
        )
    elif not seen[1] and by_position:
        say = f"the last position does not see the token before it, and sees the one {min(near)} back"
        yield fail("", say, "the mask is off by one")
    elif len(near) < len(seen):
        yield note("", f"the last position sees {max(near)} tokens back, and not {max(seen)}")


def _by_position(step: Step, logits: Tensor) -> bool:
    count, width = step.facts.tokens.ids.shape
    lengths = logits.shape[:2]
    return logits.ndim >= 3 and count in lengths and min(abs(n - width) for n in lengths) <= 1


@property_of("tokens", explains=["inputs"], passes=3)
def padding(step: Step) -> Answers:
    """What stands under padding changes nothing; a row cut to its tokens gives what it gives in the batch."""
    reasons: list[str] = []
    for tokens in step.facts.sources:
        try:
            padded = padding_of_tokens(step.facts, tokens)
        except Unknown as reason:
            reasons.append(str(reason))
            continue
        for test in (_unmarked, _under_padding, _alone):
            yield from test(step, tokens, padded)
    if len(reasons) == len(step.facts.sources):
        raise Untestable(reasons[0] if reasons else "no tensor of the batch is looked up in an embedding")


def _unmarked(step: Step, tokens: Tokens, padded: Padding) -> Answers:
    """A mask of the batch that is open at padding."""
    own = step.facts.entries[tokens.place]
    for place, entry in step.facts.entries.items():
        same = entry.shape == own.shape and place != tokens.place and not entry.is_floating_point()
        if same and padded.mask is None and step.declare.pad_id is not None and bool((entry == 1).all()):
            say = (
                f"{int((~padded.real).sum())} positions of padding (id {padded.pad_id}) are marked as tokens"
            )
            yield fail(str(place[-1]) if place else "", say, "build the mask from the lengths of the rows")
            return


def _under_padding(step: Step, tokens: Tokens, padded: Padding) -> Answers:
    """The ids under a mask are exchanged; where the model makes its mask from the ids, that says nothing."""
    if padded.mask is None:
        return
    whole = part_of(torch.ones(step.facts.rows, dtype=torch.bool))
    inner = part_of(padded.real) if tokens.ids.shape == step.facts.tokens.ids.shape else whole

    def part(x: Tensor) -> Tensor | None:
        shown = inner(x)
        return whole(x) if shown is None else shown

    changed = step.facts.other_tokens(~padded.real, tokens)
    advice = "hand the mask on to attention, and to what pools or normalizes over positions"
    yield from moved(step, changed, part, "only ids under the mask", advice)


def _alone(step: Step, tokens: Tokens, padded: Padding) -> Answers:
    """One row alone, cut to its tokens."""
    facts, real = step.facts, padded.real
    others = {t.entry.shape[1] for t in facts.sources if t.place != facts.tokens.place}
    width = facts.tokens.ids.shape[1]
    row = next((i for i in range(len(real)) if 0 < int(real[i].sum()) < real.shape[1]), None)
    if tokens.place != facts.tokens.place or {width, width + 1} & others or row is None:
        return  # columns of a source and those of a decoder cannot be told apart in the batch
    places = real[row].nonzero().flatten()
    first, last = int(places[0]), int(places[-1]) + 1
    if last - first != len(places):
        return
    size = _off(step, row, first, last)
    if size > step.rounding:
        advice = "hand the mask to every layer" + ", and count positions from the first token" * bool(first)
        say = f"row {row} cut to its {last - first} tokens gives outputs {size:.1e} of their size off"
        yield fail("", say, advice)


def _off(step: Step, row: int, first: int, last: int) -> float:
    """How far the outputs of some columns of a row alone are from its own; 0 where it cannot be cut."""
    base, alone = step.logits(step.exact), None
    with suppress(Exception):  # a model of one width takes no other
        alone = step.logits(step.exact.again(batch=step.facts.cut(row, first, last)))
    if alone is None:
        return 0.0
    whole = (base if base.shape[0] == step.facts.rows else base.transpose(0, 1))[row : row + 1]
    alone = alone if alone.shape[0] == 1 else alone.transpose(0, 1)
    if _by_position(step, base):
        width = min(alone.shape[1], whole.shape[1] - first)
        whole, alone = whole[:, first : first + width], alone[:, :width]
    return distance(whole, alone) if whole.shape == alone.shape else 0.0  # scores of places have other shapes


@property_of("tokens", explains=["inputs"], passes=4)
def documents(step: Step) -> Answers:
    """Packed documents do not see each other, and positions begin anew in each: alone it gives the same."""
    facts, numbers = step.facts, step.facts.documents
    row = next((i for i, own in enumerate(numbers) if int(own.max()) > int(own.min())), None)
    if row is None:
        raise Untestable("each row holds one document")
    here, first = (torch.arange(len(numbers)) == row)[:, None], numbers == numbers[:, :1]
    border = torch.isin(facts.tokens.ids, torch.tensor(facts.borders, dtype=torch.long))
    part = part_of(here & ~first & facts.real(facts.tokens) & facts.counted)
    what, advice = "only tokens of the document before", "build a block-diagonal mask from the documents"
    yield from moved(step, facts.other_tokens(here & first & ~border), part, what, advice)
    second = (numbers[row] == numbers[row][~first[row]][0]).nonzero()
    size = _off(step, row, int(second[0]), int(second[-1]) + 1)
    if size > step.rounding:
        say = f"a document alone gives outputs {size:.1e} of their size off those in its row"
        yield fail("", say, "let positions begin anew at each document, and masks at the token after an end")


@property_of("tokens", passes=6, several=True)
def inputs(step: Step) -> Answers:
    """Every tensor that the model is given moves its outputs or the loss."""
    base = step.exact
    for place, entry in step.facts.entries.items():
        moves: list[bool] = []
        for other in _others(step, place, entry) if entry.numel() > 1 else ():
            with suppress(Exception):  # a value that the model does not take
                changed = base.again(batch=replaced(base.batch, place, other))
                pairs = [(base.loss, changed.loss), *zip(base.outputs, changed.outputs, strict=False)]
                moves.append(any(x.is_floating_point() and distance(x, y) > 0 for x, y in pairs))
            if any(moves):
                break
        if moves and not any(moves):
            name = ".".join(map(str, place)) or "batch"
            say = f"the entry {name} of the batch changes neither the outputs nor the loss"
            entered = [x for e in base.events if e.module == "" for x in e.inputs if x.shape == entry.shape]
            used = any(bool((x == entry).all()) for x in entered)
            yield fail(name, say, "the model does not use it") if used else note(name, say)


def _others(step: Step, place: Place, entry: Tensor) -> Iterator[Tensor]:
    """Other values of an entry, of the kind that it has."""
    tokens = next((t for t in step.facts.sources if t.place == place), None)
    if tokens is not None:
        yield at(step.facts.other_tokens(torch.ones_like(tokens.ids, dtype=torch.bool), tokens), place)
    elif set(torch.unique(entry).tolist()) <= {0, 1}:
        flipped = entry.clone()
        opposite = ~entry if entry.dtype == torch.bool else 1 - entry
        flipped[..., entry.shape[-1] // 2] = opposite[..., entry.shape[-1] // 2]
        yield from (flipped, opposite)
    elif entry.is_floating_point():
        yield entry.roll(1, 0) * 1.3 + 0.1
    elif len(own := torch.unique(entry[entry >= 0])) > 1:
        index = torch.searchsorted(own, entry.clamp_min(int(own[0])).contiguous())
        yield torch.where(entry >= 0, own[(index + 1) % len(own)], entry)
        yield entry.flip(-1)

"""Properties of tokens: which positions, rows and documents a prediction may depend on, and does depend on,
and whether their order is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import isnan, nan

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.checks.property import OTHER_BATCHES, Answers, Violation, fail, needs, note, property_of
from normlab.trace import compare
from normlab.trace.compare import Part, distance, part_of
from normlab.trace.exchanged import exchanged_patches, exchanged_places, exchanged_tokens, runs_over_tokens
from normlab.trace.facts import Unknown
from normlab.trace.facts.documents import repeats_documents
from normlab.trace.facts.padding import Arranged, Padding
from normlab.trace.facts.stacks import common, declares_itself, is_of_its_own_kind
from normlab.trace.facts.tokens import Tokens, hidden_tokens, with_others
from normlab.trace.facts.wiring import features_read
from normlab.trace.rearranged import off_arranged, off_with_more_frames, places_along
from normlab.trace.repeated import one_token, repeated, stream_variation, variation
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import Place, map_tensors, place_name, replaced

ROUNDINGS = 8
"""A score may be off by so many roundings of the model's own type, in which tables of angles may be kept."""
ALIKE = "rotate queries and keys alike, along the axis of positions"
ORDERED = "add position embeddings, or rotate queries and keys alike; or declare positions=False"
UNORDERED = "positions=False is declared: remove the positions, or do not declare it"


def _moved(
    step: StepUnderTest, batch: object, part: Part, what: str, do: str, *, training: bool = False
) -> Answers:
    """A failure if another batch moves the outputs in a part where it must not."""
    base = step.exact.again(training=True) if training else step.exact
    found = step.comparison.difference(base, base.again(batch=batch), part)
    if found is not None:
        mode = " in training mode" if training else ""
        say = f"outputs move by {found.size:.1e} of their size when {what} change{mode}"
        yield fail(found.module, say, do)


@property_of(
    "tokens",
    explains=["causality", "reach", "padding", "documents", "order", "cache"],
    passes=4,
    uses=OTHER_BATCHES,
)
def rows(step: StepUnderTest) -> Answers:
    """A row's outputs do not depend on the other rows of the batch, and follow the order of the rows."""
    facts, count, logits = step.facts, step.facts.rows, step.comparison.logits(step.exact)
    needs(count > 1, "the batch holds one row; pass a batch of two rows or more")
    needs(logits.ndim > 1 and count in logits.shape[:2], "the output has no axis for rows")
    needs(logits.shape != (count, count), "the output compares rows with each other")
    order, last = torch.arange(count), torch.arange(count) == count - 1
    exchanged = torch.cat([order[:-1].roll(1), order[-1:]])
    changed = facts.with_rows(exchanged)
    if facts.sources:
        tokens = facts.sources[0]
        changed = facts.other_tokens(facts.real(tokens) & ~last[:, None], tokens)
        held = (~facts.exchangeable(tokens)).sum(1)
        if held.any() and bool((held == held[0]).all()):  # what lies there is no token, and is exchanged
            changed = map_tensors(changed, lambda _, x: x[exchanged.to(x.device)] if _holds(x, count) else x)
    yield from _moved(step, changed, part_of(last), "only rows before the last", "mix within a row only")
    shown = step.comparison.logits(step.exact.again(batch=facts.with_rows(order.roll(1))))
    axis = 0 if logits.shape[0] == count else 1
    size = distance(logits.roll(1, axis), shown) if logits.shape == shown.shape else 0.0
    if size > step.rounding and not distance(logits, step.comparison.logits(step.exact.again(seed=1))):
        # random noise belongs to a row's place
        say = f"rows in another order change outputs by {size:.1e} of their size"
        yield fail("", say, "index nothing by row")


def _holds(x: Tensor, rows: int) -> bool:
    """Whether an entry of the batch holds numbers, such as an image, for each of so many rows."""
    return x.is_floating_point() and x.ndim > 1 and len(x) == rows


ALSO = ("reach", "order", "overfit", "cache", "documents", "training_equals_evaluation")


@property_of("tokens", explains=ALSO, passes=7, uses=OTHER_BATCHES)
def causality(step: StepUnderTest) -> Answers:
    """No prediction depends on its target or on a later token."""
    facts = step.facts
    needs(facts.causal, "the targets are not the next tokens; declare causal=True if the model looks back")
    (count, width), tested = facts.tokens.ids.shape, False
    for start in (0.5, 0.02):
        cuts = ((torch.arange(count) / count + start) % 1 * (width - 1)).long()
        later = torch.arange(width) > cuts[:, None]
        part = ~later & facts.counted
        if not part.any() or not later.any():
            continue
        tested, batch = True, facts.other_tokens(later)
        do = "mask the keys after each query; normalize and mix over features only"
        for training in (False, True):
            yield from _moved(step, batch, part_of(part), "only later tokens", do, training=training)
    needs(tested, "no target is counted before a later token")


@property_of("tokens", explains=["order"], passes=5, uses=OTHER_BATCHES)
def reach(step: StepUnderTest) -> Answers:
    """Predictions depend on the tokens that they may see, the previous one and earlier ones, and the loss
    asks for what the model is not shown.
    """
    if not step.facts.sources and (lost := _lost_tokens(step)) is not None:
        yield lost
        return
    facts, base = step.facts, step.comparison.logits(step.exact)
    words = facts.real(facts.tokens)
    # what the loss does not ask for need not see anything, such as padding at the end of a packed row
    asked = words & facts.counted
    places = torch.arange(facts.tokens.ids.shape[1])
    needs(len(places) > 1, "rows hold one token each")
    by_position, laid_out = facts.by_position(base), compare.laid_out(base, *facts.tokens.ids.shape)
    if by_position and laid_out is not None:  # the last token may have no prediction
        asked = asked & (places < laid_out.shape[1])
    last = (places * asked).max(1).values
    shortest = int((words & (places <= last[:, None])).sum(1).min())
    part = part_of(places == last[:, None] if by_position else torch.ones(len(words), dtype=torch.bool))
    shown, seen = part(base), dict[int, float]()
    if shown is None:
        raise Unknown("the output has no axis for positions or rows")
    needs(bool(last.any()), "no prediction has a token before it")
    for back in sorted(d for d in {1, 2, shortest // 2, shortest - 1} if 0 < d <= int(last.max())):
        there = places == (last - back)[:, None]
        if not bool((there & facts.exchangeable()).any()):
            continue
        batch = facts.other_tokens(there)
        other = part(step.comparison.logits(step.exact.again(batch=batch)))
        seen[back] = distance(shown, other) if other is not None else 0.0
    needs(seen, "what comes before a prediction keeps places, as for an image, and cannot be exchanged")
    near = [d for d in seen if seen[d]]
    early = words & (places < shortest // 2)
    if by_position and facts.declared.causal is False and early.any():
        other = step.comparison.logits(step.exact.again(batch=facts.other_tokens(words & ~early)))
        now, then = part_of(early)(base), part_of(early)(other)
        if near and now is not None and then is not None and not distance(now, then):
            say = f"outputs of the first {shortest // 2} tokens do not move when the others change"
            say += ", but causal=False is declared"
            yield fail("", say, "mask no later key")
    yield from _reached(step, seen, by_position=by_position)


def _reached(step: StepUnderTest, seen: Mapping[int, float], *, by_position: bool) -> Answers:
    """What the last position reaches, by how far it moves when the token so many places back changes."""
    near = [distance_back for distance_back, moved in seen.items() if moved]
    if not near:
        calls = step.exact.functions("scaled_dot_product_attention", "softmax")
        tried = ", ".join(map(str, seen))
        say = f"the last position's output does not move when the token {tried} back changes"
        do = "look at the mask's sign and what attention returns"
        yield fail(calls[0].module if calls else "", say, do)
    elif not seen.get(1, 1.0) and by_position:
        say = f"the last position does not see the token before it, but sees the one {min(near)} back"
        yield fail("", say, "the mask is off by one")
    elif len(near) < len(seen):
        far = [d for d in seen if d not in near]
        sees, hidden = (", ".join(map(str, distances)) for distances in (near, far))
        yield note("", f"the last position sees tokens {sees} back, but not {hidden} back")


def _lost_tokens(step: StepUnderTest) -> Violation | None:
    """Tokens that are hidden from the model, but that the loss does not ask for either."""
    facts, base = step.facts, step.exact
    for place, hidden in hidden_tokens(facts):
        entry = facts.entries[place]
        other = base.again(batch=replaced(base.batch, place, with_others(entry, hidden)))
        moved = max(
            distance(base.loss, other.loss),
            distance(step.comparison.logits(base), step.comparison.logits(other)),
        )
        is_padding = len(torch.unique(entry[hidden])) == 1
        if not is_padding and moved <= step.rounding:
            share = f"{int(hidden.sum())} of its {entry.numel()} tokens"
            say = f"{share} are looked up as one id, whatever they are, and nothing depends on them"
            return fail(place_name(place), say, "mask labels in a copy that shares no memory with the tokens")
    return None


@property_of("tokens", explains=["inputs", "padded_loss", "reach"], passes=5, uses=OTHER_BATCHES)
def padding(step: StepUnderTest) -> Answers:
    """Outputs do not depend on what the padding holds, how much there is, or at which end it is."""
    reasons: list[str] = []
    for tokens in step.facts.sources:
        try:
            padded = step.facts.padding_of(tokens)
        except Unknown as reason:
            reasons.append(str(reason))
            continue
        for test in (_unmarked, _under_padding, _arranged):
            yield from test(step, tokens, padded)
    frames_are_compared = False
    if (frames := step.facts.frames) is not None:
        size = off_with_more_frames(step, frames)
        frames_are_compared = not isnan(size)
        if size > step.rounding:
            say = f"one more frame of padding in {place_name(frames.place)} moves outputs by {size:.1e}"
            yield fail("", f"{say} of their size", "pass the mask, or the lengths, to every layer")
    if len(reasons) == len(step.facts.sources) and not frames_are_compared:
        raise Unknown(reasons[0] if reasons else "no tensor of the batch is looked up in an embedding")


def _unmarked(step: StepUnderTest, tokens: Tokens, padded: Padding) -> Answers:
    """A mask of the batch that is open at padding."""
    own = step.facts.entries[tokens.place]
    for place, entry in step.facts.entries.items():
        same = entry.shape == own.shape and place != tokens.place and not entry.is_floating_point()
        if same and padded.mask is None and step.declare.pad_id is not None and bool((entry == 1).all()):
            say = f"it is 1 at {int((~padded.real).sum())} positions of padding (id {padded.pad_id})"
            yield fail(str(place[-1]) if place else "", say, "build the mask from the lengths of the rows")


def _under_padding(step: StepUnderTest, tokens: Tokens, padded: Padding) -> Answers:
    """The ids under a mask are exchanged; if the model makes its mask from the ids, that says nothing."""
    if padded.mask is None:
        return
    whole = padded.real.all(1)  # what pools over positions may read the ids of the other rows
    inside = tokens.ids.shape == step.facts.tokens.ids.shape
    part = part_of(padded.real, whole | ~whole.any()) if inside else part_of(torch.ones_like(whole))
    changed = step.facts.other_tokens(~padded.real, tokens)
    advice = "pass the mask to attention, and to what pools or normalizes over positions"
    yield from _moved(step, changed, part, "only ids under the mask", advice)


def _arranged(step: StepUnderTest, tokens: Tokens, padded: Padding) -> Answers:
    """One row cut to its tokens, more padding, and padding at the other end.

    A difference at the other end is no failure if tokens are counted from the first column, because outputs
    then depend on how much padding there is, or if what is under it is seen, as under a mask of the loss.
    """
    facts, real, ways = step.facts, padded.real, padded.arranged()
    main, where = tokens.place == facts.tokens.place, places_along(facts, tokens, padded)

    def off(way: str, other: Arranged | None = None) -> float:  # may be NaN, neither above nor below
        return off_arranged(step, real, ways[way], other, **where) if way in ways else nan

    if (size := off("cut")) > step.rounding:
        advice = "pass the mask to every layer, and count positions from the first token"
        yield fail("", f"a row cut to its tokens gives outputs {size:.1e} off", advice)
    elif (size := off("more")) > step.rounding:
        say = f"one more column of padding moves outputs by {size:.1e} of their size"
        yield fail("", say, "do not count padding in means, positions and lengths")
    elif (size := off("moved")) > step.rounding:
        other = ways["moved"]._replace(batch=facts.other_tokens(~real, tokens))
        say = f"padding at the other end moves outputs by {size:.1e} of their size"
        sizes = off("moved", other), off("moved on", ways["moved"])
        if main and padded.mask is not None and all(size <= step.rounding for size in sizes):
            yield fail("", f"{say}, however much there is", "count positions from the first token")
        else:
            why = "padding is seen there, or tokens are counted from the first column"
            yield note("", f"{say}, which matters only if a batch is padded there: {why}")


@property_of("tokens", explains=["state_dict"], passes=4, uses=OTHER_BATCHES)
def order(step: StepUnderTest) -> Answers:
    """The order of the tokens changes the outputs, in each layer that encodes positions, unless no block runs
    over them.
    """
    facts, base, causal = step.facts, step.comparison.logits(step.exact), False
    if not facts.sources:
        what, exchange = "patches", exchanged_patches(facts, base)
    elif facts.tokens.ids.shape[1] < 6:
        raise Unknown("rows hold fewer than six tokens")
    else:
        with suppress(Unknown):
            causal = facts.causal
        if causal:
            yield from _in_each_layer(step)
            return
        what, exchange = "tokens", exchanged_tokens(facts, base)
    place = exchange.module or common([f.module for f in facts.lookups])
    exchanged = step.exact.again(batch=exchange.batch)
    other = step.comparison.logits(exchanged)
    unseen, say = distance(exchange.expected, other) <= step.rounding, f"swapping two {what}"
    if step.declare.positions is False:
        if not unseen and facts.sources:  # what the batch holds of a token goes with it
            exchange = exchanged_places(facts, base)
            other = step.comparison.logits(step.exact.again(batch=exchange.batch))
            unseen = distance(exchange.expected, other) <= step.rounding
        if not unseen:
            yield fail(place, f"{say} does more than that to their outputs", UNORDERED)
    elif unseen:
        say += " only swaps their outputs"
        if facts.sources and not runs_over_tokens(step, exchanged):
            yield note(place, f"{say}: no block runs over them, so what reads them reads a set")
        else:
            yield fail(place, say, ORDERED) if exchange.has_positions else note(place, say)


def _in_each_layer(step: StepUnderTest) -> Answers:
    rows, width = step.facts.tokens.ids.shape
    types = {x.dtype for x in (*step.model.parameters(), *step.model.buffers()) if x.is_floating_point()}
    least = ROUNDINGS * max(torch.finfo(dtype).eps for dtype in types)
    trace = step.exact.again(batch=one_token(step.facts))
    layers = list(repeated(trace, width))
    needs(layers, "no scores of self-attention are seen, so layers cannot be told apart")
    first, flat = layers[0], [one for one in layers if one.slope < least]
    varies = stream_variation(trace, first.module, (rows, width)) > least
    if step.declare.positions is False and (varies or len(flat) < len(layers)):
        yield fail(first.module, "what it makes of one repeated token differs by position", UNORDERED)
    if varies or step.declare.positions is False:
        return
    if first.values is not None and variation(first.values, 2) > least:
        yield fail(first.module, "values of one repeated token differ by position", "do not rotate values")
    if first.turned is not None and min(first.turned) < least < max(first.turned):
        turned, other = ("queries", "keys") if first.turned[0] > least else ("keys", "queries")
        say = f"{turned} of one repeated token are turned by their position, but {other} are not"
        yield fail(first.module, say, ALIKE)
    # whatever attention weighs equal values by, their mean is the same at each position: outputs that differ
    # get their order from something else that follows, such as a recurrence or a convolution
    outputs = compare.laid_out(step.comparison.logits(trace), rows, width)
    elsewhere = outputs is not None and variation(outputs, 1) > step.rounding
    same = "the scores of one repeated token"
    if len(flat) == len(layers) and not elsewhere:
        say = f"{same} are the same at every distance in all layers, and nothing else tells positions apart"
        yield fail(first.module, say, ORDERED)
    if first.slope >= least and (size := first.beyond_distance) > least:
        say = f"{same} depend on more than the distance, by {size:.1e} of their size"
        yield fail(first.module, say, ALIKE)
    if flat and not elsewhere:
        say, place = f"{len(flat)} of {len(layers)} layers see no positions", flat[0].module
        few, every = len(flat) > 1 or len(layers) < 3, [one.module for one in layers]
        meant = few or declares_itself(step.facts.stacks, place, every)
        meant |= is_of_its_own_kind(step.model, place, every)
        yield note(place, say) if meant else fail(place, say, "this layer has lost its positions")


@property_of("tokens", explains=["inputs"], passes=4, uses=OTHER_BATCHES)
def documents(step: StepUnderTest) -> Answers:
    """Packed documents do not see each other, and positions restart in each of them."""
    facts, numbers = step.facts, step.facts.documents
    packed = [i for i, own in enumerate(numbers) if int(own.max()) > int(own.min())]
    needs(packed, "each row holds one document")
    row = packed[0]
    here, first = (torch.arange(len(numbers)) == row)[:, None], numbers == numbers[:, :1]
    border = torch.isin(facts.tokens.ids, torch.tensor(facts.borders, dtype=torch.long))
    part = part_of(here & ~first & facts.real(facts.tokens) & facts.counted)
    what, advice = "only tokens of the document before", "build a block-diagonal mask from the documents"
    yield from _moved(step, facts.other_tokens(here & first & ~border), part, what, advice)
    second = here & (numbers == numbers[row][~first[row]][0])
    alone = Padding(second, "", None, None).arranged()["cut"]
    if (size := off_arranged(step, second, alone)) > step.rounding:
        say = f"a document alone gives outputs {size:.1e} of their size off those in its row"
        yield fail("", say, "restart positions at each document, and masks at the token after an end")
    with suppress(Unknown):
        yield from _across_borders(step, numbers)


def _across_borders(step: StepUnderTest, numbers: Tensor) -> Answers:
    """A note if the loss asks a document for the beginning of the next one, which differs from row to row."""
    facts, asked = step.facts, step.facts.targets
    if facts.shift != 1 or numbers.shape != asked.ids.shape:
        return
    crossing = asked.counted & F.pad(numbers[:, 1:] != numbers[:, :-1], (0, 1))
    if len(torch.unique(asked.ids[crossing])) > 1:
        share = f"{int(crossing.sum())} of {int(asked.counted.sum())} counted targets"
        why = "which nothing in the current one predicts"
        yield note("loss", f"{share} are the first token of the next document, {why}")


@property_of("tokens", passes=6, several=True, uses=OTHER_BATCHES)
def inputs(step: StepUnderTest) -> Answers:
    """Every tensor that the model is given affects its outputs or the loss, and so does each of the features
    that its maps read.

    Where the model keeps packed documents apart, it need not be told of them twice.
    """
    for place, entry in step.facts.entries.items():
        if entry.numel() < 2:
            continue
        if step.comparison.moves(place) is not False:
            yield from _unread_features(step, place, entry)
        else:
            name, events = place_name(place), step.exact.events
            say = f"the entry {name} of the batch changes neither the outputs nor the loss"
            entered = [x for e in events if e.outermost for x in e.inputs if x.shape == entry.shape]
            used = any(bool((x == entry).all()) for x in entered)
            if not used:
                yield note(name, say)
            elif _is_spare(step, entry):
                yield note(name, f"{say}; the model keeps the documents apart without it")
            else:
                yield fail(name, say, "the model does not use it")
    needs(not step.facts.has_nested, "the batch holds a nested tensor, of which no other value is tried")


def _unread_features(step: StepUnderTest, place: Place, entry: Tensor) -> Answers:
    """Features that nothing reads, beside others that maps read with weights for each of them."""
    if entry.ndim < 2 or not entry.is_floating_point():
        return
    read = features_read(step.exact, place)
    if read.any() and not read.all():
        other = torch.where(read.to(entry.device), entry, entry.roll(1, 0) * 1.3 + 0.1)
        if step.comparison.moves(place, [other]) is False:
            name, left = place_name(place), (~read).nonzero()[:, 0]
            say = f"{len(left)} of the {len(read)} features of {name}, from number {int(left[0])} on, change"
            where = f"{say} neither the outputs nor the loss; maps read the others"
            yield fail(name, where, "look at how it is cut into parts")


def _is_spare(step: StepUnderTest, entry: Tensor) -> bool:
    """Whether an entry only repeats the bounds of documents, or masks none of their tokens, and the model
    keeps the documents apart without it.
    """
    with suppress(Unknown):
        if repeats_documents(entry, step.facts.tokens, step.facts.documents):
            return not any(isinstance(answer, Violation) for answer in documents(step))
    return False

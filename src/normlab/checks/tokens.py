"""Test what predictions depend on: which tokens, rows and documents they may see, do see, and in which order.

Each test changes some tokens of the batch and looks at the outputs that must, or must not, move. The changed
batch keeps its shapes, since another shape would be rounded in another way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from normlab.trace.repeated import Repeated, one_token, repeated, stream_variation, variation
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import Place, map_tensors, place_name, replaced

ROUNDINGS = 8
"""A score may be off by so many roundings of the model's own type, in which tables of angles may be kept."""
ALIKE = "rotate queries and keys alike, along the axis of positions"
ORDERED = "add position embeddings, or rotate queries and keys alike; or declare positions=False"
UNORDERED = "positions=False is declared: remove the positions, or do not declare it"


def _moved(
    step: StepUnderTest, batch: object, part: Part, what: str, advice: str, *, training: bool = False
) -> Answers:
    """A failure if another batch moves the outputs in a part where it must not.

    Args:
        step: the step.
        batch: the other batch.
        part: selects the outputs that must not move.
        what: what the other batch has changed, in words.
        advice: what to do.
        training: whether to compare in training mode.
    """
    base = step.exact.again(training=True) if training else step.exact
    difference = step.comparison.difference(base, base.again(batch=batch), part)
    if difference is not None:
        mode = " in training mode" if training else ""
        evidence = f"outputs move by {difference.size:.2g} of their size when {what} change{mode}"
        yield fail(difference.module, evidence, advice)


# -------------------------------------------------------------------------------------------------- rows


@property_of(
    "tokens",
    explains=["causality", "reach", "padding", "documents", "order", "cache"],
    passes=4,
    uses=OTHER_BATCHES,
)
def rows(step: StepUnderTest) -> Answers:
    """A row's outputs do not depend on the other rows of the batch, and follow the order of the rows.

    f(x)[i] is the same for all x with the same row x[i], and f(πx) = πf(x).
    """
    facts, count, logits = step.facts, step.facts.rows, step.comparison.logits(step.exact)
    needs(count > 1, "the batch holds one row; pass a batch of two rows or more")
    needs(logits.ndim > 1 and count in logits.shape[:2], "the output has no axis for rows")
    needs(logits.shape != (count, count), "the output compares rows with each other")
    order, last = torch.arange(count), torch.arange(count) == count - 1
    changed = _with_other_rows(step, order, last)
    yield from _moved(step, changed, part_of(last), "only rows before the last", "mix within a row only")

    in_another_order = step.exact.again(batch=facts.with_rows(order.roll(1)))
    reordered = step.comparison.logits(in_another_order)
    axis = 0 if logits.shape[0] == count else 1
    size = distance(logits.roll(1, axis), reordered) if logits.shape == reordered.shape else 0.0
    if size <= step.rounding:
        return
    # random noise belongs to a row's place
    is_drawn = bool(distance(logits, step.comparison.logits(step.exact.again(seed=1))))
    if not is_drawn:
        evidence = f"rows in another order change outputs by {size:.2g} of their size"
        yield fail("", evidence, "index nothing by row")


def _with_other_rows(step: StepUnderTest, order: Tensor, last: Tensor) -> object:
    """Return the batch with other rows before the last: other tokens in them, or rows in other places."""
    facts = step.facts
    exchanged = torch.cat([order[:-1].roll(1), order[-1:]])
    changed: object = facts.with_rows(exchanged)  # raises Unknown where rows cannot change places
    if not facts.sources:
        return changed
    tokens = facts.sources[0]
    changed = facts.other_tokens(facts.real(tokens) & ~last[:, None], tokens)
    placeholders = (~facts.exchangeable(tokens)).sum(1)
    # what lies there is no token, and is exchanged; rows with as many places fit each other's
    if placeholders.any() and bool((placeholders == placeholders[0]).all()):
        count = len(order)
        return map_tensors(changed, lambda _, x: x[exchanged.to(x.device)] if _holds_by_row(x, count) else x)
    return changed


def _holds_by_row(entry: Tensor, rows: int) -> bool:
    """Whether an entry of the batch holds numbers, such as an image, for each of so many rows."""
    return entry.is_floating_point() and entry.ndim > 1 and len(entry) == rows


# ------------------------------------------------------------------------------------- causality and reach

OF_CAUSALITY = ("reach", "order", "overfit", "cache", "documents", "training_equals_evaluation")


@property_of("tokens", explains=OF_CAUSALITY, passes=7, uses=OTHER_BATCHES)
def causality(step: StepUnderTest) -> Answers:
    """No prediction depends on its target or on a later token.

    logits[t] are the same for all x with the same x[≤ t]. The rows are cut at different places, so that a
    few passes look at many positions.
    """
    facts = step.facts
    needs(facts.causal, "the targets are not the next tokens; declare causal=True if the model looks back")
    (count, width), tested = facts.tokens.ids.shape, False
    for start in (0.5, 0.02):
        shares = (torch.arange(count) / count + start) % 1
        cuts = (shares * (width - 1)).long()
        later = torch.arange(width) > cuts[:, None]
        part = ~later & facts.counted
        if not part.any() or not later.any():
            continue
        tested, batch = True, facts.other_tokens(later)
        advice = "mask the keys after each query; normalize and mix over features only"
        # in both modes: fused attention and batch statistics may run in one of them alone
        for training in (False, True):
            yield from _moved(step, batch, part_of(part), "only later tokens", advice, training=training)
    needs(tested, "no target is counted before a later token")


@dataclass(frozen=True, eq=False)
class _LastPredictions:
    """The last prediction of each row that the loss asks for."""

    outputs: Tensor
    """All outputs of the model."""
    by_position: bool
    """Whether these have an axis for positions."""
    words: Tensor
    """Where tokens are real, `[B, T]`."""
    last: Tensor
    """The position of the prediction, `[B]`."""
    shortest: int
    """The number of words up to it in the row that has the fewest."""
    part: Part
    """Selects it from outputs."""

    @property
    def places(self) -> Tensor:
        """The positions `[T]`."""
        return torch.arange(self.words.shape[1])

    def distances_back(self) -> list[int]:
        """Return how far back a token is exchanged: the nearest ones, one half-way, and the first."""
        wanted = {1, 2, self.shortest // 2, self.shortest - 1}
        return sorted(distance_back for distance_back in wanted if 0 < distance_back <= int(self.last.max()))


@property_of("tokens", explains=["order"], passes=5, uses=OTHER_BATCHES)
def reach(step: StepUnderTest) -> Answers:
    """Predictions depend on the tokens that they may see, the previous one and earlier ones, and the loss
    asks for what the model is not shown.

    logits[T] change when x[T − 1], or an earlier token, changes. A mask with a wrong sign passes every test
    of what must not be seen.
    """
    if not step.facts.sources and (lost := _lost_tokens(step)) is not None:
        yield lost
        return
    predictions = _last_predictions(step)
    moved = _moved_from_afar(step, predictions)
    needs(moved, "what comes before a prediction keeps places, as for an image, and cannot be exchanged")
    if any(moved.values()):
        yield from _masks_later_keys(step, predictions)
    yield from _reached(step, moved, by_position=predictions.by_position)


def _last_predictions(step: StepUnderTest) -> _LastPredictions:
    """Return the last prediction of each row. Raises Unknown if there is none with a token before it."""
    facts, outputs = step.facts, step.comparison.logits(step.exact)
    words = facts.real(facts.tokens)
    # what the loss does not ask for need not see anything, such as padding at the end of a packed row
    asked = words & facts.counted
    places = torch.arange(facts.tokens.ids.shape[1])
    needs(len(places) > 1, "rows hold one token each")
    by_position = facts.by_position(outputs)
    laid_out = compare.laid_out(outputs, *facts.tokens.ids.shape)
    if by_position and laid_out is not None:  # the last token may have no prediction
        asked = asked & (places < laid_out.shape[1])
    last = (places * asked).max(1).values
    shortest = int((words & (places <= last[:, None])).sum(1).min())
    part = part_of(places == last[:, None] if by_position else torch.ones(len(words), dtype=torch.bool))
    if part(outputs) is None:
        raise Unknown("the output has no axis for positions or rows")
    needs(bool(last.any()), "no prediction has a token before it")
    return _LastPredictions(outputs, by_position, words, last, shortest, part)


def _moved_from_afar(step: StepUnderTest, predictions: _LastPredictions) -> dict[int, float]:
    """Return how far the last predictions move when the token so many places back is another one."""
    facts, moved = step.facts, dict[int, float]()
    unchanged = predictions.part(predictions.outputs)
    for distance_back in predictions.distances_back():
        exchanged = predictions.places == (predictions.last - distance_back)[:, None]
        if not bool((exchanged & facts.exchangeable()).any()):
            continue
        other = step.exact.again(batch=facts.other_tokens(exchanged))
        changed = predictions.part(step.comparison.logits(other))
        if unchanged is None or changed is None:
            moved[distance_back] = 0.0
        else:
            moved[distance_back] = distance(unchanged, changed)
    return moved


def _masks_later_keys(step: StepUnderTest, predictions: _LastPredictions) -> Answers:
    """Outputs at the beginning that do not move with what follows, where causal=False is declared."""
    facts, words = step.facts, predictions.words
    early = words & (predictions.places < predictions.shortest // 2)
    if not predictions.by_position or facts.declared.causal is not False or not early.any():
        return
    with_other_ends = step.exact.again(batch=facts.other_tokens(words & ~early))
    before = part_of(early)(predictions.outputs)
    after = part_of(early)(step.comparison.logits(with_other_ends))
    if before is not None and after is not None and not distance(before, after):
        evidence = (
            f"outputs of the first {predictions.shortest // 2} tokens do not move when the others change"
        )
        evidence += ", but causal=False is declared"
        yield fail("", evidence, "mask no later key")


def _reached(step: StepUnderTest, moved: Mapping[int, float], *, by_position: bool) -> Answers:
    """What the last position reaches, by how far it moves when the token so many places back changes."""
    near = [distance_back for distance_back, size in moved.items() if size]
    if not near:
        calls = step.exact.functions("scaled_dot_product_attention", "softmax")
        tried = ", ".join(map(str, moved))
        evidence = f"the last position's output does not move when the token {tried} back changes"
        advice = "look at the mask's sign and what attention returns"
        yield fail(calls[0].module if calls else "", evidence, advice)
    elif not moved.get(1, 1.0) and by_position:
        evidence = f"the last position does not see the token before it, but sees the one {min(near)} back"
        yield fail("", evidence, "the mask is off by one")
    elif len(near) < len(moved):  # a window, or padding in front
        far = [distance_back for distance_back in moved if distance_back not in near]
        sees, hidden = (", ".join(map(str, distances)) for distances in (near, far))
        yield note("", f"the last position sees tokens {sees} back, but not {hidden} back")


def _lost_tokens(step: StepUnderTest) -> Violation | None:
    """Tokens that the model is not shown, and that the loss does not ask for either."""
    facts, base = step.facts, step.exact
    for place, hidden in hidden_tokens(facts):
        entry = facts.entries[place]
        other = base.again(batch=replaced(base.batch, place, with_others(entry, hidden)))
        of_loss = distance(base.loss, other.loss)
        of_outputs = distance(step.comparison.logits(base), step.comparison.logits(other))
        is_padding = len(torch.unique(entry[hidden])) == 1
        if not is_padding and max(of_loss, of_outputs) <= step.rounding:
            share = f"{int(hidden.sum())} of its {entry.numel()} tokens"
            evidence = f"{share} are looked up as one id, whatever they are, and nothing depends on them"
            advice = "mask labels in a copy that shares no memory with the tokens"
            return fail(place_name(place), evidence, advice)
    return None


# ------------------------------------------------------------------------------------------------ padding


@property_of("tokens", explains=["inputs", "padded_loss", "reach"], passes=5, uses=OTHER_BATCHES)
def padding(step: StepUnderTest) -> Answers:
    """Outputs do not depend on what the padding holds, how much there is, or at which end it is.

    f(x)[real] is the same for any padding: that is what it means that a place holds nothing.
    """
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
            evidence = f"one more frame of padding in {place_name(frames.place)} moves outputs by {size:.2g}"
            evidence += " of their size"
            yield fail("", evidence, "pass the mask, or the lengths, to every layer")
    if len(reasons) == len(step.facts.sources) and not frames_are_compared:
        raise Unknown(reasons[0] if reasons else "no tensor of the batch is looked up in an embedding")


def _unmarked(step: StepUnderTest, tokens: Tokens, padded: Padding) -> Answers:
    """A mask of the batch that is open at padding."""
    if padded.mask is not None or step.declare.pad_id is None:
        return
    ids = step.facts.entries[tokens.place]
    for place, entry in step.facts.entries.items():
        may_be_mask = entry.shape == ids.shape and place != tokens.place and not entry.is_floating_point()
        if may_be_mask and bool((entry == 1).all()):
            evidence = f"it is 1 at {int((~padded.real).sum())} positions of padding (id {padded.pad_id})"
            advice = "build the mask from the lengths of the rows"
            yield fail(str(place[-1]) if place else "", evidence, advice)


def _under_padding(step: StepUnderTest, tokens: Tokens, padded: Padding) -> Answers:
    """The ids under a mask are exchanged; if the model makes its mask from the ids, that says nothing."""
    if padded.mask is None:
        return
    # what pools over positions may read the ids of the other rows: then rows without padding must not move
    has_no_padding = padded.real.all(1)
    by_row = has_no_padding | ~has_no_padding.any()
    along_outputs = tokens.ids.shape == step.facts.tokens.ids.shape
    if along_outputs:
        part = part_of(padded.real, by_row)
    else:
        part = part_of(torch.ones_like(has_no_padding))
    changed = step.facts.other_tokens(~padded.real, tokens)
    advice = "pass the mask to attention, and to what pools or normalizes over positions"
    yield from _moved(step, changed, part, "only ids under the mask", advice)


def _arranged(step: StepUnderTest, tokens: Tokens, padded: Padding) -> Answers:
    """One row cut to its tokens, more padding, and padding at the other end.

    A difference at the other end is no failure if tokens are counted from the first column, because outputs
    then depend on how much padding there is, or if what is under it is seen, as under a mask of the loss.
    """
    facts, real, ways = step.facts, padded.real, padded.arranged()
    along = places_along(facts, tokens, padded)

    def off(way: str, other: Arranged | None = None) -> float:
        """Return how far outputs are off if arranged in one way; NaN, neither above nor below any limit, if
        this batch does not allow it.
        """
        return off_arranged(step, real, ways[way], other, **along) if way in ways else nan

    if (size := off("cut")) > step.rounding:
        advice = "pass the mask to every layer, and count positions from the first token"
        yield fail("", f"a row cut to its tokens gives outputs {size:.2g} off", advice)
    elif (size := off("more")) > step.rounding:
        evidence = f"one more column of padding moves outputs by {size:.2g} of their size"
        yield fail("", evidence, "do not count padding in means, positions and lengths")
    elif (size := off("moved")) > step.rounding:
        evidence = f"padding at the other end moves outputs by {size:.2g} of their size"
        with_other_ids = ways["moved"]._replace(batch=facts.other_tokens(~real, tokens))
        # there, neither what is under the padding nor how much there is of it may matter
        sizes = off("moved", with_other_ids), off("moved on", ways["moved"])
        is_main = tokens.place == facts.tokens.place
        if is_main and padded.mask is not None and all(size <= step.rounding for size in sizes):
            advice = "count positions from the first token"
            yield fail("", f"{evidence}, however much there is", advice)
        else:
            why = "padding is seen there, or tokens are counted from the first column"
            yield note("", f"{evidence}, which matters only if a batch is padded there: {why}")


# -------------------------------------------------------------------------------------------------- order


@property_of("tokens", explains=["state_dict"], passes=4, uses=OTHER_BATCHES)
def order(step: StepUnderTest) -> Answers:
    """The order of the tokens changes the outputs, in each layer that encodes positions, unless no block runs
    over them.

    Without positions, attention is equivariant: f(x with tokens i and j swapped) = f(x) with outputs i and j
    swapped. In a causal model the mask alone tells positions apart, so its scores are looked at instead.
    """
    facts, outputs, causal = step.facts, step.comparison.logits(step.exact), False
    if not facts.sources:
        what, exchange = "patches", exchanged_patches(facts, outputs)
    elif facts.tokens.ids.shape[1] < 6:
        raise Unknown("rows hold fewer than six tokens")
    else:
        with suppress(Unknown):
            causal = facts.causal
        if causal:
            yield from _in_each_layer(step)
            return
        what, exchange = "tokens", exchanged_tokens(facts, outputs)
    place = exchange.module or common([lookup.module for lookup in facts.lookups])
    exchanged = step.exact.again(batch=exchange.batch)
    only_swapped = distance(exchange.expected, step.comparison.logits(exchanged)) <= step.rounding
    evidence = f"swapping two {what}"
    if step.declare.positions is False:
        if not only_swapped and facts.sources:  # what the batch holds of a token goes with it
            exchange = exchanged_places(facts, outputs)
            swapped = step.comparison.logits(step.exact.again(batch=exchange.batch))
            only_swapped = distance(exchange.expected, swapped) <= step.rounding
        if not only_swapped:
            yield fail(place, f"{evidence} does more than that to their outputs", UNORDERED)
    elif only_swapped:
        evidence += " only swaps their outputs"
        if facts.sources and not runs_over_tokens(step, exchanged):
            yield note(place, f"{evidence}: no block runs over them, so what reads them reads a set")
        elif exchange.has_positions:
            yield fail(place, evidence, ORDERED)
        else:
            yield note(place, evidence)


def _in_each_layer(step: StepUnderTest) -> Answers:
    """Scores of a causal model that is given one repeated token: only its position tells one from another.

    scores[t, s] = a[t] g(t − s) + b[t], with g not constant.
    """
    rows, width = step.facts.tokens.ids.shape
    types = {x.dtype for x in (*step.model.parameters(), *step.model.buffers()) if x.is_floating_point()}
    least = ROUNDINGS * max(torch.finfo(dtype).eps for dtype in types)
    trace = step.exact.again(batch=one_token(step.facts))
    layers = list(repeated(trace, width))
    needs(layers, "no scores of self-attention are seen, so layers cannot be told apart")
    first, flat = layers[0], [layer for layer in layers if layer.slope < least]
    # positions that are added to the stream differ before any attention: then scores may do anything
    stream_varies = stream_variation(trace, first.module, (rows, width)) > least
    if step.declare.positions is False:
        if stream_varies or len(flat) < len(layers):
            evidence = "what it makes of one repeated token differs by position"
            yield fail(first.module, evidence, UNORDERED)
        return
    if stream_varies:
        return
    yield from _turned_alike(first, least)
    # whatever attention weighs equal values by, their mean is the same at each position: outputs that differ
    # get their order from something else that follows, such as a recurrence or a convolution
    outputs = compare.laid_out(step.comparison.logits(trace), rows, width)
    elsewhere = outputs is not None and variation(outputs, 1) > step.rounding
    scores = "the scores of one repeated token"
    if len(flat) == len(layers) and not elsewhere:
        evidence = f"{scores} are the same at every distance in all layers, "
        evidence += "and nothing else tells positions apart"
        yield fail(first.module, evidence, ORDERED)
    if first.slope >= least and (size := first.beyond_distance) > least:
        evidence = f"{scores} depend on more than the distance, by {size:.2g} of their size"
        yield fail(first.module, evidence, ALIKE)
    if flat and not elsewhere:
        yield from _without_positions(step, flat, layers)


def _turned_alike(layer: Repeated, least: float) -> Answers:
    """Queries and keys are turned by their positions, or neither are; values never are."""
    if layer.values is not None and variation(layer.values, 2) > least:
        yield fail(layer.module, "values of one repeated token differ by position", "do not rotate values")
    if layer.turned is not None and min(layer.turned) < least < max(layer.turned):
        turned, other = ("queries", "keys") if layer.turned[0] > least else ("keys", "queries")
        evidence = f"{turned} of one repeated token are turned by their position, but {other} are not"
        yield fail(layer.module, evidence, ALIKE)


def _without_positions(step: StepUnderTest, flat: Sequence[Repeated], layers: Sequence[Repeated]) -> Answers:
    """Layers whose scores are the same at every distance, beside others."""
    evidence, place = f"{len(flat)} of {len(layers)} layers see no positions", flat[0].module
    modules = [layer.module for layer in layers]
    # a single layer of three or more that says nowhere that it is special has lost them
    is_meant = (
        len(flat) > 1
        or len(layers) < 3
        or declares_itself(step.facts.stacks, place, modules)
        or is_of_its_own_kind(step.model, place, modules)
    )
    if is_meant:
        yield note(place, evidence)
    else:
        yield fail(place, evidence, "this layer has lost its positions")


# ------------------------------------------------------------------------------------ documents and inputs


@property_of("tokens", explains=["inputs"], passes=4, uses=OTHER_BATCHES)
def documents(step: StepUnderTest) -> Answers:
    """Packed documents do not see each other, and positions restart in each of them.

    logits of document k are the same alone, and behind any other document: so its loss is the one that it
    has alone.
    """
    facts, numbers = step.facts, step.facts.documents
    packed = [row for row, of_row in enumerate(numbers) if int(of_row.max()) > int(of_row.min())]
    needs(packed, "each row holds one document")
    row = packed[0]
    in_row, in_first = (torch.arange(len(numbers)) == row)[:, None], numbers == numbers[:, :1]
    # a token that ends documents keeps its place: a model may tell documents apart by it
    border = torch.isin(facts.tokens.ids, torch.tensor(facts.borders, dtype=torch.long))
    part = part_of(in_row & ~in_first & facts.real(facts.tokens) & facts.counted)
    what, advice = "only tokens of the document before", "build a block-diagonal mask from the documents"
    yield from _moved(step, facts.other_tokens(in_row & in_first & ~border), part, what, advice)
    second = in_row & (numbers == numbers[row][~in_first[row]][0])
    # as a row that is cut to what is real in it, of which only that document is
    alone = Padding(second, "", None, None).arranged()["cut"]
    if (size := off_arranged(step, second, alone)) > step.rounding:
        evidence = f"a document alone gives outputs {size:.2g} of their size off those in its row"
        advice = "restart positions at each document, and masks at the token after an end"
        yield fail("", evidence, advice)
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
        if step.comparison.moves(place) is not False:  # None: no other value could be tried
            yield from _unread_features(step, place, entry)
        elif not _enters_model(step, entry):
            yield note(place_name(place), _changes_nothing(place))
        elif _is_spare(step, entry):
            evidence = f"{_changes_nothing(place)}; the model keeps the documents apart without it"
            yield note(place_name(place), evidence)
        else:
            yield fail(place_name(place), _changes_nothing(place), "the model does not use it")
    needs(not step.facts.has_nested, "the batch holds a nested tensor, of which no other value is tried")


def _changes_nothing(place: Place) -> str:
    return f"the entry {place_name(place)} of the batch changes neither the outputs nor the loss"


def _enters_model(step: StepUnderTest, entry: Tensor) -> bool:
    """Whether a call of the model from outside is given this entry: what only the loss has need not count."""
    for event in step.exact.events:
        if event.outermost and any(x.shape == entry.shape and bool((x == entry).all()) for x in event.inputs):
            return True
    return False


def _unread_features(step: StepUnderTest, place: Place, entry: Tensor) -> Answers:
    """Features that nothing reads, beside others that maps read with weights for each of them."""
    if entry.ndim < 2 or not entry.is_floating_point():
        return
    read = features_read(step.exact, place)
    if not read.any() or read.all():
        return
    others = torch.where(read.to(entry.device), entry, entry.roll(1, 0) * 1.3 + 0.1)
    if step.comparison.moves(place, [others]) is False:
        name, unread = place_name(place), (~read).nonzero()[:, 0]
        evidence = f"{len(unread)} of the {len(read)} features of {name}, from number {int(unread[0])} on, "
        evidence += "change neither the outputs nor the loss; maps read the others"
        yield fail(name, evidence, "look at how it is cut into parts")


def _is_spare(step: StepUnderTest, entry: Tensor) -> bool:
    """Whether an entry only repeats the bounds of documents, or masks none of their tokens, and the model
    keeps the documents apart without it.
    """
    with suppress(Unknown):
        if repeats_documents(entry, step.facts.tokens, step.facts.documents):
            return not any(isinstance(answer, Violation) for answer in documents(step))
    return False

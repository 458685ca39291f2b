"""Properties of tokens: which positions, rows and documents a prediction may depend on, and does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.compare import distance, part_of
from normlab.trace.facts.facts import Tokens
from normlab.trace.facts.padding import Padding, padding_of_tokens
from normlab.trace.facts.unknown import Unknown
from normlab.trace.tensors import Place, map_tensors, replaced

Answers = Iterator[Violation | Note]


@property_of("tokens", explains=["causality", "reach", "padding", "documents", "order", "cache"], passes=3)
def rows(step: Step) -> Answers:
    """The other rows of a batch change nothing in a row, and outputs follow the order of the rows."""
    facts, count = step.facts, step.facts.rows
    logits = step.logits(step.exact)
    if count < 2:
        raise Untestable("the batch holds one row; hand over a batch of two rows or more")
    if logits.ndim < 2 or count not in logits.shape[:2]:
        raise Untestable("the output has no axis for rows")
    if logits.shape == (count, count):
        raise Untestable("the output compares rows with each other")
    order = torch.arange(count)
    changed = facts.with_rows(torch.cat([order[:1], order[1:].roll(1)]))
    if facts.sources:
        tokens = facts.sources[0]
        pick = torch.ones_like(tokens.ids, dtype=torch.bool)
        pick[0] = False
        changed = step.exact.again(batch=facts.other_tokens(pick & _real(step, tokens), tokens)).batch
    first = order == 0
    found = step.difference(step.exact, step.exact.again(batch=changed), part_of(first))
    if found is not None:
        yield fail(
            found.module,
            f"the first row's output moves by {found.size:.1e} of its size when only the other rows change",
            "normalize and mix within a row only",
        )
        return
    moved = step.logits(step.exact.again(batch=facts.with_rows(order.roll(1))))
    axis = 0 if logits.shape[0] == count else 1
    size = distance(logits.roll(1, axis), moved) if logits.shape == moved.shape else 0.0
    if size > step.rounding and not distance(logits, step.logits(step.exact.again(seed=1))):
        # noise that is drawn goes by the row's place
        yield fail(
            "", f"rows in another order change outputs by {size:.1e} of their size", "index nothing by row"
        )


def _real(step: Step, tokens: Tokens) -> Tensor:
    """`[B, T]`, where tokens are real; everywhere if nothing says so."""
    try:
        return padding_of_tokens(step.facts, tokens).real
    except Unknown:
        return torch.ones_like(tokens.ids, dtype=torch.bool)


def _counted(step: Step) -> Tensor:
    """`[B, T]`, the positions at which the loss has a target; everywhere where that is not known."""
    ids = step.facts.tokens.ids
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    try:
        counted = step.facts.targets.counted
    except Unknown:
        return everywhere
    if counted.ndim != 2 or counted.shape[0] != ids.shape[0]:
        return everywhere
    width = min(ids.shape[1], counted.shape[1])
    return torch.zeros_like(everywhere).index_copy(1, torch.arange(width), counted[:, :width])


@property_of(
    "tokens",
    explains=["reach", "order", "overfit", "cache", "documents", "training_equals_evaluation"],
    passes=4,
)
def causality(step: Step) -> Answers:
    """No prediction depends on its target or on a later token.

    The ids after a position, another one in each row, are exchanged for others; the logits up to it, where
    the loss counts them, must stay, in evaluation and in training mode.
    """
    if not step.facts.causal:
        raise Untestable(
            "the targets are not the next tokens; declare causal=True if the model looks back only"
        )
    ids, counted = step.facts.tokens.ids, _counted(step)
    count, width = ids.shape
    places, tested = torch.arange(width), False
    for start in (0.5, 0.02):
        cuts = ((torch.arange(count) / count + start) % 1 * (width - 1)).long()
        later = places > cuts[:, None]
        part = ~later & counted
        if not part.any() or not later.any():
            continue
        tested = True
        batch = step.facts.other_tokens(later)
        for training in (False, True):
            base = step.exact.again(training=training) if training else step.exact
            found = step.difference(base, base.again(batch=batch), part_of(part))
            if found is not None:
                yield fail(
                    found.module,
                    f"logits move by {found.size:.1e} of their size when only later tokens change"
                    + (" in training mode" if training else ""),
                    "mask the keys after each query; normalize and mix over features only",
                )
                return
    if not tested:
        raise Untestable("no target is counted before a later token")


@property_of("tokens", explains=["order"], passes=3)
def reach(step: Step) -> Answers:
    """Predictions depend on the tokens that they may see: the one before, and earlier ones."""
    facts = step.facts
    tokens, base = facts.tokens, step.logits(step.exact)
    ids, real = tokens.ids, _real(step, tokens)
    count, width = ids.shape
    if width < 2:
        raise Untestable("rows hold one token each")
    places = torch.arange(width)
    last = (places * real).max(1).values
    length = real.sum(1)
    wanted = [d for d in dict.fromkeys((1, 2, int(length.min()) // 2, int(length.min()) - 1)) if d > 0]
    seen: dict[int, float] = {}
    here = torch.zeros_like(real)
    here[torch.arange(count), last] = True
    part = part_of(here) if _positional(step, base) else part_of(torch.ones(count, dtype=torch.bool))
    shown = part(base)
    if shown is None:
        raise Untestable("the output has no axis for positions or rows")
    for distance_back in wanted:
        pick = places == (last - distance_back)[:, None]
        moved = part(step.logits(step.exact.again(batch=facts.other_tokens(pick))))
        seen[distance_back] = distance(shown, moved) if moved is not None else 0.0
    if not any(seen.values()):
        yield fail(
            _unmixed(step),
            "the last position's output does not move when any earlier token changes",
            "look at the mask's sign and at what attention puts out",
        )
    elif not seen[1] and _positional(step, base):
        far = min(d for d in seen if seen[d])
        yield fail(
            "",
            f"the last position does not see the token before it, and sees the one {far} back",
            "the mask is off by one",
        )
    elif not all(seen.values()):
        farthest = max(d for d in seen if seen[d])
        yield note("", f"the last position sees {farthest} tokens back, and not {max(seen)}")


def _positional(step: Step, logits: Tensor) -> bool:
    count, width = step.facts.tokens.ids.shape
    return logits.ndim >= 3 and (
        count in logits.shape[:2] and min(abs(n - width) for n in logits.shape[:2]) <= 1
    )


def _unmixed(step: Step) -> str:
    """The first module of the first block that computes scores, where one is seen."""
    calls = step.exact.functions("scaled_dot_product_attention", "softmax")
    return calls[0].module if calls else ""


@property_of("tokens", explains=["inputs"], passes=3)
def padding(step: Step) -> Answers:
    """What stands under padding changes nothing, and a row cut to its tokens gives the same as in the batch."""
    facts, reasons, tested = step.facts, list[str](), False
    for tokens in facts.sources:
        try:
            padded = padding_of_tokens(facts, tokens)
        except Unknown as reason:
            reasons.append(str(reason))
            continue
        tested = True
        answer = (
            _unmarked(step, tokens, padded)
            or _under_padding(step, tokens, padded)
            or _cut(step, tokens, padded)
        )
        if answer is not None:
            yield answer
            return
    if not tested:
        raise Untestable(reasons[0] if reasons else "no tensor of the batch is looked up in an embedding")


def _unmarked(step: Step, tokens: Tokens, padded: Padding) -> Violation | None:
    """A mask of the batch that is open at padding."""
    if padded.mask is not None or step.declare.pad_id is None:
        return None
    for place, entry in step.facts.entries.items():
        if entry.shape == step.facts.entries[tokens.place].shape and place != tokens.place:
            values = torch.unique(entry.long()).tolist() if not entry.is_floating_point() else []
            if values == [1]:
                return fail(
                    str(place[-1]) if place else "",
                    f"{int((~padded.real).sum())} positions of padding (id {padded.pad_id}) are marked as tokens",
                    "build the mask from the lengths of the rows",
                )
    return None


def _under_padding(step: Step, tokens: Tokens, padded: Padding) -> Violation | None:
    """The ids under a mask are exchanged; where the model makes its mask from the ids, that says nothing."""
    if padded.mask is None and padded.source != "runs":
        return None
    changed = step.exact.again(batch=step.facts.other_tokens(~padded.real, tokens))
    same_width = tokens.ids.shape == step.facts.tokens.ids.shape
    part = part_of(padded.real) if same_width else part_of(torch.ones(len(tokens.ids), dtype=torch.bool))
    if padded.mask is None:
        return None
    found = step.difference(step.exact, changed, _or_rows(part, step))
    if found is None:
        return None
    return fail(
        found.module,
        f"outputs at tokens move by {found.size:.1e} of their size when only ids under the mask change",
        "hand the mask on to attention, and to what pools or normalizes over positions",
    )


def _or_rows(part: Any, step: Step) -> Any:
    """A part by positions; of tensors without any, all rows."""
    whole = part_of(torch.ones(step.facts.rows, dtype=torch.bool))

    def select(x: Tensor) -> Tensor | None:
        shown = part(x)
        return whole(x) if shown is None else shown

    return select


def _cut(step: Step, tokens: Tokens, padded: Padding) -> Violation | None:
    """One row alone, cut to its tokens, must give what it gives in the batch."""
    others = [t.entry.shape[1] for t in step.facts.sources if t.place != step.facts.tokens.place]
    width = step.facts.tokens.ids.shape[1]
    if tokens.place != step.facts.tokens.place or {width, width + 1} & {*others}:
        return None  # columns of a source and those of a decoder cannot be told apart in the batch
    real = padded.real
    row = next((i for i in range(len(real)) if 0 < int(real[i].sum()) < real.shape[1]), None)
    if row is None:
        return None
    places = real[row].nonzero().flatten()
    first, last = int(places[0]), int(places[-1]) + 1
    if last - first != len(places):
        return None
    cut = cut_columns(step, row, first, last)
    if cut is None:
        return None
    base, alone = step.logits(step.exact), step.logits(step.exact.again(batch=cut))
    whole = (
        base[row : row + 1] if base.shape[0] == step.facts.rows else base[:, row : row + 1].transpose(0, 1)
    )
    alone = alone if alone.shape[0] == 1 else alone.transpose(0, 1)
    if _positional(step, base):
        width = min(alone.shape[1], whole.shape[1] - first)
        whole, alone = whole[:, first : first + width], alone[:, :width]
    if whole.shape != alone.shape:
        return None  # scores of places, as of where an answer begins
    size = distance(whole, alone)
    if size <= step.rounding:
        return None
    advice = "count positions from the first token, and hand the mask to every layer"
    return fail(
        "", f"row {row} cut to its {last - first} tokens gives outputs that are {size:.1e} of their size off",
        advice if first else "hand the mask to every layer",
    )  # fmt: skip


def cut_columns(step: Step, row: int, first: int, last: int) -> Any:
    """The batch with one row and these columns of it; None where the model does not take it."""
    facts, width = step.facts, step.facts.tokens.ids.shape[1]
    offset = max(facts.tokens.column, 0)

    def narrow(_: Place, x: Tensor) -> Tensor:
        if not x.ndim or x.shape[0] != facts.rows:
            return x
        x = x[row : row + 1]
        for axis in range(1, x.ndim):
            spare = x.shape[axis] - width
            if spare in (0, 1, offset):
                x = x.narrow(axis, first, last - first + spare)
        return x

    batch = map_tensors(step.exact.batch, narrow)
    try:
        _ = step.exact.again(batch=batch).loss
    except Exception:
        return None
    return batch


@property_of("tokens", explains=["inputs"], passes=3)
def documents(step: Step) -> Answers:
    """Packed documents do not see each other, and positions begin anew in each."""
    facts = step.facts
    numbers = facts.documents
    row = next((i for i in range(len(numbers)) if int(numbers[i].max()) > int(numbers[i].min())), None)
    if row is None:
        raise Untestable("each row holds one document")
    start = int((numbers[row] != numbers[row, 0]).nonzero()[0])
    before = torch.zeros_like(numbers, dtype=torch.bool)
    before[row, :start] = True
    after = torch.zeros_like(before)
    after[row, start:] = _real(step, facts.tokens)[row, start:]
    found = step.difference(
        step.exact, step.exact.again(batch=facts.other_tokens(before)), part_of(after & _counted(step))
    )
    if found is not None:
        yield fail(
            found.module,
            f"outputs of a document move by {found.size:.1e} of their size when only the one before it changes",
            "build a block-diagonal mask from the documents",
        )


@property_of("tokens", passes=6)
def inputs(step: Step) -> Answers:
    """Every tensor that the model is given moves its outputs or the loss."""
    base = step.exact
    for place, entry in step.facts.entries.items():
        if not entry.numel() or entry.numel() < 2:
            continue
        moved, tried = False, False
        for other in _others(step, place, entry):
            try:
                changed = base.again(batch=replaced(base.batch, place, other))
                pairs = [(base.loss, changed.loss), *zip(base.outputs, changed.outputs, strict=False)]
                tried = True
            except Exception:
                continue
            moved = any(x.is_floating_point() and distance(x, y) > 0 for x, y in pairs)
            if moved:
                break
        if tried and not moved:
            name = ".".join(map(str, place)) or "batch"
            evidence = f"the entry {name} of the batch changes neither the outputs nor the loss"
            yield (
                fail(name, evidence, "the model does not use it")
                if _enters(step, entry)
                else note(name, evidence)
            )


def _others(step: Step, place: Place, entry: Tensor) -> Iterator[Tensor]:
    """Other values of an entry, of the kind that it has."""
    if any(place == t.place for t in step.facts.sources):
        tokens = next(t for t in step.facts.sources if t.place == place)
        from normlab.trace.tensors import at

        yield at(step.facts.other_tokens(torch.ones_like(tokens.ids, dtype=torch.bool), tokens), place)
        return
    values = torch.unique(entry)
    if entry.dtype == torch.bool or values.tolist() in ([0], [1], [0, 1]):
        flipped = entry.clone()
        middle = entry.shape[-1] // 2
        flipped[..., middle] = ~entry[..., middle] if entry.dtype == torch.bool else 1 - entry[..., middle]
        yield flipped
        yield ~entry if entry.dtype == torch.bool else 1 - entry
    elif entry.is_floating_point():
        yield entry.roll(1, 0) * 1.3 + 0.1
    else:
        real = entry >= 0
        own = torch.unique(entry[real])
        if len(own) > 1:
            index = torch.searchsorted(own, entry.clamp_min(int(own[0])).contiguous())
            yield torch.where(real, own[(index + 1) % len(own)], entry)
            yield entry.flip(-1)


def _enters(step: Step, entry: Tensor) -> bool:
    """Whether the model itself is given this entry, and not the loss alone."""
    root = [e for e in step.exact.events if e.module == ""]
    return any(x.shape == entry.shape and bool((x == entry).all()) for e in root for x in e.inputs)

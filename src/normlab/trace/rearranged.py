"""The same tokens under other padding, or without it: what a model computes at a token may not depend on it.

The rows of a batch get more padding, none, or the same at their other end (``Padding.arranged``). A model of
a fixed width, or of a fixed number of rows, runs on none of these; then the answer is NaN or None, and no
property fails by it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normlab.trace.compare import distance
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.padding import Arranged, Frames, Padding
from normlab.trace.facts.tokens import Tokens
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.trace import Trace


def places_along(facts: Facts, tokens: Tokens, padded: Padding) -> dict[str, Any]:
    """Return which tokens are arranged anew, and at which places of the batch only, as arguments for
    ``Facts.rearranged``: only those of the tokens and their mask, unless nothing else is as long.
    """
    widths = {padded.real.shape[1], padded.real.shape[1] + 1}
    as_long = [t for t in facts.sources if t.place != tokens.place and t.entry.shape[1] in widths]
    everywhere = tokens.place == facts.tokens.place and not as_long
    return {"tokens": tokens, "only": () if everywhere else {tokens.place, padded.mask}}


def with_more_padding(step: StepUnderTest, tokens: Tokens, padded: Padding) -> tuple[Trace, Trace] | None:
    """Return the training step on the rows that hold padding, and the same with one more column of it; None
    if the batch holds no such rows, or if the model does not run on them.
    """
    facts, more = step.facts, padded.arranged().get("more")
    if more is None:
        return None
    where = places_along(facts, tokens, padded)
    try:
        as_it_is = step.training.again(batch=facts.rearranged(more._replace(columns=None), **where))
        longer = step.training.again(batch=facts.rearranged(more, **where))
        both_are_finite = bool(torch.isfinite(as_it_is.loss)) and bool(torch.isfinite(longer.loss))
    except Exception:  # a model of a fixed width, or of a fixed number of rows, accepts no other
        return None
    return (as_it_is, longer) if both_are_finite else None


def off_arranged(
    step: StepUnderTest, real: Tensor, one: Arranged, other: Arranged | None = None, **where: Any
) -> float:
    """Return how far outputs at tokens differ between a batch arranged as ``one`` and another; NaN if it does
    not run.

    What a model draws belongs to the places of its batch. If that moves outputs, all rows are kept where they
    are; and NaN is returned if a pass then still draws other numbers.

    Args:
        step: what is tested.
        real: `[B, T]`, True at the tokens whose outputs are compared.
        one: an arrangement of some rows.
        other: another of the same rows; None for the rows as the batch has them.
        where: which tokens, and which places of the batch only (``places_along``).
    """
    other = other or Arranged(one.rows)

    def apart(*, in_place: bool) -> float:
        a, b = (_outputs_arranged(step, real, way, in_place=in_place, **where) for way in (one, other))
        return math.nan if a is None or b is None or a.shape != b.shape else distance(a, b)

    size = apart(in_place=False)
    if not size > step.rounding or not step.comparison.outputs_are_drawn:
        return size
    return apart(in_place=True)


def _outputs_arranged(
    step: StepUnderTest,
    real: Tensor,
    arranged: Arranged,
    tokens: Tokens | None = None,
    *,
    in_place: bool,
    **where: Any,
) -> Tensor | None:
    """Return the outputs at the tokens of the rows that are arranged, in the order of the tokens. None if the
    model does not run so, or, with all rows ``in_place``, draws other numbers.
    """
    facts, outputs = step.facts, step.comparison.logits(step.exact)
    rows, columns, _ = arranged
    rows_come_first = outputs.shape[0] == facts.rows
    at_tokens = real[rows]
    if columns is None:
        shown = outputs if rows_come_first else outputs.transpose(0, 1)
        shown = shown[rows]
    else:
        try:
            way = arranged.in_place(facts.rows) if in_place else arranged
            trace = step.exact.again(batch=facts.rearranged(way, tokens or facts.tokens, **where))
            if in_place and not step.comparison.draws_the_same(trace):
                return None
            shown = step.comparison.logits(trace)
        except Exception:  # a model of a fixed width accepts no other
            return None
        shown = shown if rows_come_first else shown.transpose(0, 1)
        if in_place:  # all rows were computed, of which some are compared
            shown = shown[rows]
        at_tokens = at_tokens.gather(1, columns(real.shape[1]))
    reads_other_tokens = tokens is not None and tokens.place != facts.tokens.place
    if reads_other_tokens or not facts.by_position(outputs):
        return shown  # there is no output for each of these tokens
    if shown.shape[1] < at_tokens.shape[1]:  # the last token has no output
        at_tokens = (at_tokens & at_tokens.roll(-1, 1))[:, : shown.shape[1]]
    return shown[:, : at_tokens.shape[1]][at_tokens]


def off_with_more_frames(step: StepUnderTest, frames: Frames) -> float:
    """Return how far the outputs of the row that holds the most padding are from those that it gives with one
    more frame of it; NaN if the model does not run on such frames, or draws other numbers then.
    """
    facts, real = step.facts, frames.real
    batch = frames.with_one_more(facts.entries, step.exact.batch)
    if batch is None:
        return math.nan
    try:
        longer = step.exact.again(batch=batch)
        outputs, longer_outputs = (step.comparison.logits(trace) for trace in (step.exact, longer))
    except Exception:  # a model of a fixed width accepts no other
        return math.nan
    if step.comparison.outputs_are_drawn and not step.comparison.draws_the_same(longer):
        return math.nan
    rows, length = real.shape
    if outputs.shape[0] != rows:
        return math.nan
    row = int(real.sum(1).argmin())
    of_row, of_longer = outputs[row], longer_outputs[row]
    has_output_a_frame = of_row.ndim and of_longer.ndim and len(of_row) == length
    if has_output_a_frame and len(of_longer) == length + 1:
        of_row, of_longer = of_row[real[row]], of_longer[:length][real[row]]
    return distance(of_row, of_longer) if of_row.shape == of_longer.shape else math.nan

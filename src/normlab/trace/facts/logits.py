"""The logits that a loss scores, found in a pass, and whether its gradient passes through them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace.autograd import gradients_in
from normlab.trace.compare import Located, distance
from normlab.trace.facts.targets import CLOSE, Targets, read_targets
from normlab.trace.facts.wiring import MULTIPLIED, factors
from normlab.trace.functions import FunctionCall
from normlab.trace.hooks import Tap
from normlab.trace.tensors import rows_of
from normlab.trace.trace import Event, Pass, Trace

SCORED: Final = ("cross_entropy", "log_softmax", "nll_loss")
"""Functions of torch that may read a cross-entropy's logits that are no module's output."""
CANDIDATES: Final = 16
"""How many tensors are tried as logits, from the loss backwards."""


class FunctionInput(NamedTuple):
    """The first argument of these calls of a scoring function, with classes along an axis. Each of several
    calls scores some of the positions, in rows of this width: the next ones, or columns of that many rows.
    """

    calls: tuple[int, ...]
    axis: int = -1
    width: int = -1
    rows: int = 1

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts into one tensor `[..., V]`."""
        first, *more = parts = [x.movedim(self.axis, -1) for x in parts]
        columns = [x.reshape(self.rows, -1, x.shape[-1]) for x in parts]
        return torch.cat(columns, 1).reshape(-1, self.width, first.shape[-1]) if more else first


class Logits(NamedTuple):
    """The tensor that targets are read off, its layout, and the trained matrices that it is a product of."""

    where: Tap | FunctionInput
    shape: torch.Size
    value: Tensor
    matrices: tuple[nn.Parameter, ...]

    @property
    def output(self) -> bool:
        """Whether the model itself returns them."""
        return isinstance(self.where, Tap) and not self.where.module

    def of(self, step: Trace) -> Tensor | None:
        """Return the same logits of another step; None if it computes its loss in a different way."""
        if isinstance(self.where, Tap):
            shows = step if self.where in step.taps else step.again(taps=(*step.taps, self.where))
            return shows.tapped.get(self.where)
        inputs = [call.argument(0, "input").detach() for call in step.functions(*SCORED)]
        known = max(self.where.calls) < len(inputs)
        return self.where.joined([inputs[i] for i in self.where.calls]) if known else None


def read_logits(trace: Trace, passed: Pass) -> list[tuple[Logits, Targets]]:
    """Find the logits whose cross-entropy is the loss, and their targets, from a pass with its graph."""
    loss, found = passed.loss, list[tuple[Logits, Targets]]()
    if loss is None or not loss.requires_grad:
        return found
    precision = torch.float64 if trace.exact else loss.dtype
    candidates = _candidates(passed, rows_of(trace.batch))
    for some in (candidates[:1], candidates[1:]):
        if not some or (found and all(x.shape != found[0][0].shape for _, (x, *_) in some)):
            continue  # no other output may be another head's logits
        parts = [x for _, own in some for x in own]
        gradients = iter(gradients_in(loss, parts, trace.model, retain_graph=True))
        for where, own in some:
            slopes = [g for _, g in zip(own, gradients, strict=False) if g is not None]
            if len(slopes) < len(own):
                continue
            whole = isinstance(where, Tap)
            x, gradient = (parts[0] if whole else where.joined(parts) for parts in (own, slopes))
            matrices = factors(node) if (node := own[0].grad_fn) is not None else ()
            logits = Logits(where, x.shape, x.detach(), matrices)
            targets = read_targets(x, gradient, precision)
            layout = found and getattr(where, "calls", None) == getattr(found[0][0].where, "calls", ())
            if targets is not None and (logits.output or not found or layout):
                found.append((logits, targets))
    return found


def _candidates(passed: Pass, rows: int) -> list[tuple[Tap | FunctionInput, list[Tensor]]]:
    """Return the tensors `[..., V]` that may be logits or parts of them, from the loss backwards."""
    found = [
        *(pair for event in passed.events if event.module == "" for pair in _taps(event)),
        *_inputs(passed, rows),
        *(pair for event in reversed(passed.events) if event.module for pair in _taps(event)),
    ]
    wide = ((w, own) for w, own in found if all(x.ndim >= 2 and x.shape[-1] > 1 for x in own))
    live = ((w, own) for w, own in wide if all(x.requires_grad and x.is_floating_point() for x in own))
    return list(live)[:CANDIDATES]


def _inputs(passed: Pass, rows: int) -> Iterator[tuple[FunctionInput, list[Tensor]]]:
    """Yield the inputs of calls that together score all tokens, or all but one per row; then of each call."""
    scored = [(f, f.argument(0, "input"), _class_axis(f)) for f in passed.functions if f.name in SCORED]
    read = (f.argument(0, "input") for f in passed.functions if f.name not in SCORED)
    tokens = {x.numel() for x in read if rows in x.shape[:2]}  # others are positions
    groups = defaultdict[tuple[str, int, int], list[int]](list)
    for i, (f, x, axis) in enumerate(scored):
        groups[f.name, axis, x.shape[axis]].append(i)
    for (_, axis, classes), calls in groups.items():
        parts = [scored[i][1] for i in calls]
        sizes = [x.numel() // classes for x in parts]
        if len(calls) > 1 and {sum(sizes), sum(sizes) + rows} & tokens and not sum(sizes) % rows:
            for lead in (1, rows) if all(n % rows == 0 for n in sizes) else (1,):
                yield FunctionInput(tuple(calls), axis, sum(sizes) // rows, lead), parts
    yield from ((FunctionInput((i,), axis), [x]) for i, (_, x, axis) in enumerate(scored))


def _class_axis(call: FunctionCall) -> int:
    """Return the class axis of a scoring function's input: a cross-entropy's second of three, or the last."""
    return 1 if call.name in ("cross_entropy", "nll_loss") and call.argument(0, "input").ndim > 2 else -1


def _taps(event: Event) -> list[tuple[Tap | FunctionInput, list[Tensor]]]:
    pairs = zip(event.places, event.outputs, strict=True)
    return [(Tap(event.module, "output", place, event.call), [x]) for place, x in pairs]


def bypassed(trace: Trace) -> bool:
    """Return whether some of the loss's gradient does not pass through the tapped tensors, the logits."""
    own = [p for p in trace.model.parameters() if p.requires_grad]
    with trace.with_graph() as passed:
        taps = [t for t in passed.taps.values() if t.requires_grad]
        if passed.loss is None or not taps:
            return True
        found = torch.autograd.grad(passed.loss, [*own, *taps], retain_graph=True, allow_unused=True)
        through = torch.autograd.grad(taps, own, found[len(own) :], allow_unused=True)
    pairs = zip(found, through, strict=False)
    return any(a is not None and (b is None or distance(a, b) > CLOSE) for a, b in pairs)


def over_one(trace: Trace) -> float | None:
    """Return the sum of the exponentials of ``nll_loss``'s input, or None if they are probabilities.

    Each may be raised by one small constant that keeps its logarithm finite.
    """
    for call in trace.functions("nll_loss"):
        p = call.argument(0, "input").movedim(_class_axis(call), -1).double().exp()
        added = (p.sum(-1) - 1) / p.shape[-1]
        if (added > p.amin(-1) + CLOSE).any():
            return float(p.sum(-1).mean())
    return None


def cut_off(trace: Trace, logits: Tensor) -> Located | None:
    """Return the share of logits whose cross-entropy gives no gradient to the last product of their shape.

    A logit whose probability rounds to 0 or 1 may have none.
    """
    with trace.with_graph(functions=MULTIPLIED) as passed:
        made = [f for f in passed.functions if f.result.shape[-1:] == logits.shape[-1:]]
        made = [f for f in made if f.result.numel() == logits.numel() and f.result.requires_grad]
        if not made or passed.loss is None:
            return None
        (g,) = torch.autograd.grad(passed.loss, made[-1].result, allow_unused=True)
    if g is None:
        return None
    g, p = (x.reshape(-1, logits.shape[-1]) for x in (g, logits.double().softmax(-1)))
    counted = g.any(-1, keepdim=True)
    least = torch.finfo(p.dtype).eps
    unsure = counted & (p > least) & (p < 1 - least)
    lost = unsure & (g == 0)
    return Located(float(lost.sum() / unsure.sum()), made[-1].module) if lost.any() else None

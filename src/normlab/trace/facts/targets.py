r"""The logits that a loss scores, and the targets of a cross-entropy, read off its gradient there.

With :math:`p = \mathrm{softmax}(z)`, the gradient of :math:`w` times a cross-entropy with label smoothing
:math:`\epsilon` over :math:`V` classes, plus any function of :math:`\log\sum e^z` (a z-loss), at one position
is :math:`g = a\,p - b - c\,\mathrm{onehot}(y)` with :math:`b = w\epsilon/V`, :math:`c = w - bV`, and
:math:`a = w` without such a function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.trace.autograd import gradients_in
from normlab.trace.compare import Located, distance
from normlab.trace.facts.wiring import MULTIPLIED, factors
from normlab.trace.functions import FunctionCall
from normlab.trace.tensors import Tap, rows_of
from normlab.trace.trace import Event, Pass, Trace

ROWS = 512
"""How many positions are fitted at a time."""
RESIDUAL = {torch.float64: 1e-7, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Share of a gradient that rounding may leave unexplained, by the dtype of the logits."""


class Targets(NamedTuple):
    """What a cross-entropy asks for at each position of logits `[..., V]`."""

    ids: Tensor
    """`[...]` the class asked for; 0 if there is none."""
    counted: Tensor
    """`[...]` where the loss has a gradient."""
    weight: Tensor
    """`[...]` float64: the factor on the position's cross-entropy."""
    nll: Tensor
    """`[...]` float64: -log p of the class asked for, in nats."""
    classes: int
    smoothing: float
    """Label smoothing, the median over positions."""
    excess: float
    r"""The median of :math:`|a - w| / w` over positions: above 0 where another term acts on the logits."""

    def rearranged(self, change: Callable[[Tensor], Tensor]) -> Targets:
        """Return the same targets with other leading dimensions."""
        ids, counted, weight, nll = map(change, (self.ids, self.counted, self.weight, self.nll))
        return self._replace(ids=ids, counted=counted, weight=weight, nll=nll)

    def value(self, logits: Tensor) -> float:
        """Return their cross-entropy for the logits, with its weights and label smoothing."""
        smooth = -logits.double().log_softmax(-1).mean(-1).cpu().reshape(self.weight.shape)
        mixed = (1 - self.smoothing) * self.nll + self.smoothing * smooth
        return float((self.weight * mixed)[self.counted].sum())

    def ahead(self, where: Tensor, distance: int) -> Tensor:
        """Return the mask of an entry `[B, W]` at a distance from each position, False past its edges."""
        place = torch.arange(self.ids.shape[1]) + distance
        inside = (place >= 0) & (place < where.shape[1])
        return where[:, place.clamp(0, where.shape[1] - 1)] & inside

    def by_row(self, entry: Tensor, distance: int) -> Tensor:
        """Return `[B, B]`, the share of a row's counted targets that are a row's tokens at a distance."""
        here, there = self._beside(entry, distance)
        counted = self.counted[:, None, here]
        same = (self.ids[:, None, here] == entry[None, :, there]) & counted
        return same.sum(-1) / counted.sum(-1).clamp_min(1)

    def share(self, entry: Tensor, distance: int) -> float:
        """Return the share of counted targets that are the token of an entry `[B, W]` that far ahead."""
        here, there = self._beside(entry, distance)
        if here.stop <= here.start or len(self.ids) != len(entry):
            return 0.0
        counted = self.counted[:, here]
        same = (self.ids[:, here] == entry[:, there]) & counted
        return float(same.sum() / counted.sum().clamp_min(1))

    def _beside(self, entry: Tensor, distance: int) -> tuple[slice, slice]:
        low = max(0, -distance)
        end = min(self.ids.shape[1], entry.shape[1] - distance)
        return slice(low, end), slice(low + distance, end + distance)


def read_targets(logits: Tensor, gradient: Tensor, precision: torch.dtype = torch.float64) -> Targets | None:
    """Return the targets, or None if the gradient is not a cross-entropy's at these logits `[..., V]`."""
    classes, shape = logits.shape[-1], logits.shape[:-1]
    z, g = logits.detach().reshape(-1, classes), gradient.detach().reshape(-1, classes)
    counted = g.abs().sum(-1) > 0
    if classes < 2 or not counted.any() or not torch.isfinite(g).all():
        return None
    parts = zip(z[counted].split(ROWS), g[counted].split(ROWS), strict=True)
    fitted = [torch.cat(x) for x in zip(*(_fit(z.double(), g.double()) for z, g in parts), strict=True)]
    ids, weight, p_weight, uniform, residual, nll = fitted
    good = (residual < RESIDUAL.get(precision, 5e-2)) & (weight > 0) & (p_weight > 0)
    if good.double().mean() < 0.98:
        return None

    counted = counted.cpu()

    def full(values: Tensor) -> Tensor:
        nothing = torch.zeros(len(counted), dtype=values.dtype)
        return nothing.masked_scatter(counted, values.cpu()).reshape(shape)

    weight = weight + uniform * classes
    smoothing = float((uniform * classes / weight).median())
    excess = float(((p_weight - weight).abs() / weight).median())
    return Targets(full(ids), counted.reshape(shape), full(weight), full(nll), classes, smoothing, excess)


def _fit(z: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Fit g = a p - b off the target by least squares, and take w = a p - b - g at the target, by row."""
    classes = z.shape[-1]
    p, ids = z.softmax(-1), g.argmin(-1)
    at = F.one_hot(ids, classes).bool()
    others = classes - 1
    off_p, off_g = p.masked_fill(at, 0.0), g.masked_fill(at, 0.0)
    a = (off_p * off_g).sum(-1) / (off_p * off_p).sum(-1).clamp_min(1e-300)
    b = torch.zeros_like(a)
    size = g.abs().sum(-1)

    def residual(a: Tensor, b: Tensor) -> Tensor:
        return (g - (a[:, None] * p - b[:, None])).masked_fill(at, 0.0).abs().sum(-1) / size

    plain = residual(a, b)
    if others > 1:
        mean_p, mean_g = off_p.sum(-1) / others, off_g.sum(-1) / others
        centred = (p - mean_p[:, None]).masked_fill(at, 0.0)
        slope = (centred * (g - mean_g[:, None])).sum(-1) / centred.square().sum(-1).clamp_min(1e-300)
        offset = slope * mean_p - mean_g
        smooth = residual(slope, offset)
        better = (plain > 1e-10) & (smooth < plain * 0.5)
        a, b = torch.where(better, slope, a), torch.where(better, offset, b)
        plain = torch.where(better, smooth, plain)
    here = ids[:, None]
    weight = a * p.gather(-1, here)[:, 0] - b - g.gather(-1, here)[:, 0]
    nll = -z.log_softmax(-1).gather(-1, here)[:, 0]
    if others <= 2:  # no entry is left to check the fit: the gradient of a cross-entropy adds up to 0
        plain = torch.maximum(plain, g.sum(-1).abs() / size)
    return ids, weight, a, b, plain, nll


SCORED: Final = ("cross_entropy", "log_softmax", "nll_loss")
"""Functions of torch that may read a cross-entropy's logits that are no module's output."""
CLOSE: Final = 1e-6
"""Relative difference allowed in sums of gradients in float64 and in what is read off them."""
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

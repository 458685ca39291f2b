r"""The logits that a loss scores, and the targets of a cross-entropy, read off its gradient there.

With :math:`p = \mathrm{softmax}(z)`, the gradient of :math:`w` times a cross-entropy with label smoothing
:math:`\epsilon` over :math:`V` classes, plus any function of :math:`\log\sum e^z` (a z-loss), at one position
is :math:`g = a\,p - b - c\,\mathrm{onehot}(y)` with :math:`b = w\epsilon/V`, :math:`c = w - bV`, and
:math:`a = w` without such a function.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.trace.autograd import gradients_in, nodes_behind
from normlab.trace.compare import Located, distance
from normlab.trace.facts.fused import FUSED, Product, products_of
from normlab.trace.facts.wiring import MULTIPLIED, factors
from normlab.trace.functions import OWN, FunctionCall
from normlab.trace.tensors import Tap, rows_of
from normlab.trace.trace import Event, Pass, Trace

Part = TypeVar("Part")
ROWS = 512
"""How many positions are fitted at a time."""
RESIDUAL = {torch.float64: 1e-7, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Share of a gradient that rounding may leave unexplained, by the dtype of the logits or the loss."""


def unexplained(*dtypes: torch.dtype) -> float:
    """Return the share of a gradient that rounding may leave unexplained in the narrowest of these types."""
    return max(RESIDUAL.get(dtype, RESIDUAL[torch.bfloat16]) for dtype in dtypes)


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
    error: float = 0.0
    """The largest share of a position's gradient that is not explained: the rounding in what is read off."""

    @property
    def rounding(self) -> float:
        """The relative difference that rounding may leave in a weight. The entry of the class asked for, off
        which it is read, is half of a gradient, so its share of an error is twice that of all; 4 leaves room.
        """
        return max(CLOSE, 4 * self.error)

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


def read_targets(logits: Tensor, gradient: Tensor, limit: float = RESIDUAL[torch.float64]) -> Targets | None:
    """Return the targets, or None if the gradient is not a cross-entropy's at these logits `[..., V]`.

    Rounding may leave a share of ``limit`` of a position's gradient unexplained.
    """
    classes, shape = logits.shape[-1], logits.shape[:-1]
    z, g = logits.detach().reshape(-1, classes), gradient.detach().reshape(-1, classes)
    counted = g.abs().sum(-1) > 0
    if classes < 2 or not counted.any() or not torch.isfinite(g).all():
        return None
    parts = zip(z[counted].split(ROWS), g[counted].split(ROWS), strict=True)
    fits = [_fit(z.double(), g.double()) for z, g in parts]
    fit = _Fit(*(torch.cat(values) for values in zip(*fits, strict=True)))
    is_fitted = (fit.residual < limit) & (fit.on_target > 0) & (fit.on_p > 0)
    if is_fitted.double().mean() < 0.98:
        return None

    counted = counted.cpu()

    def at_all_positions(values: Tensor) -> Tensor:
        nothing = torch.zeros(len(counted), dtype=values.dtype)
        return nothing.masked_scatter(counted, values.cpu()).reshape(shape)

    weight = fit.on_target + fit.uniform * classes
    return Targets(
        ids=at_all_positions(fit.ids),
        counted=counted.reshape(shape),
        weight=at_all_positions(weight),
        nll=at_all_positions(fit.nll),
        classes=classes,
        smoothing=float((fit.uniform * classes / weight).median()),
        excess=float(((fit.on_p - weight).abs() / weight).median()),
        error=float(fit.residual[is_fitted].max()),
    )


class _Fit(NamedTuple):
    r"""How gradients :math:`g = a\,p - b - c\,\mathrm{onehot}(y)` at positions `[N]` are explained."""

    ids: Tensor
    """y, the class asked for."""
    on_target: Tensor
    """c"""
    on_p: Tensor
    """a"""
    uniform: Tensor
    """b"""
    residual: Tensor
    """The share of the gradient that is not explained."""
    nll: Tensor
    """-log p of the class asked for."""


def _fit(z: Tensor, g: Tensor) -> _Fit:
    """Fit g = a p - b off the target by least squares, and take c = a p - b - g at the target, by row.

    The class asked for is the one whose logit is to rise most. b is 0 unless it explains the gradient much
    better, as under label smoothing.
    """
    classes = z.shape[-1]
    p, ids = z.softmax(-1), g.argmin(-1)
    is_target = F.one_hot(ids, classes).bool()
    others = classes - 1
    off_p, off_g = p.masked_fill(is_target, 0.0), g.masked_fill(is_target, 0.0)
    a = (off_p * off_g).sum(-1) / (off_p * off_p).sum(-1).clamp_min(1e-300)
    b = torch.zeros_like(a)
    size = g.abs().sum(-1)

    def unexplained_share(a: Tensor, b: Tensor) -> Tensor:
        return (g - (a[:, None] * p - b[:, None])).masked_fill(is_target, 0.0).abs().sum(-1) / size

    residual = unexplained_share(a, b)
    if others > 1:
        # the same with b: a regression of g on p, with an intercept
        mean_p, mean_g = off_p.sum(-1) / others, off_g.sum(-1) / others
        centred = (p - mean_p[:, None]).masked_fill(is_target, 0.0)
        slope = (centred * (g - mean_g[:, None])).sum(-1) / centred.square().sum(-1).clamp_min(1e-300)
        offset = slope * mean_p - mean_g
        with_offset = unexplained_share(slope, offset)
        is_better = (residual > 1e-10) & (with_offset < residual * 0.5)
        a, b = torch.where(is_better, slope, a), torch.where(is_better, offset, b)
        residual = torch.where(is_better, with_offset, residual)
    target = ids[:, None]
    on_target = a * p.gather(-1, target)[:, 0] - b - g.gather(-1, target)[:, 0]
    nll = -z.log_softmax(-1).gather(-1, target)[:, 0]
    if others <= 2:  # no entry is left to check the fit: the gradient of a cross-entropy adds up to 0
        residual = torch.maximum(residual, g.sum(-1).abs() / size)
    return _Fit(ids, on_target, a, b, residual, nll)


SCORED: Final = ("cross_entropy", "log_softmax", "nll_loss")
"""Functions of torch that may read a cross-entropy's logits that are no module's output."""
LOOKED_UP: Final = "embedding"
RECORDED: Final = (*SCORED, *FUSED, LOOKED_UP)
"""The functions whose calls a pass must record for ``read_logits``."""
CLOSE: Final = 1e-6
"""Relative difference allowed in sums of gradients in float64 and in what is read off them."""
ROUNDED: Final = 1e-12
"""Share of the largest gradient that rounding in float64 may leave where there is none."""
CANDIDATES: Final = 16
"""How many tensors are tried as logits, from the loss backwards."""


class FunctionInput(NamedTuple):
    """The first argument of a scoring function: of one of its calls with so many classes along an axis,
    counted from 0, or of all of them. If of all, each call scores some of the positions: the next ones, or
    the next columns of every row.

    For a function that multiplies and scores at once, it is one of the products that it may have scored.
    """

    function: str
    classes: int
    axis: int = -1
    call: int | None = None
    by_columns: bool = False
    product: int | None = None

    def __str__(self) -> str:
        name = "an autograd function" if self.function == OWN else self.function
        what = "input" if self.product is None else "product"
        if self.call is None:
            return f"the {what}s of all calls of {name}"
        return f"the {what} of {name}" + (f" in call {self.call}" if self.call else "")

    def read_in(self, step: Trace) -> list[Tensor]:
        """Return the logits in those calls of a step that this stands for."""
        # a product must be made while the pass still has the step's weights
        with step.with_graph(graph=False, functions=RECORDED) as passed:
            if self.product is None:
                return [x.detach() for x in self.read_by(passed, step.model)]
            return [product.logits() for product in self._products_in(passed, step.model)]

    def read_by(self, passed: Pass, model: nn.Module) -> list[Tensor]:
        """Return what it reads in a pass, with its graph: logits, or the features of its products."""
        if self.product is not None:
            return [product.features for product in self._products_in(passed, model)]
        kind = (self.function, self.axis, self.classes)
        calls = [call for call in passed.functions if call.name in SCORED and _kind(call) == kind]
        return [call.argument(0, "input") for call in self._meant(calls)]

    def _products_in(self, passed: Pass, model: nn.Module) -> list[Product]:
        kind = (self.function, self.classes, self.product)
        return self._meant([product for other, product in _products(passed, model) if other == kind])

    def _meant(self, parts: list[Part]) -> list[Part]:
        """Return the parts of the one call that this stands for, or of all calls."""
        return parts if self.call is None else parts[self.call : self.call + 1]

    def joined(self, parts: Sequence[Tensor], rows: int) -> Tensor:
        """Join what calls read in a batch of so many rows into one tensor `[..., V]`."""
        parts = [x.movedim(self.axis, -1) for x in parts]
        if self.call is not None:
            return parts[0]
        lead = rows if self.by_columns else 1
        whole = torch.cat([x.reshape(lead, -1, self.classes) for x in parts], 1)
        one_each = whole.numel() == rows * self.classes
        return whole.reshape(rows, self.classes) if one_each else whole.reshape(rows, -1, self.classes)


class Layout(NamedTuple):
    """How logits that do not begin with rows and positions lie: flat `[N, V]`, row by row or column by
    column; or `[T, B, V]`, which is column by column, too.
    """

    flat: bool
    by_columns: bool

    def of(self, x: Tensor, rows: int) -> Tensor:
        """Return a tensor `[N, …]` or `[T, B, …]` as `[B, T, …]`, or as it is if N is no multiple of B."""
        if self.flat and x.shape[0] % rows:
            return x
        if self.by_columns:
            return (x.reshape(-1, rows, *x.shape[1:]) if self.flat else x).transpose(0, 1)
        return x.reshape(rows, -1, *x.shape[1:])


FLAT: Final = (Layout(flat=True, by_columns=False), Layout(flat=True, by_columns=True))


class Logits(NamedTuple):
    """The tensor that targets are read off, its place, and the trained matrices that it is a product of."""

    where: Tap | FunctionInput
    shape: torch.Size
    value: Tensor
    matrices: tuple[nn.Parameter, ...]
    output: bool
    """Whether the loss gets them from the model, as an output of an outermost call."""
    layout: Layout | None = None
    """How the tensor there lies, if that is known and it does not begin with rows and positions."""

    def laid_out(self, layout: Layout, rows: int) -> Logits:
        """Return the logits by row and position, `[B, T, V]`."""
        value = layout.of(self.value, rows)
        return self._replace(value=value, shape=value.shape, layout=layout)

    def of(self, step: Trace) -> Tensor | None:
        """Return the same logits of another step; None if it computes its loss in a different way."""
        rows = rows_of(step.batch)
        if isinstance(self.where, Tap):
            value = tapped(step, self.where)
        else:
            parts = self.where.read_in(step)
            value = self.where.joined(parts, rows) if parts else None
        return value if value is None or self.layout is None else self.layout.of(value, rows)


def tapped(step: Trace, tap: Tap) -> Tensor | None:
    """Return the tensor at a tap of a step; None if its pass does not show it."""
    shows = step if tap in step.taps else step.again(taps=(*step.taps, tap))
    return shows.tapped.get(tap)


class _Candidate(NamedTuple):
    """Tensors `[..., V]` that may be logits, or parts of them; or features whose products may be logits."""

    where: Tap | FunctionInput
    parts: list[Tensor]
    output: bool = False
    products: tuple[Product, ...] = ()

    @property
    def is_possible(self) -> bool:
        """Whether classes may be scored there, and a gradient may be read off."""
        axis = self.where.axis if isinstance(self.where, FunctionInput) else -1
        wide = all(x.ndim >= 2 and x.shape[axis] > 1 for x in self.parts)
        return wide and all(x.requires_grad and x.is_floating_point() for x in self.parts)

    def read(self, gradients: list[Tensor], rows: int, limit: float) -> tuple[Logits, Targets] | None:
        """Return the logits and their targets from the gradients in the parts, or None if there are none."""
        parts, slopes, errors = self.parts, gradients, [0.0]
        if self.products:
            slopes, errors = list[Tensor](), list[float]()
            for product, gradient in zip(self.products, gradients, strict=True):
                slope_and_error = product.slope(gradient, limit)
                if slope_and_error is None:
                    return None
                slopes.append(slope_and_error[0])
                errors.append(slope_and_error[1])
            parts = [product.logits() for product in self.products]
        x = self.joined(parts, rows)
        targets = read_targets(x, self.joined(slopes, rows), limit)
        if targets is None:
            return None
        logits = Logits(self.where, x.shape, x.detach(), self._matrices(), self.output)
        return logits, targets._replace(error=max(targets.error, *errors))

    def _matrices(self) -> tuple[nn.Parameter, ...]:
        if self.products:
            return tuple(p.weight for p in self.products[:1] if isinstance(p.weight, nn.Parameter))
        node = self.parts[0].grad_fn
        return () if node is None else factors(node)

    def joined(self, parts: Sequence[Tensor], rows: int) -> Tensor:
        """Join the parts, or their gradients, into one tensor `[..., V]`."""
        return parts[0] if isinstance(self.where, Tap) else self.where.joined(parts, rows)

    def may_add_to(self, logits: Logits) -> bool:
        """Return whether it may be another head's logits, or known ones in their right order."""
        return self.parts[0].shape == logits.shape or self.is_other_order_of(logits)

    def is_other_order_of(self, logits: Logits) -> bool:
        """Return whether both are the same parts, joined in another order."""
        where, other = self.where, logits.where
        if isinstance(where, Tap) or isinstance(other, Tap):
            return False
        return where.call is None and where._replace(by_columns=other.by_columns) == other


def read_logits(trace: Trace, passed: Pass) -> list[tuple[Logits, Targets]]:
    """Find the logits whose cross-entropy is the loss, and their targets, from a pass with its graph, which
    recorded modules and the functions ``RECORDED``.
    """
    loss, rows = passed.loss, rows_of(trace.batch)
    scored = list[tuple[Logits, Targets]]()
    if loss is None or not loss.requires_grad:
        return scored
    candidates = _candidates(passed, rows, trace.model)
    # most losses score the first candidate, so gradients in all others are not computed before that is tried
    for group in (candidates[:1], candidates[1:]):
        may_be_more = not scored or any(candidate.may_add_to(scored[0][0]) for candidate in group)
        if not group or not (may_be_more or _holds_more(loss, *scored[0])):
            continue
        tensors = [x for candidate in group for x in candidate.parts]
        gradients = iter(gradients_in(loss, tensors, trace.model, retain_graph=True))
        for candidate in group:
            slopes = [next(gradients) for _ in candidate.parts]
            known = [slope for slope in slopes if slope is not None]
            is_wanted = candidate.output or not scored or candidate.is_other_order_of(scored[0][0])
            if not is_wanted or len(known) < len(slopes):
                continue
            # logits are often narrower than the loss that is computed of them
            dtypes = (torch.float64,) if trace.exact else (loss.dtype, candidate.parts[0].dtype)
            pair = candidate.read(known, rows, unexplained(*dtypes))
            if pair is not None:
                scored.append(pair)
    return scored


def _holds_more(loss: Tensor, logits: Logits, targets: Targets) -> bool:
    """Return whether a loss is something else than the cross-entropy of these logits."""
    remainder = float(loss) - targets.value(logits.value)
    return abs(remainder) > max(targets.rounding, unexplained(logits.value.dtype)) * abs(float(loss))


def _candidates(passed: Pass, rows: int, model: nn.Module) -> list[_Candidate]:
    """Return the tensors that may be logits, from the loss backwards."""
    outermost = [event for event in passed.events if event.outermost]
    inner = [event for event in passed.events if not event.outermost]
    paths = list(dict.fromkeys(event.module for event in reversed(outermost)))
    paths.sort(key=bool)  # the whole model before its parts
    candidates = list[_Candidate]()
    for path in paths:
        for event in outermost:
            if event.module == path:
                candidates += _outputs(event)
    candidates += _inputs(passed, rows)
    candidates += _unseen(passed, rows, model)
    for event in reversed(inner):
        candidates += _outputs(event)
    return [candidate for candidate in candidates if candidate.is_possible][:CANDIDATES]


def _inputs(passed: Pass, rows: int) -> Iterator[_Candidate]:
    """Yield the inputs of scoring functions: of calls that together score all positions, then of each."""
    groups = defaultdict[tuple[str, int, int], list[Tensor]](list)
    for call in passed.functions:
        if call.name in SCORED:
            groups[_kind(call)].append(call.argument(0, "input"))
    for (name, axis, classes), parts in groups.items():
        sizes = [x.numel() // classes for x in parts]
        for where in _joint(FunctionInput(name, classes, axis), sizes, passed, rows):
            yield _Candidate(where, parts)
    for (name, axis, classes), parts in groups.items():
        for i, x in enumerate(parts):
            yield _Candidate(FunctionInput(name, classes, axis, i), [x])


def _unseen(passed: Pass, rows: int, model: nn.Module) -> Iterator[_Candidate]:
    """Yield the products that functions may have scored at once: of calls that together score all positions;
    then of each call.
    """
    groups = defaultdict[tuple[str, int, int], list[Product]](list)
    for kind, product in _products(passed, model):
        groups[kind].append(product)
    for (name, classes, number), products in groups.items():
        sizes = [product.features.numel() // product.features.shape[-1] for product in products]
        for where in _joint(FunctionInput(name, classes, product=number), sizes, passed, rows):
            yield _Candidate(where, [product.features for product in products], products=tuple(products))
    for (name, classes, number), products in groups.items():
        for i, product in enumerate(products):
            where = FunctionInput(name, classes, call=i, product=number)
            yield _Candidate(where, [product.features], products=(product,))


def _joint(where: FunctionInput, sizes: list[int], passed: Pass, rows: int) -> Iterator[FunctionInput]:
    """Yield the orders in which several calls, with so many positions each, may score all tokens, all but one
    per row, or all rows.
    """
    looked_up = [call.argument(0, "input") for call in passed.functions if call.name == LOOKED_UP]
    tokens = {ids.numel() for ids in looked_up if rows in ids.shape[:2]}  # others are positions
    positions = sum(sizes)
    score_tokens = positions % rows == 0 and not tokens.isdisjoint((positions, positions + rows))
    if len(sizes) > 1 and (score_tokens or positions == rows):
        yield where
        if all(n % rows == 0 for n in sizes):
            yield where._replace(by_columns=True)


def _products(passed: Pass, model: nn.Module) -> Iterator[tuple[tuple[str, int, int], Product]]:
    """Yield the products that the calls of a pass may have scored, with the name of the function, the number
    of classes, and which of the call's products with so many classes it is.
    """
    scored = [call.argument(0, "input") for call in passed.functions if call.name in SCORED]
    hidden = {x.shape[-1] for x in scored if not x.requires_grad}  # as inside a checkpoint
    for call in passed.functions:
        counts = Counter[int]()
        for product in products_of(call, model, hidden):
            yield (call.name, product.classes, counts[product.classes]), product
            counts[product.classes] += 1


def _kind(call: FunctionCall) -> tuple[str, int, int]:
    """Return the name of a scoring function, the axis of its classes and their number."""
    axis = _class_axis(call)
    return call.name, axis, call.argument(0, "input").shape[axis]


def _class_axis(call: FunctionCall) -> int:
    """Return the class axis of a scoring function's input: a cross-entropy's second of three, or the last."""
    return 1 if call.name in ("cross_entropy", "nll_loss") and call.argument(0, "input").ndim > 2 else -1


def _outputs(event: Event) -> Iterator[_Candidate]:
    for place, x in zip(event.places, event.outputs, strict=True):
        yield _Candidate(Tap(event.module, "output", place, event.call), [x], event.outermost)


def bypassed(trace: Trace) -> bool:
    """Return whether some of the loss's gradient does not pass through the tapped tensors, the logits."""
    parameters = [p for p in trace.model.parameters() if p.requires_grad]
    with trace.with_graph() as passed:
        taps = [tap for tap in passed.taps.values() if tap.requires_grad]
        if passed.loss is None or not taps:
            return True
        gradients = torch.autograd.grad(
            passed.loss, [*parameters, *taps], retain_graph=True, allow_unused=True
        )
        of_parameters, of_taps = gradients[: len(parameters)], gradients[len(parameters) :]
        through_taps = torch.autograd.grad(taps, parameters, of_taps, allow_unused=True)
    least = ROUNDED * max(float(g.norm()) for g in gradients if g is not None)
    for whole, through in zip(of_parameters, through_taps, strict=True):
        if whole is None:
            continue
        is_apart = float(whole.norm()) > least if through is None else distance(whole, through) > CLOSE
        if is_apart:
            return True
    return False


def is_joined_elsewhere(trace: Trace) -> bool:
    """Return whether the graph of the loss leads to a parameter beside the tapped tensors, whether or not a
    gradient comes that way.
    """
    parameters = {id(p) for p in trace.model.parameters()}
    with trace.with_graph() as passed:
        if passed.loss is None:
            return False
        behind = nodes_behind(passed.loss.grad_fn, [tap.grad_fn for tap in passed.taps.values()])
        return any(id(getattr(node, "variable", None)) in parameters for node in behind)


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
    """Return the share of logits whose cross-entropy gives no gradient to the last product of their shape;
    None if every one does.

    A logit whose probability rounds to 0 or 1 may have none.
    """
    with trace.with_graph(functions=MULTIPLIED) as passed:
        products = [call for call in passed.functions if call.result.shape[-1:] == logits.shape[-1:]]
        products = [c for c in products if c.result.numel() == logits.numel() and c.result.requires_grad]
        if not products or passed.loss is None:
            return None
        (g,) = torch.autograd.grad(passed.loss, products[-1].result, allow_unused=True)
    if g is None:
        return None
    g, p = (x.reshape(-1, logits.shape[-1]) for x in (g, logits.double().softmax(-1)))
    is_counted = g.any(-1, keepdim=True)
    least = torch.finfo(p.dtype).eps
    is_unsure = is_counted & (p > least) & (p < 1 - least)
    is_lost = is_unsure & (g == 0)
    if not is_lost.any():
        return None
    return Located(float(is_lost.sum() / is_unsure.sum()), products[-1].module)

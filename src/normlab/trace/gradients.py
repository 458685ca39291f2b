"""Which parameters get no gradient, and why: by chance, by design, or because something is cut off.

A gradient that is zero may be so for this batch, this draw or this start alone, and a sound model may leave
some parameters out. So it is looked for at other weights, in other draws and on fewer rows before it counts
as missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

import torch
from torch import Tensor

from normlab.trace.autograd import gradients_in, trainable
from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.targets import RECORDED, FunctionInput
from normlab.trace.functions import Functions
from normlab.trace.starts import is_of_library
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import Tap, later_counts
from normlab.trace.trace import Trace, recomputing

Found = Mapping[str, Tensor | None]
"""Gradients by parameter; None if the loss does not reach it."""
HARMLESS: Final = ("from this batch", "by symmetry", "as experts of other tokens", "as a library builds them")
"""Why a parameter of a sound model may get no gradient."""
DRAWS: Final = 128
"""In how many training steps a parameter that evaluation uses is looked for, if a step draws what it runs:
one that a twentieth of all steps trains is in none of them once in 700 times."""
UNDRAWN: Final = f"none of {DRAWS} steps with other random numbers uses it, though evaluation does"
IDLE, CUT = "its module never runs", "the loss does not depend on it, or is cut off"
SHIFTS: Final = (1, 3, 5, 7)
"""By how many entries parameters are rolled, one after the other, for other weights of the same sizes."""
HEAD: Final = 4
"""The smallest width of a part of a matrix: a head, half of a gate, a third of a fused projection."""


def silent_parameters(step: StepUnderTest) -> tuple[Found, Mapping[str, str]]:
    """Return the gradients of a training step, and why some parameters have none.

    Missing ones are looked for in other draws, if a step draws what it runs, and at other weights: the
    symmetry of a start may cancel one, and other weights route tokens differently.
    """
    trace, weights = step.training, step.training.parameters
    gradients, undrawn = _in_many_draws(step)
    silent = only_rounding(gradients, gradients, step.rounding)
    by_mistake = _beside_what_trains(step, gradients, silent)
    silent = [n for n in silent if n in by_mistake or not step.declare.is_frozen(n)]
    if silent:  # a short step ends the symmetry of a start
        silent = only_rounding(trace.again(weights=_stepped(trace)).gradients, silent, step.rounding)
    never, elsewhere = silent, _gradients_elsewhere(step)
    while never and (others := next(elsewhere, None)) is not None:
        never = only_rounding(others, never, step.rounding)
        gradients = _filled(gradients, others)
    ran = {e.module for e in trace.events if any(x.numel() for x in e.inputs)} if never else set()

    def reason(name: str) -> str:
        by_batch, by_symmetry, as_expert, _ = HARMLESS
        if name not in never:
            return by_batch
        if name in undrawn:
            return UNDRAWN
        if _is_cancelled(trace, name, gradients[name]) and not _moves_loss(step, name, weights[name]):
            return by_symmetry
        is_idle = name.rpartition(".")[0] not in ran
        if is_idle and _is_expert(step, name, gradients):
            return as_expert
        return _why_never(step, name, is_idle=is_idle)

    return gradients, {name: reason(name) for name in silent}


def _gradients_elsewhere(step: StepUnderTest) -> Iterator[Found]:
    """Yield gradients at other weights, which route tokens differently, and last without one of the rows."""
    for shift in SHIFTS:
        yield step.training.again(weights=_rolled(step.training, shift)).gradients
    yield _of_fewer_rows(step)


def _rolled(trace: Trace, shift: int) -> dict[str, Tensor]:
    """Return other weights of the same sizes: the entries of each are moved on by some places."""
    return {n: p.roll(shift) for n, p in trace.parameters.items() if p.is_floating_point()}


def _why_never(step: StepUnderTest, name: str, *, is_idle: bool) -> str:
    *_, as_library = HARMLESS
    if is_of_library(step.model, name.rpartition(".")[0]):
        return as_library
    return IDLE if is_idle else CUT


def _of_fewer_rows(step: StepUnderTest) -> Found:
    """Return the gradients without the last row, or those of all rows if the step takes no others: the signs
    of an absolute error may add up to 0 over the rows.
    """
    with suppress(Exception):  # the model may insist on a number of rows
        rows = step.facts.with_rows(torch.arange(step.facts.rows - 1))
        return step.training.again(batch=rows).gradients
    return step.training.gradients


def _beside_what_trains(step: StepUnderTest, gradients: Found, silent: Collection[str]) -> set[str]:
    """Return the parameters without a gradient that are declared frozen by a pattern that also matches some
    with a gradient: such a pattern does not describe what is frozen.
    """
    beside = set[str]()
    for pattern in step.declare.frozen:
        named = {n for n in gradients if fnmatchcase(n, pattern)}
        if not named.issubset(silent):
            beside |= named.intersection(silent)
    return beside


def _in_many_draws(step: StepUnderTest) -> tuple[Found, frozenset[str]]:
    """Return the gradients of a training step, filled up by those of steps that draw other blocks, such as
    those that a step skips, and the parameters that get one in evaluation, but in none of these steps.
    """
    gradients = step.training.gradients
    if not step.comparison.draws:
        return gradients, frozenset()
    evaluated = step.exact.gradients
    used_in_evaluation = evaluated.keys() - only_rounding(evaluated, evaluated, step.rounding)
    skipped = used_in_evaluation.intersection(only_rounding(gradients, gradients, step.rounding))
    for seed in range(1, DRAWS):
        if not skipped:
            break
        gradients = _filled(gradients, step.training.again(seed=seed).gradients)
        skipped = skipped.intersection(only_rounding(gradients, gradients, step.rounding))
    return gradients, frozenset(skipped)


def _is_missing(gradient: Tensor | None) -> bool:
    """Return whether there is no gradient, or only zeros."""
    return gradient is None or not bool(gradient.any())


def without_gradient(step: StepUnderTest, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the parameters in which the loss, run on the user's own model, has no gradient."""
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return parameters
    with step.unchanged.again(model=step.model, training=True).with_graph() as passed:
        if passed.loss is None or not passed.loss.requires_grad:
            return parameters
        gradients = torch.autograd.grad(passed.loss, trained, allow_unused=True)
    reached = {id(p) for p, g in zip(trained, gradients, strict=True) if g is not None}
    return [p for p in parameters if id(p) not in reached]


def _filled(gradients: Found, others: Found) -> Found:
    """Return gradients with others in the place of those that are missing."""
    return {n: others[n] if _is_missing(g) else g for n, g in gradients.items()}


def only_rounding(gradients: Found, among: Iterable[str], rounding: float) -> list[str]:
    """Return the parameters whose gradient is missing, or nothing but rounding."""
    sizes = {n: 0.0 if g is None else float(g.norm()) for n, g in gradients.items()}
    least = 1e-3 * rounding * max(sizes.values(), default=0.0)
    return [n for n in among if sizes[n] <= least]


def _moves_loss(step: StepUnderTest, name: str, p: Tensor) -> bool:
    """Return whether the loss depends on a parameter; a bias of keys does not count: softmax cancels it."""
    moved = step.training.again(weights={name: _other_value(p)})
    return distance(step.training.loss, moved.loss) > step.rounding


def _other_value(p: Tensor) -> Tensor:
    """Return another value for a parameter. No entry stays, also where all are equal or 0, and the entries do
    not all change alike, which a norm or a softmax would undo.
    """
    return p + p.roll(1) + torch.linspace(-1, 1, p.numel()).reshape(p.shape).to(p)


class TrainedByOthers(NamedTuple):
    """Parameters that the logits depend on, and that only other terms of the loss than their cross-entropy
    give a gradient.
    """

    reached: list[str]
    """Those that the logits are computed from: their cross-entropy reaches them with nothing but rounding."""
    unreached: list[str]
    """Those that only decide what is computed, such as a router whose choice has no weight."""


def trained_by_others(step: StepUnderTest) -> TrainedByOthers:
    """Return the parameters that only other terms of the loss train, although the logits depend on them.

    Other weights choose other experts, and cancel no gradient by chance: a parameter counts if its gradient
    through the logits is rounding at all of them. Raises Unknown without logits.
    """
    trace, places = step.training, step.facts.scored_places
    _ = step.facts.logits  # or Unknown is raised
    through = through_logits(trace, places)
    total = trace.gradients
    untrained = set(only_rounding(total, total, step.rounding))
    names = [n for n in only_rounding(through, through, step.rounding) if n not in untrained]
    names = [n for n in names if not step.declare.is_frozen(n)]
    weights = trace.parameters
    for shift in SHIFTS:
        if names:
            elsewhere = trace.again(weights=_rolled(trace, shift))
            names = only_rounding(through_logits(elsewhere, places), names, step.rounding)
    names = [n for n in names if _moves_logits(step, n, weights[n])]
    reached = [n for n in names if through[n] is not None]
    return TrainedByOthers(reached, [n for n in names if n not in reached])


def _moves_logits(step: StepUnderTest, name: str, p: Tensor) -> bool:
    moved = step.training.again(weights={name: _other_value(p)})
    return distance(step.comparison.logits(step.training), step.comparison.logits(moved)) > step.rounding


def through_logits(trace: Trace, places: Sequence[Tap | FunctionInput]) -> Found:
    """Return the gradient that each parameter gets through the logits at these places; None for one that
    they are not computed from.

    An autograd function may attach the gradient of another term on the way back (an auxiliary loss). That
    does not grow with the gradient that arrives there: it cancels in the difference between what twice and
    what once the logits' gradient gives.
    """
    taps = tuple(place for place in places if isinstance(place, Tap))
    mode = Functions(exact=trace.exact, dropout=trace.dropout)
    parameters = trainable(trace.model)
    with trace.again(taps=taps).with_graph(functions=RECORDED) as passed, recomputing(trace.model, mode):
        tensors = [passed.taps[tap] for tap in taps]
        for place in places:
            if isinstance(place, FunctionInput):
                tensors += place.read_by(passed, trace.model)
        logits = list({id(x): x for x in tensors}.values())
        if passed.loss is None or not logits:
            raise Unknown("the loss is computed differently after the change")
        slopes = gradients_in(passed.loss, logits, trace.model, retain_graph=True)
        # a sum whose gradient in the logits is the loss's: what lies between them and the loss is left out
        products = [(x * slope).sum() for x, slope in zip(logits, slopes, strict=True) if slope is not None]
        along = torch.stack(products).sum()
        asked = list(parameters.values())
        once, twice = (gradients_in(k * along, asked, trace.model, retain_graph=True) for k in (1, 2))
    gradients = dict[str, Tensor | None]()
    once.reverse()
    twice.reverse()
    for name in parameters:  # both sets are freed as they are used: in float64 each is twice a float32 model
        a, b = once.pop(), twice.pop()
        gradients[name] = None if a is None or b is None else b - a
    return gradients


def _is_cancelled(trace: Trace, name: str, gradient: Tensor | None) -> bool:
    """Return whether parts of a parameter's gradient may cancel: it has one, or its module's output
    has. The last bias of a critic shifts all scores, of which the loss takes differences.
    """
    if gradient is None:
        return False
    if gradient.any():
        return True
    module = name.rpartition(".")[0]
    with trace.with_graph(events=True) as passed:
        outputs = [x for e in passed.events if e.module == module for x in e.outputs if x.requires_grad]
        if passed.loss is None or not outputs:
            return False
        of_outputs = gradients_in(passed.loss, outputs, trace.model)
    return not all(map(_is_missing, of_outputs))


def _is_expert(step: StepUnderTest, name: str, gradients: Found) -> bool:
    """Return whether it is in one of a block's numbered alternatives, of which others get a gradient.

    An expert of other tokens gets none in any of its parameters.
    """
    parts, blocks = name.split("."), {b.path for b in step.facts.blocks}
    reached = [n for n, g in gradients.items() if not _is_missing(g)]
    for i, part in enumerate(parts):
        path = ".".join(parts[: i + 1])
        if not part.isdigit() or path in blocks or any(n.startswith(f"{path}.") for n in reached):
            continue
        in_any_expert = ".".join([*parts[:i], "*", *parts[i + 1 :]])
        if any(fnmatchcase(n, in_any_expert) for n in reached):
            return True
    return False


def _stepped(trace: Trace) -> dict[str, Tensor]:
    """Return the weights after a short step down the gradient, by a hundredth of each one's size."""
    values, weights = trace.parameters, dict[str, Tensor]()
    for name, gradient in trace.gradients.items():
        if gradient is not None and bool(gradient.any()):
            value = values[name]
            # one that is 0 moves as if its entries were 1, by the mean square
            size = float(value.norm()) or value.numel() ** 0.5
            weights[name] = value - 0.01 * size / float(gradient.norm()) * gradient
    return weights


def asleep(trace: Trace, idle: Iterable[str]) -> list[str]:
    """Return the parameters that are not idle but never get a gradient, however many steps are taken."""
    silent_before, later = list[str](), later_counts(trace.model)
    trace = trace.again(weights=later) if later else trace
    while silent := [n for n, g in trace.gradients.items() if _is_missing(g) and n not in idle]:
        if silent == silent_before:  # a step more wakes no further one
            return silent
        silent_before = silent
        trace = trace.again(weights=_stepped(trace))
    return []


def hole(gradient: Tensor, axis: int) -> tuple[int, int, int] | None:
    """Find zeros that fill whole equal parts of a matrix's rows, or of its columns.

    Returns:
        The start and the end of the first run of them, and how many follow; None if there are none, or if all
        are zero.
    """
    is_zero, length = ~gradient.any(1 - axis), gradient.shape[axis]
    if not is_zero.any() or is_zero.all():
        return None
    widths = [width for width in range(HEAD, length) if length % width == 0]
    if not any(_fills_parts(is_zero, width) for width in widths):
        return None
    start = int(is_zero.long().argmax())
    end = start + int(is_zero[start:].long().cumprod(0).sum())
    return start, end, length - end


def _fills_parts(is_zero: Tensor, width: int) -> bool:
    """Return whether each part of some width is either all zero or not at all."""
    return bool(is_zero.view(-1, width).eq(is_zero[::width, None]).all())

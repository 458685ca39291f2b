"""Whether a gradient is the derivative of its loss, and where and why there is none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace.autograd import gradients_in, nodes_behind, trainable
from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.targets import RECORDED, FunctionInput
from normlab.trace.functions import OWN, FunctionCall, Functions
from normlab.trace.starts import is_of_library
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import Tap, later_counts
from normlab.trace.trace import Pass, Trace, recomputing

STEPS: Final = (1e-5, 1e-6, 1e-7)
"""Relative changes of the weights that are tried for central differences, until two sizes agree."""
FLOOR: Final = 1e-7
"""Relative error of a central difference in float64 that two step sizes may fail to show."""


class _LossChange(NamedTuple):
    """How the loss moves along its gradient: as the gradient predicts, as measured, and the error of that."""

    expected: float
    measured: float
    error: float

    @property
    def disagrees(self) -> bool:
        return abs(self.expected - self.measured) > 10 * self.error + FLOOR * abs(self.expected)


class Along:
    """Compares a gradient in float64 with central differences of the loss along it.

    Each parameter moves by the same share of its own size, along its own gradient, so what is missing from
    any one of them shows. Rows of padding stay, since lookups drop their gradient by design, and so do
    parameters for which that is ``meant``.
    """

    def __init__(self, trace: Trace, meant: Callable[[str], bool] = lambda _: False) -> None:
        self.trace = trace.again(taps=()) if trace.taps else trace
        own = dict(trace.model.named_parameters())
        tables = [m for m in trace.model.modules() if isinstance(m, nn.Embedding)]
        rows = {id(m.weight): m.padding_idx for m in tables if m.padding_idx is not None}
        every = ((n, g) for n, g in trace.gradients.items() if not meant(n))
        found = {n: g for n, g in every if g is not None and bool(g.any())}
        for n, g in found.items():
            if id(own[n]) in rows:
                found[n] = g.index_fill(0, torch.tensor(rows[id(own[n])], device=g.device), 0)
        values = trace.parameters
        self.gradients, self.own = found, {n: values[n] for n in found}
        self.scale = {n: float(self.own[n].norm() / g.norm().clamp_min(1e-300)) for n, g in found.items()}
        self.attached: tuple[float, ...] = ()
        """The gradients of numbers that are not part of the loss, such as an auxiliary loss that an autograd
        function attaches to something else."""

    def _loss(self, names: Sequence[str], h: float) -> float:
        weights = {n: self.own[n] + h * self.scale[n] * self.gradients[n] for n in names}
        trace = self.trace.again(weights=weights) if names else self.trace
        if not self.attached:
            return float(trace.loss)
        numbers = map(float, _numbers(trace.functions(OWN)))
        return float(trace.loss) + sum(c * x for c, x in zip(self.attached, numbers, strict=True))

    def compare(self, names: Sequence[str]) -> _LossChange:
        """Compare the two in these parameters, at the step sizes that agree best with each other."""
        expected = sum(self.scale[n] * float(self.gradients[n].square().sum()) for n in names)
        start, best = self._loss((), 0.0), _LossChange(expected, 0.0, float("inf"))
        for h in STEPS:
            up, down, near, below = (self._loss(names, x) for x in (h, -h, h / 2, -h / 2))
            a, b = (up - down) / (2 * h), (near - below) / h
            bend = (4 * (near + below - 2 * start) - (up + down - 2 * start)) / h
            error = abs(a - b) + abs(bend)
            if error < best.error:
                best = _LossChange(expected, (4 * b - a) / 3, error)
            if min(best.error / 10, abs(best.measured - expected)) <= FLOOR * abs(expected):
                break
        return best

    @cached_property
    def all(self) -> _LossChange:
        """The comparison in every parameter at once, counting what is attached if that explains it."""
        moved = self.compare(list(self.gradients))
        if not moved.disagrees:
            return moved
        with self.trace.with_graph(functions=(OWN,)) as passed:
            loss, numbers = passed.loss, _numbers(passed.functions)
            live = [x for x in numbers if x.requires_grad]
            found = gradients_in(loss, live, self.trace.model) if loss is not None and live else []
        reached = {id(x): float(g) for x, g in zip(live, found, strict=True) if g is not None}
        self.attached = tuple(reached.get(id(x), 0.0) for x in numbers) if reached else ()
        attached = self.compare(list(self.gradients)) if reached else moved
        if attached.disagrees:
            self.attached = ()
        return moved if attached.disagrees else attached

    def first_wrong(self, modules: Iterable[str]) -> str:
        """Return the last parameter, as modules finish, whose gradient is not the derivative: the first on
        the way back.
        """
        return self._one_wrong(modules, backwards=True)

    def last_wrong(self, modules: Iterable[str]) -> str:
        """Return the last one on the way back."""
        return self._one_wrong(modules, backwards=False)

    def _one_wrong(self, modules: Iterable[str], *, backwards: bool) -> str:
        done = {module: i for i, module in enumerate(modules)}
        order = sorted(self.gradients, key=lambda n: done.get(n.rpartition(".")[0], -1))
        order = order[::-1] if backwards else order
        while len(order) > 1:
            half = (len(order) + 1) // 2
            order = order[:half] if self.compare(order[:half]).disagrees else order[half:]
        return order[0]


def _numbers(calls: Iterable[FunctionCall]) -> list[Tensor]:
    """Return the numbers that enter autograd functions."""
    inputs = [x for call in calls for x in call.args]
    return [x for x in inputs if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]


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
DIVERGENCE: Final = "kl_div"
"""The function of torch by which a loss compares two distributions."""
JOINS: Final = ("Cat", "Stack")
TAKES: Final = ("Select", "Slice", "Split", "Unbind", "Index", "Gather", "MaskedSelect")
"""Beginnings of the names of graph nodes that join tensors, and of those that take a part of one."""
HEAD: Final = 4
"""The smallest width of a part of a matrix: a head, half of a gate, a third of a fused projection."""


def silent_parameters(step: StepUnderTest) -> tuple[Found, Mapping[str, str]]:
    """Return the gradients of a training step, and why some parameters have none.

    Missing ones are looked for in other draws, if a step draws what it runs, and at other weights: the
    symmetry of a start may cancel one, and other weights route tokens differently.
    """
    trace, (found, undrawn) = step.training, _in_many_draws(step)
    silent = only_rounding(found, found, step.rounding)
    together = _beside_what_trains(step, found, silent)
    dead = [n for n in silent if n in together or not step.declare.is_frozen(n)]
    if dead:
        dead = only_rounding(trace.again(weights=_stepped(trace)).gradients, dead, step.rounding)
    never, own = dead, trace.parameters
    for shift in SHIFTS:
        if never:
            rolled = {n: p.roll(shift) for n, p in own.items() if p.is_floating_point()}
            other = trace.again(weights=rolled).gradients
            never, found = only_rounding(other, never, step.rounding), _filled(found, other)
    if never:
        other = _of_fewer_rows(step)
        never, found = only_rounding(other, never, step.rounding), _filled(found, other)
    ran = {e.module for e in trace.events if any(x.numel() for x in e.inputs)} if never else set()

    def reason(name: str) -> str:
        batch, symmetry, expert, library = HARMLESS
        idle = name.rpartition(".")[0] not in ran
        if name not in never:
            return batch
        if name in undrawn:
            return UNDRAWN
        if _is_cancelled(step.training, name, found[name]) and not _moves_loss(step, name, own[name]):
            return symmetry
        if idle and _is_expert(step, name, found):
            return expert
        built = is_of_library(step.model, name.rpartition(".")[0])
        return library if built else IDLE if idle else CUT

    return found, {name: reason(name) for name in dead}


def _of_fewer_rows(step: StepUnderTest) -> Found:
    """Return the gradients without the last row, or those of all rows if the step takes no others: the signs
    of an absolute error may add up to 0 over the rows.
    """
    with suppress(Exception):  # the model may insist on a number of rows
        rows = step.facts.with_rows(torch.arange(step.facts.rows - 1))
        return step.training.again(batch=rows).gradients
    return step.training.gradients


def _beside_what_trains(step: StepUnderTest, found: Found, silent: Collection[str]) -> set[str]:
    """Return the parameters without a gradient that are declared frozen together with others that get one: by
    one pattern, which then names nothing that is frozen.
    """
    together = set[str]()
    for pattern in step.declare.frozen:
        named = {n for n in found if fnmatchcase(n, pattern)}
        if not named.issubset(silent):
            together |= named.intersection(silent)
    return together


def _in_many_draws(step: StepUnderTest) -> tuple[Found, frozenset[str]]:
    """Return the gradients of a training step, filled up by those of steps that draw other blocks, such as
    those that a step skips, and the parameters that get one in evaluation, but in none of these steps.
    """
    found = step.training.gradients
    if not step.comparison.draws:
        return found, frozenset()
    evaluated = step.exact.gradients
    awake = evaluated.keys() - only_rounding(evaluated, evaluated, step.rounding)
    skipped = awake.intersection(only_rounding(found, found, step.rounding))
    for seed in range(1, DRAWS):
        if not skipped:
            break
        found = _filled(found, step.training.again(seed=seed).gradients)
        skipped = skipped.intersection(only_rounding(found, found, step.rounding))
    return found, frozenset(skipped)


def _none(gradient: Tensor | None) -> bool:
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


def _filled(found: Found, other: Found) -> Found:
    return {n: other[n] if _none(g) else g for n, g in found.items()}


def only_rounding(found: Found, among: Iterable[str], rounding: float) -> list[str]:
    """Return the parameters whose gradient is missing, or nothing but rounding."""
    sizes = {n: 0.0 if g is None else float(g.norm()) for n, g in found.items()}
    least = 1e-3 * rounding * max(sizes.values(), default=0.0)
    return [n for n in among if sizes[n] <= least]


def _moves_loss(step: StepUnderTest, name: str, p: Tensor) -> bool:
    """Return whether the loss depends on a parameter; a bias of keys does not count: softmax cancels it."""
    moved = step.training.again(weights={name: _other_value(p)})
    return distance(step.training.loss, moved.loss) > step.rounding


def _other_value(p: Tensor) -> Tensor:
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
    _ = step.facts.logits
    through = through_logits(trace, places)
    total = trace.gradients
    untrained = set(only_rounding(total, total, step.rounding))
    names = [n for n in only_rounding(through, through, step.rounding) if n not in untrained]
    names = [n for n in names if not step.declare.is_frozen(n)]
    values = trace.parameters
    for shift in SHIFTS:
        if names:
            rolled = {n: p.roll(shift) for n, p in values.items() if p.is_floating_point()}
            names = only_rounding(through_logits(trace.again(weights=rolled), places), names, step.rounding)
    names = [n for n in names if _moves_logits(step, n, values[n])]
    reached = [n for n in names if through[n] is not None]
    return TrainedByOthers(reached, [n for n in names if n not in reached])


def _moves_logits(step: StepUnderTest, name: str, p: Tensor) -> bool:
    moved = step.training.again(weights={name: _other_value(p)})
    return distance(step.comparison.logits(step.training), step.comparison.logits(moved)) > step.rounding


def through_logits(trace: Trace, places: Sequence[Tap | FunctionInput]) -> Found:
    """Return the gradient that each parameter gets through the logits at these places; None for one that
    they are not computed from.

    An autograd function may attach the gradient of another term on the way back (an auxiliary loss). That
    does not grow with the gradient that arrives there, so the difference of two and one times it is free of
    it.
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
        pairs = zip(logits, slopes, strict=True)
        along = torch.stack([(x * g).sum() for x, g in pairs if g is not None]).sum()
        own = list(parameters.values())
        once, twice = (gradients_in(k * along, own, trace.model, retain_graph=True) for k in (1, 2))
    found = dict[str, Tensor | None]()
    once.reverse()
    twice.reverse()
    for name in parameters:  # what is done with is let go: each set is twice a model in float32
        a, b = once.pop(), twice.pop()
        found[name] = None if a is None or b is None else b - a
    return found


def _is_cancelled(trace: Trace, name: str, gradient: Tensor | None) -> bool:
    """Return whether parts of a parameter's gradient may cancel: it has one, or its module's output
    has. The last bias of a critic shifts all scores, of which the loss takes differences.
    """
    if gradient is None or gradient.any():
        return gradient is not None
    module = name.rpartition(".")[0]
    with trace.with_graph(events=True) as passed:
        outputs = [x for e in passed.events if e.module == module for x in e.outputs if x.requires_grad]
        if passed.loss is None or not outputs:
            return False
        return any(not _none(gradient) for gradient in gradients_in(passed.loss, outputs, trace.model))


def constant_terms(passed: Pass) -> int:
    """Return how many terms of a loss that is a sum have no gradient: numbers, and tensors cut off.

    The pass has to have recorded ``DIVERGENCE``, which is one term: it holds the entropy of its target, a
    constant of which nobody wants a gradient.
    """
    if passed.loss is None:
        return 0
    divergences = {call.result.grad_fn for call in passed.functions if call.name == DIVERGENCE}
    count = 0
    for node, is_linear, is_taken in _down_to_terms(passed.loss, divergences):
        terms = [term for term, _ in node.next_functions]
        # of what is joined, the part that is not taken again is no term
        is_sum = len(terms) > 1 and not (is_taken and type(node).__name__.startswith(JOINS))
        if is_linear and is_sum and not list(_tensors_saved_by(node)):  # a product with a constant saves that
            count += terms.count(None)
    return count


def terms_of(loss: Tensor) -> list[Any]:
    """Return the nodes of the graph in which the terms of a loss end, from which it is computed linearly."""
    return list(dict.fromkeys(node for node, is_linear, _ in _down_to_terms(loss) if not is_linear))


def cuts_between(trace: Trace, held_by: Mapping[str, int]) -> set[tuple[str, str]]:
    """Return the places, by module and file, that cut off what only such terms of the loss read as train
    parameters of other holders than those behind it. ``held_by`` has the holder of each parameter by path.
    """
    paths = {id(p): path for path, p in trace.model.named_parameters()}

    def holders(nodes: Iterable[Any]) -> set[int | None]:
        variables = (getattr(node, "variable", None) for node in nodes)
        return {held_by.get(paths[id(p)]) for p in variables if id(p) in paths}

    with trace.again(undone=lambda *_: True).with_graph() as passed:
        if passed.loss is None:
            return set()
        cuts = {place: {x.grad_fn for x in joined} for place, joined in passed.cuts.items()}
        every = set().union(*cuts.values())
        read_by = dict[Any, set[int | None]]()
        for term in terms_of(passed.loss):
            behind = set(nodes_behind(term))
            trained = holders(nodes_behind(term, every - {term}))
            for cut in every & behind:
                read_by[cut] = read_by.get(cut, set()) | (trained or {None})

        def is_between(cut: Any) -> bool:
            trained = read_by.get(cut, {None})
            return None not in trained and trained.isdisjoint(holders(nodes_behind(cut)))

        return {place for place, here in cuts.items() if all(map(is_between, here))}


def _down_to_terms(loss: Tensor, terms: Collection[Any] = ()) -> Iterator[tuple[Any, bool, bool]]:
    """Yield the nodes of the graph of a loss down to those of its terms, of which some may be known: each
    with whether it is linear, so that terms may lie behind it, and whether only a part of it is taken.
    """
    ahead = [(loss.grad_fn, False)]
    while ahead:
        node, is_taken = ahead.pop()
        if node is None:
            continue
        # nothing says what somebody's own function computes
        is_known = not isinstance(node, torch.autograd.function.BackwardCFunction) and node not in terms
        # a derivative that is not the same everywhere is that of a term
        is_linear = is_known and not any(x.requires_grad for x in _tensors_saved_by(node))
        is_linear = is_linear and bool(node.next_functions)
        yield node, is_linear, is_taken
        if is_linear:
            is_taken = is_taken or type(node).__name__.startswith(TAKES)
            ahead += [(term, is_taken) for term, _ in node.next_functions]


def _tensors_saved_by(node: Any) -> Iterator[Tensor]:
    return (value for value in _saved_by(node) if isinstance(value, Tensor))


def _saved_by(node: Any) -> Iterator[Any]:
    """Yield what a node of a graph keeps for its backward pass."""
    for name in dir(node):
        if name.startswith("_saved_"):
            value = getattr(node, name)
            yield from value if isinstance(value, (tuple, list)) else (value,)


def _is_expert(step: StepUnderTest, name: str, found: Found) -> bool:
    """Return whether it is in one of a block's numbered alternatives, of which others get a gradient.

    An expert of other tokens gets none in any of its parameters.
    """
    parts, blocks = name.split("."), {b.path for b in step.facts.blocks}
    reached = [n for n, g in found.items() if not _none(g)]
    for i, part in enumerate(parts):
        path = ".".join(parts[: i + 1])
        if not part.isdigit() or path in blocks or any(n.startswith(f"{path}.") for n in reached):
            continue
        glob = ".".join([*parts[:i], "*", *parts[i + 1 :]])
        if any(fnmatchcase(n, glob) for n in reached):
            return True
    return False


def _stepped(trace: Trace) -> dict[str, Tensor]:
    """Return the weights after a short step down the gradient, by a hundredth of each one's size."""
    values, weights = trace.parameters, dict[str, Tensor]()
    for n, g in trace.gradients.items():
        if g is not None and bool(g.any()):
            here = values[n]
            size = float(here.norm()) or here.numel() ** 0.5
            weights[n] = here - 0.01 * size / float(g.norm()) * g
    return weights


def asleep(trace: Trace, idle: Iterable[str]) -> list[str]:
    """Return the parameters that are not idle but never get a gradient, however many steps are taken."""
    dead, later = list[str](), later_counts(trace.model)
    trace = trace.again(weights=later) if later else trace
    while now := [n for n, g in trace.gradients.items() if _none(g) and n not in idle]:
        if now == dead:
            return dead
        dead, trace = now, trace.again(weights=_stepped(trace))
    return []


def lost_results(trace: Trace) -> tuple[list[str], list[str]]:
    """Return modules whose autograd function plays no part in the loss, and those that keep such a number."""
    with trace.with_graph(functions=(OWN,)) as passed:
        held = [(path, x) for path, m in trace.model.named_modules() for x in vars(m).values()]
        kept = [(path, x) for path, value in held for x in _with_graph(value) if x.numel() == 1]
        calls = [(f.module, own) for f in passed.functions if (own := _with_graph(f.result))]
        live = [x for _, own in calls for x in own] + [x for _, x in kept]
        if passed.loss is None or not live:
            return [], []
        gradients = gradients_in(passed.loss, live, trace.model)
    reached = {id(x) for x, g in zip(live, gradients, strict=True) if g is not None}
    lost = [path for path, own in calls if reached.isdisjoint(map(id, own))]
    return lost, [path for path, x in kept if id(x) not in reached]


def _with_graph(value: object) -> list[Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.grad_fn is not None]


def hole(gradient: Tensor, axis: int) -> tuple[int, int, int] | None:
    """Return start and end of the first run of zeros, and what follows, if zeros fill whole equal parts."""
    zero, length = ~gradient.any(1 - axis), gradient.shape[axis]
    widths = [w for w in range(HEAD, length) if length % w == 0]
    if not zero.any() or zero.all() or not any(zero.view(-1, w).eq(zero[::w, None]).all() for w in widths):
        return None
    start = int(zero.long().argmax())
    end = start + int(zero[start:].long().cumprod(0).sum())
    return start, end, length - end

"""Test gradients: they are derivatives, reach every trained part, and nothing between is frozen.

``left_out`` is throughout a function of a parameter's name: whether its gradient is not compared, because it
is declared frozen or the forward pass writes to it. A place where the graph is cut is a module and a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from normlab.base.libraries import is_installed
from normlab.base.units import count
from normlab.checks.property import AT_REST, BACKWARD, Answers, fail, needs, note, property_of
from normlab.errors import UserError
from normlab.private_torch import viewed
from normlab.trace.autograd import nodes_behind
from normlab.trace.dry_run import parameters_of
from normlab.trace.facts import Unknown
from normlab.trace.facts.stacks import block_of, siblings
from normlab.trace.facts.twins import with_earlier_self
from normlab.trace.facts.wiring import MULTIPLIED
from normlab.trace.finite_differences import Along
from normlab.trace.gradients import HARMLESS, Found, asleep, hole, silent_parameters, trained_by_others
from normlab.trace.loss_terms import DIVERGENCE, constant_terms, cuts_between, lost_results
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.surrogates import beyond_surrogates
from normlab.trace.trace import Trace

LeftOut: TypeAlias = Callable[[str], bool]
"""Whether the gradient of a parameter is not compared, by its name."""
Cut: TypeAlias = tuple[str, str]
"""Where the graph is cut: the module that runs there, and the file of the code."""
LARGEST_ERROR: Final = 1e-3
"""The largest error of a central difference, relative to the gradient, by which anything is judged."""


@property_of("gradients", explains=["step", "overfit", "repeats"], passes=8, uses=BACKWARD)
def derivative(step: StepUnderTest) -> Answers:
    """The gradient is the derivative of the loss.

    ∂loss/∂θ · d = (loss(θ + εd) − loss(θ − εd)) / 2ε, with d along the gradient itself: any part of the
    gradient that is missing or wrong shows in that one number.
    """
    trace = _compared_step(step)
    if _runs_without_gradients_too(step):
        yield note(
            "loss", "what the model gives without gradients is a constant of the loss, as an older policy is"
        )
    # the gradient is that of the loss in what the forward pass leaves, not in what it is given
    rewritten = step.forward_writes[trace.training]

    def left_out(name: str) -> bool:
        return step.declare.is_frozen(name) or name in rewritten

    along = Along(trace, left_out)
    needs(step.is_exact, step.why_inexact)
    why = "the forward pass writes to every parameter that gets one" if rewritten else "no parameter gets one"
    needs(along.gradients, f"there is no gradient to compare: {why}")
    why = "the loss has a kink or a jump here at every step size, so it has no derivative"
    needs(along.all.error <= LARGEST_ERROR * along.all.expected, why)
    if rewritten:
        name, module = next(iter(rewritten.items()))
        written = count(len(rewritten), "parameter")
        yield note(module, f"left out is what its forward pass writes to: {written}, such as {name}")
    if along.attached:
        yield note("", f"{len(along.attached)} numbers get a gradient but are not part of the loss")
    if along.all.disagrees:
        yield from _why_apart(step, trace, left_out)


def _why_apart(step: StepUnderTest, trace: Trace, left_out: LeftOut) -> Answers:
    """Why the gradient is not the derivative: notes for what is meant, else a failure.

    What is meant leaves a trace: with the cut undone, or its value held, the gradient is the derivative.
    """
    along, surrogates = beyond_surrogates(trace, left_out, step.facts.order)
    trace = along.trace
    for surrogate in surrogates[:1]:
        function = surrogate.call[0]
        evidence = f"its gradient passes through {function}, whose result does not move with it: a surrogate"
        yield note(surrogate.parameter, evidence)
    if not along.all.disagrees:
        return
    by_library = _cuts_that_explain(step, trace, left_out, is_installed)
    if by_library:
        modules = count(len(by_library), "module")
        evidence = f"the gradient leaves out what a library detaches in {modules}, as it builds them"
        yield note(by_library[0], f"{evidence}; declare detached= to say that this is meant")
        return
    if _is_derivative_where_joined(trace, _cuts_between_optimizers(step, trace), left_out):
        evidence = (
            "what one optimizer trains reads what another one trains as a constant, in a term of its own"
        )
        yield note("loss", evidence)
        return
    if _is_loss_itself_detached(trace, left_out):
        yield note(
            "loss", "it holds a part of what the model gives constant, and the gradient leaves that out"
        )
        return
    place = along.first_wrong(step.facts.order)
    change = along.compare([place])
    if abs(change.measured) <= 10 * change.error:
        yield note(place, "it gets a gradient, but the loss does not move with it: a surrogate gradient")
        return
    evidence = (
        f"the loss moves by {change.measured:.4g} along it where its gradient has {change.expected:.4g}"
    )
    may_be_meant = "frozen= the parameters that it cuts off on purpose"
    cuts = [module for module in _cuts_that_explain(step, trace, left_out, lambda _: True) if module]
    if cuts:
        evidence += f"; it is the derivative where nothing is detached in {', '.join(cuts[:3])}"
        may_be_meant = "detached= the modules that do so on purpose"
    advice = "look for a detach(), a no_grad() or a backward of yours between it and the loss"
    yield fail(place, evidence, f"{advice}; or declare {may_be_meant}")


def _compared_step(step: StepUnderTest) -> Trace:
    """Return the step whose loss the gradient is compared with, without what is constant in it on purpose."""
    trace = step.exact if step.running_statistics else step.training
    if _runs_without_gradients_too(step):
        trace = with_earlier_self(trace)
    if step.declare.detached:
        trace = trace.again(undone=lambda module, _: step.declare.is_detached(module))
    return trace


def _runs_without_gradients_too(step: StepUnderTest) -> bool:
    """Return whether the loss runs a part of the model both with gradients and without."""
    with suppress(Unknown):
        return any(twin.is_self for twin in step.twins.twins)
    return False


def _cuts_that_explain(
    step: StepUnderTest, trace: Trace, left_out: LeftOut, is_undone: Callable[[str], bool]
) -> list[str]:
    """Return the modules that detach something, in code of files that ``is_undone`` accepts, if undoing this
    makes the gradient the derivative of the loss.
    """
    is_declared = step.declare.is_detached
    joined = trace.again(undone=lambda module, file: is_declared(module) or is_undone(file))
    with suppress(Exception):  # with a graph, a model may not run where it writes to its weights
        cuts = joined.once(graph=True).cuts
        modules = list(dict.fromkeys(module for module, _ in cuts if not is_declared(module)))
        if modules and _is_derivative(joined, left_out):
            return modules
    return []


def _is_loss_itself_detached(trace: Trace, left_out: LeftOut) -> bool:
    """Return whether all that keeps the gradient from being the derivative is detached in the loss, or in a
    term of it that a module computes: that defines the loss, as in weights, targets, commitments and
    variational bounds. A whole term without a gradient is no such thing.
    """
    with suppress(Exception):  # with a graph, a model may not run where it writes to its weights
        places = _cuts_in_loss(trace)
        if not _is_derivative_where_joined(trace, places, left_out):
            return False
        recorded = {"functions": (DIVERGENCE,)}
        joined = _joined(trace, places)
        with joined.with_graph(**recorded) as with_joined, trace.with_graph(**recorded) as as_it_is:
            return constant_terms(as_it_is) == constant_terms(with_joined)
    return False


def _joined(trace: Trace, places: Collection[Cut]) -> Trace:
    """Return the step with the graph left whole at these places, too."""
    before = trace.undone or (lambda *_: False)
    return trace.again(undone=lambda *place: place in places or before(*place))


def _is_derivative_where_joined(trace: Trace, places: Collection[Cut], left_out: LeftOut) -> bool:
    """Return whether the gradient is the derivative where nothing is cut off at these places."""
    return bool(places) and _is_derivative(_joined(trace, places), left_out)


def _is_derivative(trace: Trace, left_out: LeftOut) -> bool:
    """Return whether the gradient of a step is the derivative of its loss, as far as that can be measured."""
    change = Along(trace, left_out).all
    return change.error <= LARGEST_ERROR * change.expected and not change.disagrees


def _cuts_between_optimizers(step: StepUnderTest, trace: Trace) -> set[Cut]:
    """Return the places that cut the gradient between what different optimizers hold. Only terms of the loss
    that train parameters of another optimizer read what is cut off there, as those of a probe do, or of a
    head for values, with an optimizer of its own.
    """
    with suppress(Exception):  # with a graph, a model may not run where it writes to its weights
        model, optimizers = step.whole_step.model_and_optimizers
        names = {id(p): name for name, p in model.named_parameters()}
        held_by: dict[str, int] = {}
        for number, optimizer in enumerate(optimizers):
            for p in parameters_of([optimizer]):
                if id(p) in names:
                    held_by[names[id(p)]] = number
        if len({*held_by.values()}) > 1:
            return cuts_between(trace, held_by)
    return set()


def _cuts_in_loss(trace: Trace) -> set[Cut]:
    """Return the places that detach only what no module reads afterwards."""
    with trace.again(undone=lambda *_: True).with_graph(events=True) as passed:
        read = [x.grad_fn for event in passed.events for x in event.inputs if x.grad_fn is not None]
        behind = set[Any]()
        for node in read:
            behind.update(nodes_behind(node, behind))
        cuts = passed.cuts.items()
        return {place for place, joined in cuts if behind.isdisjoint(x.grad_fn for x in joined)}


@property_of(
    "gradients",
    explains=["derivative", "step", "overfit", "reach", "repeats", "update"],
    passes=8,
    uses=BACKWARD,
)
def gradients(step: StepUnderTest) -> Answers:
    """Every trainable parameter, and every row and column of it, gets a gradient in a training step.

    ∂loss/∂θ ≠ 0: what never gets one never learns, and costs memory and time all the same.
    """
    try:
        gradient_of, why = silent_parameters(step)
    except UserError as error:
        yield fail("loss", str(error), "keep the graph from the parameters to the loss")
        return
    for harmless in HARMLESS:
        if names := [name for name, reason in why.items() if reason == harmless]:
            yield note(names[0], f"{count(len(names), 'parameter')} without a gradient, {harmless}")
    if silent := [name for name, reason in why.items() if reason not in HARMLESS]:
        # the last one on the way forward is where the gradient stops on the way back
        evidence = (
            f"{len(silent)} of {len(gradient_of)} parameters get no gradient in training, up to {silent[-1]}"
        )
        advice = "look for detach(), no_grad(), re-entrant checkpoints, a factor of 0; freeze what is spare"
        yield fail(silent[0], f"{evidence}: {why[silent[0]]}", advice)
    yield from _asleep(step, why)
    yield from _by_other_terms(step)
    yield from _lost(step)
    yield from _parts(step, gradient_of)


def _by_other_terms(step: StepUnderTest) -> Answers:
    """Parameters that the logits depend on, but that their cross-entropy cannot train.

    One that only chooses what is computed, such as a router without a weight, gets no gradient from any
    sound loss of the logits.
    """
    if not step.is_exact:
        return
    try:
        reached, unreached = trained_by_others(step)
    except Unknown:
        return
    only_others = "only other terms of the loss give it a gradient: through the logits it is 0 up to rounding"
    if reached:
        evidence = f"the logits are computed from it, but {only_others}"
        advice = "look for a weight that is divided by itself, or another constant that it makes"
        yield fail(reached[0], f"{evidence} ({count(len(reached), 'such parameter')})", advice)
    elif unreached:
        evidence = f"the logits change with it, but {only_others}, as of what only chooses"
        yield note(unreached[0], f"{evidence} ({count(len(unreached), 'such parameter')})")


def _asleep(step: StepUnderTest, why: Mapping[str, str]) -> Answers:
    """Parameters that start at zero, as does what multiplies them: neither ever wakes the other.

    The derivative of a·b is (b, a), which is 0 at a = b = 0. Steps are taken until what is silent stays so.
    """
    at_zero = [n for n, p in step.model.named_parameters() if p.requires_grad and p.numel() and not p.any()]
    if all(step.facts.roles.get(name) == "bias" for name in at_zero):  # biases multiply nothing
        return
    # what lacks a gradient from this batch alone, such as rows of other tokens, may sleep as well
    silent_anyway = [name for name, reason in why.items() if reason != HARMLESS[0]]
    trace = step.unchanged.again(training=not step.comparison.draws, dropout=False)
    if never_awake := asleep(trace, silent_anyway):
        place = next((name for name in at_zero if name in never_awake), never_awake[0])
        number = len(never_awake)
        who_gets = f"{count(number, 'parameter')} {'gets' if number == 1 else 'get'}"
        evidence = f"it starts at 0: {who_gets} no gradient after any number of steps"
        yield fail(place, evidence, "draw one of the two at random")


def _lost(step: StepUnderTest) -> Answers:
    """What is computed with a graph, for the loss, but is not part of it."""
    lost, kept = lost_results(step.training)
    for place in lost[:1]:
        evidence = "an autograd function returns a result with a graph that is not part of the loss"
        yield fail(place, evidence, "pass its result on")
    for place in kept[:1]:
        yield note(place, "a number that it keeps has a graph but is not part of the loss")


class _Hole(NamedTuple):
    """Rows or columns of a matrix, in whole equal parts of it, that get no gradient."""

    name: str
    axis: int
    """0 for rows, 1 for columns."""
    start: int
    end: int
    behind: int
    """How many follow up to the end of the matrix."""


def _parts(step: StepUnderTest, gradient_of: Found) -> Answers:
    """Rows or columns of matrices, in whole heads, that get no gradient, not even from other tokens."""
    facts = step.facts
    holes = _holes(step, gradient_of)
    if not holes:
        return
    everywhere = torch.ones_like(facts.tokens.ids, dtype=torch.bool)
    from_other_tokens = step.training.again(batch=facts.other_tokens(everywhere)).gradients
    for at in holes:
        gradient = from_other_tokens[at.name]
        lines = f"{'columns' if at.axis else 'rows'} {at.start} to {at.end - 1}"
        if gradient is not None and hole(gradient, at.axis) is None:
            yield note(at.name, f"{lines} get no gradient from this batch")
        else:
            evidence = f"{lines} get no gradient, but others do"
            yield fail(at.name, evidence, "a head or a part of it is not used")


def _holes(step: StepUnderTest, gradient_of: Found) -> list[_Hole]:
    """Return the holes of hidden matrices, without those of tables of positions.

    A table of positions may be longer than the batch, and is read from either end, so that what is in front
    of the hole, or behind it, is as long as something in the batch. A matrix that is multiplied as a whole is
    no such table, whatever its lengths.
    """
    facts, parameters = step.facts, dict(step.exact.model.named_parameters())
    lengths = {n for pair in facts.streams.values() for x in pair if x is not None for n in x.shape[:-1]}
    with suppress(Unknown):
        lengths.add(facts.tokens.ids.shape[1])
        lengths.add(int(facts.padding.real.any(0).nonzero().max()) + 1)
    calls = step.exact.functions(*MULTIPLIED)
    factors = [x for call in calls for x in call.args if isinstance(x, Tensor)]
    multiplied = {id(viewed(x)) for x in factors}  # a transposed weight is a view of it
    matrices = {n: g for n, g in gradient_of.items() if g is not None and facts.roles.get(n) == "hidden"}
    holes: list[_Hole] = []
    for name, gradient in matrices.items():
        if gradient.ndim != 2:
            continue
        for axis in (0, 1):
            if (at := hole(gradient, axis)) is None:
                continue
            candidate = _Hole(name, axis, *at)
            is_whole = id(parameters[name]) in multiplied
            if is_whole or lengths.isdisjoint((candidate.start, candidate.behind)):
                holes.append(candidate)
    return holes


# ------------------------------------------------------------------------------------------------- frozen


@property_of("gradients", explains=["siblings"], passes=5, uses=AT_REST)
def frozen(step: StepUnderTest) -> Answers:
    """No parameter between trained parts is frozen unless it is declared; what is declared is frozen, and is
    all that is.

    Whoever freezes on purpose freezes whole parts: the beginning of a stack, a tower, all but adapters. One
    frozen matrix among trained ones, or an end that is frozen as it was drawn, is an accident.
    """
    yield from _trained_as_declared_frozen(step)
    parameters = dict(step.exact.model.named_parameters())
    all_frozen = [name for name, p in parameters.items() if not p.requires_grad]
    undeclared = [name for name in all_frozen if not step.declare.is_frozen(name)]
    yield from _frozen_siblings(step, parameters, undeclared)
    yield from _frozen_ends(step, parameters, undeclared)
    if undeclared and len(undeclared) < len(all_frozen):
        share = f"{len(undeclared)} of {len(all_frozen)} frozen parameters"
        evidence = f"frozen, unlike what is declared: {share} are not in frozen="
        yield fail(undeclared[0], evidence, "set requires_grad, or declare it frozen, too")
    if all_frozen:
        yield note(all_frozen[0], f"{len(all_frozen)} of {len(parameters)} parameters are frozen")


def _frozen_siblings(
    step: StepUnderTest, parameters: Mapping[str, Tensor], undeclared: Collection[str]
) -> Answers:
    """Frozen parameters behind a sibling that trains, or in a block of which other parts train."""
    stacks = step.facts.stacks
    trained_blocks = {block_of(stacks, name) for name, p in parameters.items() if p.requires_grad}
    for names in siblings(stacks, parameters).values():
        trained = [name for name in names if parameters[name].requires_grad]
        if not trained:
            continue
        first_trained = names.index(trained[0])
        between: list[str] = []
        for number, name in enumerate(names):
            is_between = number > first_trained or block_of(stacks, name) in trained_blocks
            if name in undeclared and is_between:
                between.append(name)
        if between:
            is_after = names.index(between[0]) > first_trained
            beside = "some before it" if is_after else "and so do other parts of its block"
            evidence = f"frozen, while {len(trained)} of its {len(names) - 1} siblings train, {beside}"
            yield fail(between[0], evidence, "set requires_grad, or declare it frozen")


def _frozen_ends(
    step: StepUnderTest, parameters: Mapping[str, Tensor], undeclared: Collection[str]
) -> Answers:
    """A table of tokens, or a head, that is frozen as it was drawn while every block trains."""
    facts = step.facts
    tables = set[int]()
    for lookup in facts.lookups:
        ids, table = lookup.argument(0, "input").cpu(), lookup.argument(1, "weight")
        if any(torch.equal(ids.long(), tokens.ids) for tokens in facts.sources):
            tables.add(id(table))
    ends = [n for n in undeclared if id(parameters[n]) in tables or facts.roles.get(n) == "head"]
    blocks = [p.requires_grad for name, p in parameters.items() if block_of(facts.stacks, name)]
    with suppress(Unknown):
        if ends and all(blocks) and not facts.trained:
            evidence = "frozen as drawn while every block trains"
            yield fail(ends[0], evidence, "train it, or declare it frozen")


def _trained_as_declared_frozen(step: StepUnderTest) -> Answers:
    """Patterns of what is declared frozen that name nothing but what the whole loss trains.

    A parameter that only a part of the loss is cut off from may be declared, too; its gradient is not the
    derivative of the loss.
    """
    if {"loss", "gradient"} & step.setup.cannot.keys():
        return
    parameters = dict(step.exact.model.named_parameters())
    for pattern in step.declare.frozen:
        names = [name for name in parameters if fnmatchcase(name, pattern)]
        if not names or not all(parameters[name].requires_grad for name in names):
            continue
        trace = step.exact if step.running_statistics else step.training
        along = Along(trace, lambda name, names=names: name not in names)
        if len(along.gradients) < len(names) or along.all.disagrees:
            continue
        evidence = f"declared frozen by {pattern!r}, but all that it names is trained"
        evidence += f" ({count(len(names), 'parameter')})"
        advice = "clear requires_grad before the optimizer is made, or do not declare it"
        yield fail(names[0], evidence, advice)

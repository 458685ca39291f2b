"""Properties of gradients: they are derivatives, reach every trained part, and nothing between is frozen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from normlab.base.units import count
from normlab.checks.property import AT_REST, BACKWARD, Answers, fail, needs, note, property_of
from normlab.errors import UserError
from normlab.private_torch import viewed
from normlab.trace.autograd import nodes_behind
from normlab.trace.facts import Unknown
from normlab.trace.facts.stacks import block_of, siblings
from normlab.trace.facts.twins import with_earlier_self
from normlab.trace.facts.wiring import MULTIPLIED
from normlab.trace.finite_differences import Along
from normlab.trace.gradients import HARMLESS, Found, asleep, hole, silent_parameters, trained_by_others
from normlab.trace.loss_terms import DIVERGENCE, constant_terms, cuts_between, lost_results
from normlab.trace.reach import is_installed
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.surrogates import beyond_surrogates
from normlab.trace.trace import Trace


@property_of("gradients", explains=["step", "overfit", "repeats"], passes=8, uses=BACKWARD)
def derivative(step: StepUnderTest) -> Answers:
    """The gradient is the derivative of the loss."""
    trace = _compared_step(step)
    if _runs_without_gradients_too(step):
        yield note(
            "loss", "what the model gives without gradients is a constant of the loss, as an older policy is"
        )
    # the gradient is that of the loss in what the forward pass leaves, not in what it is given
    rewritten = step.rewritten[trace.training]

    def left_out(name: str) -> bool:
        return step.declare.is_frozen(name) or name in rewritten

    along = Along(trace, left_out)
    needs(step.is_exact, step.why_inexact)
    why = "the forward pass writes to every parameter that gets one" if rewritten else "no parameter gets one"
    needs(along.gradients, f"there is no gradient to compare: {why}")
    why = "the loss has a kink or a jump here at every step size, so it has no derivative"
    needs(along.all.error <= 1e-3 * along.all.expected, why)
    if rewritten:
        name, module = next(iter(rewritten.items()))
        written = count(len(rewritten), "parameter")
        yield note(module, f"left out is what its forward pass writes to: {written}, such as {name}")
    if along.attached:
        yield note("", f"{len(along.attached)} numbers get a gradient but are not part of the loss")
    if along.all.disagrees:
        yield from _apart(step, trace, left_out)


def _apart(step: StepUnderTest, trace: Trace, left_out: Callable[[str], bool]) -> Answers:
    """Why the gradient is not the derivative: notes for what is meant, else a failure."""
    along, surrogates = beyond_surrogates(trace, left_out, step.facts.order)
    trace = along.trace
    for one in surrogates[:1]:
        say = f"its gradient passes through {one.call[0]}, whose result does not move with it: a surrogate"
        yield note(one.parameter, say)
    if not along.all.disagrees:
        return
    by_library = _cuts_that_explain(step, trace, left_out, is_installed)
    if by_library:
        where = count(len(by_library), "module")
        say = f"the gradient leaves out what a library detaches in {where}, as it builds them"
        yield note(by_library[0], f"{say}; declare detached= to say that this is meant")
        return
    if _is_derivative_where_joined(trace, _cut_between_optimizers(step, trace), left_out):
        say = "what one optimizer trains reads what another one trains as a constant, in a term of its own"
        yield note("loss", say)
        return
    if _is_loss_itself_detached(trace, left_out):
        yield note(
            "loss", "it holds a part of what the model gives constant, and the gradient leaves that out"
        )
        return
    place = along.first_wrong(step.facts.order)
    moved = along.compare([place])
    if abs(moved.measured) <= 10 * moved.error:
        yield note(place, "it gets a gradient, but the loss does not move with it: a surrogate gradient")
        return
    say = f"the loss moves by {moved.measured:.4g} along it where its gradient has {moved.expected:.4g}"
    advice = "look for a detach(), a no_grad() or a backward of yours between it and the loss"
    meant = "frozen= the parameters that it cuts off on purpose"
    if cuts := [module for module in _cuts_that_explain(step, trace, left_out, lambda _: True) if module]:
        say += f"; it is the derivative where nothing is detached in {', '.join(cuts[:3])}"
        meant = "detached= the modules that do so on purpose"
    yield fail(place, say, f"{advice}; or declare {meant}")


def _compared_step(step: StepUnderTest) -> Trace:
    """Return the step whose loss the gradient is compared with, without what is constant in it on purpose."""
    trace = step.exact if step.moving else step.training
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
    step: StepUnderTest, trace: Trace, left_out: Callable[[str], bool], of_code: Callable[[str], bool]
) -> list[str]:
    """Return the modules that detach something, in code of files that ``of_code`` accepts, if undoing this
    makes the gradient the derivative of the loss.
    """
    declared = step.declare.is_detached
    joined = trace.again(undone=lambda module, file: declared(module) or of_code(file))
    with suppress(Exception):  # with a graph, a model may not run where it writes to its weights
        cuts = joined.once(graph=True).cuts
        found = list(dict.fromkeys(module for module, _ in cuts if not declared(module)))
        all_joined = Along(joined, left_out).all
        if found and all_joined.error <= 1e-3 * all_joined.expected and not all_joined.disagrees:
            return found
    return []


def _is_loss_itself_detached(trace: Trace, left_out: Callable[[str], bool]) -> bool:
    """Return whether all that keeps the gradient from being the derivative is detached in the loss, or in a
    term of it that a module computes: that defines the loss, as in weights, targets, commitments and
    variational bounds. A whole term without a gradient is no such thing.
    """
    with suppress(Exception):  # with a graph, a model may not run where it writes to its weights
        places = _cut_in_loss(trace)
        if not _is_derivative_where_joined(trace, places, left_out):
            return False
        divergences = {"functions": (DIVERGENCE,)}
        joined = _joined(trace, places)
        with joined.with_graph(**divergences) as passed, trace.with_graph(**divergences) as as_it_is:
            return constant_terms(as_it_is) == constant_terms(passed)
    return False


def _joined(trace: Trace, places: Collection[tuple[str, str]]) -> Trace:
    """Return the step with the graph left whole at these places, too."""
    before = trace.undone or (lambda *_: False)
    return trace.again(undone=lambda *place: place in places or before(*place))


def _is_derivative_where_joined(
    trace: Trace, places: Collection[tuple[str, str]], left_out: Callable[[str], bool]
) -> bool:
    """Return whether the gradient is the derivative where nothing is cut off at these places."""
    if not places:
        return False
    moved = Along(_joined(trace, places), left_out).all
    return moved.error <= 1e-3 * moved.expected and not moved.disagrees


def _cut_between_optimizers(step: StepUnderTest, trace: Trace) -> set[tuple[str, str]]:
    """Return the places, by module and file, that cut off what only such terms of the loss read as train
    nothing that an optimizer of what is cut off holds: a probe, or a head for values, with its own optimizer.
    """
    with suppress(Exception):  # with a graph, a model may not run where it writes to its weights
        model, optimizers = step.whole_step.handed
        names = {id(p): name for name, p in model.named_parameters()}
        held_by = {
            names[id(p)]: number
            for number, optimizer in enumerate(optimizers)
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in names
        }
        if len({*held_by.values()}) > 1:
            return cuts_between(trace, held_by)
    return set()


def _cut_in_loss(trace: Trace) -> set[tuple[str, str]]:
    """Return the places, by module and file, that detach only what no module reads afterwards."""
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
    """Every trainable parameter, and every row and column of it, gets a gradient in a training step."""
    try:
        found, why = silent_parameters(step)
    except UserError as error:
        yield fail("loss", str(error), "keep the graph from the parameters to the loss")
        return
    for harmless in HARMLESS:
        if names := [n for n in why if why[n] == harmless]:
            yield note(names[0], f"{count(len(names), 'parameter')} without a gradient, {harmless}")
    if bad := [n for n in why if why[n] not in HARMLESS]:
        say = f"{len(bad)} of {len(found)} parameters get no gradient in training, up to {bad[-1]}"
        advice = "look for detach(), no_grad(), re-entrant checkpoints, a factor of 0; freeze what is spare"
        yield fail(bad[0], f"{say}: {why[bad[0]]}", advice)
    yield from chain(_asleep(step, why), _by_other_terms(step), _lost(step), _parts(step, found))


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
    alone = "only other terms of the loss give it a gradient: through the logits it is 0 up to rounding"
    if reached:
        say = f"the logits are computed from it, but {alone}"
        advice = "look for a weight that is divided by itself, or another constant that it makes"
        yield fail(reached[0], f"{say} ({count(len(reached), 'such parameter')})", advice)
    elif unreached:
        say = f"the logits change with it, but {alone}, as of what only chooses"
        yield note(unreached[0], f"{say} ({count(len(unreached), 'such parameter')})")


def _asleep(step: StepUnderTest, why: Mapping[str, str]) -> Answers:
    """Parameters that start at zero, as does what multiplies them: neither ever wakes the other."""
    zero = [n for n, p in step.model.named_parameters() if p.requires_grad and p.numel() and not p.any()]
    if all(step.facts.roles.get(n) == "bias" for n in zero):
        return
    idle = [n for n, reason in why.items() if reason != HARMLESS[0]]
    if dead := asleep(step.unchanged.again(training=not step.comparison.draws, dropout=False), idle):
        say = f"it starts at 0: {count(len(dead), 'parameter')} get no gradient after any number of steps"
        yield fail(next((n for n in zero if n in dead), dead[0]), say, "draw one of the two at random")


def _lost(step: StepUnderTest) -> Answers:
    """What is computed with a graph, for the loss, but is not part of it."""
    (lost, kept), say = lost_results(step.training), "has a graph but is not part of the loss"
    for place in lost[:1]:
        yield fail(place, f"no result of an autograd function that {say}", "pass its result on")
    yield from (note(place, f"a number that it keeps {say}") for place in kept[:1])


def _parts(step: StepUnderTest, found: Found) -> Answers:
    """Rows or columns of matrices, in whole heads, that get no gradient, not even from other tokens."""
    facts = step.facts
    lengths = {n for pair in facts.streams.values() for x in pair if x is not None for n in x.shape[:-1]}
    calls, own = step.exact.functions(*MULTIPLIED), dict(step.exact.model.named_parameters())
    whole = {id(viewed(a)) for c in calls for a in c.args if isinstance(a, Tensor)}
    with suppress(Unknown):  # a table of positions may be longer, and is read from either end
        lengths.add(facts.tokens.ids.shape[1])
        lengths.add(int(facts.padding.real.any(0).nonzero().max()) + 1)
    matrices = {n: g for n, g in found.items() if g is not None and facts.roles.get(n) == "hidden"}
    holes = [(n, axis, hole(g, axis)) for n, g in matrices.items() if g.ndim == 2 for axis in (0, 1)]
    bad = [
        (n, a, one) for n, a, one in holes if one and (id(own[n]) in whole or lengths.isdisjoint(one[::2]))
    ]
    if not bad:
        return
    everywhere = torch.ones_like(facts.tokens.ids, dtype=torch.bool)
    other = step.training.again(batch=facts.other_tokens(everywhere)).gradients
    for name, axis, (start, end, _) in bad:
        g, what = other[name], f"{'columns' if axis else 'rows'} {start} to {end - 1}"
        if g is not None and hole(g, axis) is None:
            yield note(name, f"{what} get no gradient from this batch")
        else:
            yield fail(name, f"{what} get no gradient, but others do", "a head or a part of it is not used")


@property_of("gradients", explains=["siblings"], passes=5, uses=AT_REST)
def frozen(step: StepUnderTest) -> Answers:
    """No parameter between trained parts is frozen unless it is declared; what is declared is frozen, and is
    all that is.
    """
    yield from _trained_as_declared_frozen(step)
    facts, own = step.facts, dict(step.exact.model.named_parameters())
    held = [n for n, p in own.items() if not p.requires_grad]
    bad = [n for n in held if not step.declare.is_frozen(n)]
    trained_blocks = {block_of(facts.stacks, n) for n, p in own.items() if p.requires_grad}
    for names in siblings(facts.stacks, own).values():
        trained = [i for i, n in enumerate(names) if own[n].requires_grad]
        between = [
            n
            for i, n in enumerate(names)
            if n in bad and trained and (i > trained[0] or block_of(facts.stacks, n) in trained_blocks)
        ]
        if between:
            is_after = names.index(between[0]) > trained[0]
            beside = "some before it" if is_after else "and so do other parts of its block"
            say = f"frozen, while {len(trained)} of its {len(names) - 1} siblings train, {beside}"
            yield fail(between[0], say, "set requires_grad, or declare it frozen")
    read = [(f.argument(0, "input").cpu(), f.argument(1, "weight")) for f in facts.lookups]
    tables = {id(w) for ids, w in read if any(torch.equal(ids.long(), t.ids) for t in facts.sources)}
    ends = [n for n in bad if id(own[n]) in tables or facts.roles.get(n) == "head"]
    blocks = [p.requires_grad for n, p in own.items() if block_of(facts.stacks, n)]
    with suppress(Unknown):
        if ends and all(blocks) and not facts.trained:
            yield fail(ends[0], "frozen as drawn while every block trains", "train it, or declare it frozen")
    if bad and len(bad) < len(held):
        share = f"{len(bad)} of {len(held)} frozen parameters"
        say = f"frozen, unlike what is declared: {share} are not in frozen="
        yield fail(bad[0], say, "set requires_grad, or declare it frozen, too")
    if held:
        yield note(held[0], f"{len(held)} of {len(own)} parameters are frozen")


def _trained_as_declared_frozen(step: StepUnderTest) -> Answers:
    """Patterns of what is declared frozen that name nothing but what the whole loss trains.

    A parameter that only a part of the loss is cut off from may be declared, too; its gradient is not the
    derivative of the loss.
    """
    if {"loss", "gradient"} & step.setup.cannot.keys():
        return
    parameters = dict(step.exact.model.named_parameters())
    for pattern in step.declare.frozen:
        named = [name for name in parameters if fnmatchcase(name, pattern)]
        if not named or not all(parameters[name].requires_grad for name in named):
            continue
        trace = step.exact if step.moving else step.training
        along = Along(trace, lambda name, named=named: name not in named)
        if len(along.gradients) < len(named) or along.all.disagrees:
            continue
        say = f"declared frozen by {pattern!r}, but all {count(len(named), 'parameter')} of it are trained"
        yield fail(named[0], say, "clear requires_grad before the optimizer is made, or do not declare it")

"""Properties of outputs: they are numbers, the same twice, and the same however they are computed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress
from inspect import signature
from itertools import chain

import torch
from torch import Tensor, nn

from normlab.checks.property import Answers, fail, needs, note, property_of
from normlab.errors import UserError
from normlab.trace.compare import distance, part_ways, rounding_of, whole
from normlab.trace.equivalents import difference_when_loaded, generated, left_out, low_calls, roundings
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.gradients import Along
from normlab.trace.restore import in_mode, same, same_random_state
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import call_model, compiles, loose_tensors, shared_names, tensors_in
from normlab.trace.trace import Trace


@property_of("outputs", passes=1)
def finite(step: StepUnderTest) -> Answers:
    """Weights, buffers, outputs, the loss and its gradient are finite numbers."""
    model, trace = step.whole.model, step.whole
    for path, x in [*model.named_parameters(), *model.named_buffers()]:
        if _broken([x]) or (x.requires_grad and x.isinf().any()):
            yield fail(path, "holds NaN or infinity before the first step", "initialize or load it")
    if not torch.isfinite(trace.loss) or _broken(trace.outputs):
        place = next((e.module for e in trace.events if _broken(e.outputs) and not _broken(e.inputs)), "loss")
        say = "outputs NaN on finite inputs" if place != "loss" else f"the loss is {float(trace.loss)}"
        advice = "look for a row whose keys are all masked, a division by zero, a target outside the classes"
        yield fail(place, say, advice)
    with suppress(UserError):  # another property handles a loss without a gradient
        found = trace.again(training=True).gradients
        if bad := [n for n, g in found.items() if g is not None and not g.isfinite().all()]:
            others = f"as are those of {len(bad) - 1} others"
            say = f"its gradient is NaN or infinite although the loss is finite, {others}"
            yield fail(bad[-1], say, "look for a root, a norm or a logarithm at 0, or a masked division by 0")


def _broken(tensors: Iterable[Tensor]) -> bool:
    return any(x.is_floating_point() and bool(x.isnan().any()) for x in tensors)


@property_of("outputs", explains=["causality", "rows", "padding", "cache", "state_dict"], passes=3)
def evaluation_repeats(step: StepUnderTest) -> Answers:
    """Two runs in evaluation mode on the same batch give the same results."""
    first = step.exact.again(dropout=True)
    second = first.again(seed=1)
    apart = step.difference(first, second, whole)
    if apart is None:
        return
    by_dropout = step.difference(step.exact, step.exact.again(seed=1), whole) is None
    calls = zip(first.events, second.events, strict=False)
    place = next((a.module for a, b in calls if part_ways(a, b, whole, step.rounding)), None)
    if place is not None and (by_dropout or _asks_the_same(step, second)):
        say = f"two runs in evaluation mode differ by {apart.size:.1e} of the output"
        advice = "draw only in training mode: training=self.training, and dropout_p=0.0 otherwise"
        yield fail(place, say + ", by dropout" * by_dropout, advice)
    else:
        yield note(place or "", "the task is drawn: outputs depend on the random state in evaluation mode")


def _asks_the_same(step: StepUnderTest, other: Trace) -> bool:
    """Whether the loss is a cross-entropy at the same places in another run, so that no task is drawn."""
    with suppress(Unknown):
        return step.facts.targets.counted.equal(Facts(other, step.declare).targets.counted)
    return False


@property_of("outputs", explains=["gradients", "step"], passes=4)
def training_equals_evaluation(step: StepUnderTest) -> Answers:
    """Without dropout, training mode gives the same outputs as evaluation mode."""
    found = step.difference(step.exact, step.training, whole)
    if found is None:
        apart = distance(step.exact.loss, step.training.loss)
        if apart > step.rounding and not step.draws:
            yield note("loss", f"it differs by {apart:.1e} between the modes, with the same outputs")
    elif step.moving:
        raise Unknown(f"{step.moving[0]} holds running statistics, which evaluation reads")
    elif step.draws:
        raise Unknown("training draws other numbers than torch's dropout: pass the model with a rate of 0")
    else:
        say = f"without dropout, outputs of training and of evaluation differ by {found.size:.1e}"
        yield fail(found.module, say, "nothing besides dropout may depend on self.training")


@property_of(
    "outputs",
    passes=14,
    applies=lambda step: needs(any(map(compiles, step.setup.model.modules())), "nothing of it is compiled"),
)
def compiled_equals_plain(step: StepUnderTest) -> Answers:
    """The compiled model gives the outputs of the uncompiled one, in either mode, up to rounding."""
    model, alone = step.setup.model, step.setup.loss is None

    def flat(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([x.detach().flatten().double() for x in tensors if x.is_floating_point()])

    def read(trace: Trace) -> Tensor:
        return flat(trace.outputs if alone else [trace.loss])

    def compiled(seed: int, *, training: bool) -> Tensor:
        guards = same(model, parameters=False), in_mode(model, training=training), same_random_state(seed)
        with guards[0], guards[1], guards[2], torch.set_grad_enabled(training):
            for layer in model.modules():
                if isinstance(layer, nn.modules.dropout._DropoutNd):
                    layer.p = 0.0
            outputs = call_model(model, step.batch) if alone else step.loss_of(model, step.batch)
            return flat(x for _, x in tensors_in(outputs))

    for training in (False, True):
        own, plain = compiled(0, training=training), step.whole.again(training=training, dropout=not training)
        draws = training and not torch.equal(own, compiled(1, training=training))
        needs(not draws, "in training it draws other numbers than dropout's: pass it with a rate of 0")
        if (apart := distance(own, read(plain))) > (least := rounding_of(plain, read)):
            say = f"compiled it differs by {apart:.1e}, while rounding explains {least:.1e}"
            advice = "compile with backend='aot_eager' and part by part to find the graph that differs"
            yield fail("" if alone else "loss", say + " in training mode" * training, advice)


@property_of(
    "outputs", passes=9, applies=lambda s: needs(s.training.run_again, "backward() runs nothing again")
)
def dropout_repeats(step: StepUnderTest) -> Answers:
    """A block that is recomputed in the backward pass uses the dropout masks of its forward pass."""
    drawn = step.training.again(dropout=True)
    needs(step.is_exact, step.why_inexact)
    needs(distance(drawn.loss, drawn.again(seed=1).loss) > step.rounding, "nothing is drawn in training")
    along = Along(drawn)
    if along.all.disagrees and not Along(step.training).all.disagrees:
        say = "with dropout on, the gradient is not the derivative of the loss; without, it is"
        advice = "let checkpoints keep the random state: preserve_rng_state=True"
        yield fail(along.first_wrong(step.facts.order), say, advice)


@property_of("round trips", explains=["overfit"], passes=12, applies=low_calls)
def precision(step: StepUnderTest) -> Answers:
    """In low precision, each module agrees with its float32 twin on the same inputs, up to rounding."""
    for path, ratio, count in roundings(step):
        if ratio > count**0.5:
            say = f"its output is {ratio:.0f} roundings off its twin in float32"
            why = f"{say}, whose {count} operations explain {count**0.5:.1f}"
            yield fail(path, why, "compute angles, positions and norms in float32")


@property_of("round trips", explains=["meta"], passes=5)
def state_dict(step: StepUnderTest) -> Answers:
    """A freshly made model that loads the state dict gives the same outputs."""
    original, made = step.original, step.fresh.built()
    unsaved, model = loose_tensors(original), copy.deepcopy(original) if made is None else made
    if made is None:
        for _, tensor in tensors_in(model.state_dict()):
            tensor.zero_()
    if (apart := difference_when_loaded(step, model)) is not None:
        place = next((n for n in unsaved if n.rpartition(".")[0] == apart[0]), apart[0])
        lost = f"; no state dict holds {', '.join(unsaved[:3])}" if unsaved else ""
        yield fail(place, apart[1] + lost, "register what is drawn or learnt, as a parameter or a buffer")
    elif frozen := [*left_out(step, original)]:
        yield note(frozen[0], f"the state dict leaves out what is frozen ({len(frozen)} in all)")
    elif unsaved and made is None:
        yield note(unsaved[0], "no state dict holds it; make= would show whether it is made the same way")


@property_of("round trips", passes=4)
def meta(step: StepUnderTest) -> Answers:
    """A model built on the meta device, moved off it with to_empty and loaded gives the same outputs."""
    original, model = step.original, step.fresh.on_meta()
    if model is None:
        raise Unknown("the model cannot be made again: pass make=")
    why = "make() builds the model on a device of its own, or returns one that it has"
    needs(all(p.is_meta for p in model.parameters()), why)
    tied, own = shared_names(model), step.setup.make is not None
    lost = [n for n, _ in model.named_buffers() if n not in model.state_dict()] + loose_tensors(model)
    if lost and not own:
        raise Unknown(f"no state dict holds {len(lost)} tensors, such as {lost[0]}: from_pretrained() does")
    model = model.to_empty(device=next(original.parameters()).device)
    with torch.no_grad():
        for t in chain(model.parameters(), model.buffers()):
            t.fill_(float("nan")) if t.is_floating_point() else t.zero_()
    if lost:
        yield note(lost[0], f"no state dict holds {', '.join(lost[:3])}: fill them again after to_empty()")
    if own and (untied := [n for same in tied if same not in shared_names(model) for n in same[1:]]):
        yield note(min(untied), "to_empty() loses its tie, which must be made again")
    if not lost and (apart := difference_when_loaded(step, model)) is not None:
        yield fail(*apart, "make() must build the model as it is trained")


@property_of("round trips", passes=8)
def cache(step: StepUnderTest) -> Answers:
    """Generation with a cache gives, token by token, the logits of one pass over the whole sequence."""
    model, facts = step.original, step.facts
    needs("past_key_values" in signature(model.forward).parameters, "the model takes no past_key_values")
    needs(facts.causal and facts.tokens.column >= 0, "its inputs are not the tokens that it predicts")
    name = str(facts.tokens.place[-1]) if isinstance(step.batch, Mapping) else "input_ids"
    full, stepwise = generated(step.exact, facts.tokens.ids, name)
    if (size := distance(full, stepwise)) > step.rounding:
        apart = (full - stepwise).abs().amax((0, 2)) > step.rounding * full.abs().max()
        say = f"with a cache the logits differ by {size:.1e}, from token {int(apart.int().argmax())} on"
        yield fail("", say, "look at positions, the mask and what is kept of each layer")

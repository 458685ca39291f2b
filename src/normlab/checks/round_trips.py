"""Properties of round trips: through low precision, a state dict, the meta device, and a cache."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from itertools import chain

import torch

from normlab.checks.property import FORWARD, OTHER_BATCHES, Answers, fail, needs, note, property_of
from normlab.trace.budget import Cost
from normlab.trace.compare import distance
from normlab.trace.copies import copied_model
from normlab.trace.facts import Unknown
from normlab.trace.generation import generated
from normlab.trace.low_precision import low_calls, roundings, roundings_of_loss
from normlab.trace.reloading import difference_when_loaded, left_out
from normlab.trace.starts import NOT_MADE
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import loose_tensors, shared_names, tensors_in


@property_of(
    "round trips",
    explains=["overfit"],
    passes=8,
    steps=2,
    applies=low_calls,
    asking=Cost(1, steps=2),
    uses=FORWARD,
)
def precision(step: StepUnderTest) -> Answers:
    """In low precision, each module agrees with its float32 twin on the same inputs, and the loss with that
    of the same outputs in float32, up to rounding.
    """
    for path, ratio, count in roundings(step):
        if ratio > count**0.5:
            say = f"its output is {ratio:.0f} roundings off its twin in float32"
            why = f"{say}, whose {count} operations explain {count**0.5:.1f}"
            yield fail(path, why, "compute angles, positions and norms in float32")
    if (loss := roundings_of_loss(step)) is not None:
        ratio, count = loss
        if ratio > count + 1:
            say = f"it is {ratio:.0f} roundings off that of the same outputs in float32"
            why = f"{say}, and {count} operations make it of them"
            yield fail("loss", why, "compute the loss in float32: outputs.float()")


@property_of("round trips", explains=["meta"], passes=3, uses=FORWARD)
def state_dict(step: StepUnderTest) -> Answers:
    """A freshly made model that loads the state dict gives the same outputs."""
    original, made = step.exact_copy, step.fresh.built()
    unsaved, model = loose_tensors(original), copied_model(original) if made is None else made
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
        yield note(unsaved[0], "no state dict holds it, and nothing shows whether a new model has the same")


@property_of("round trips", passes=3, uses=FORWARD)
def meta(step: StepUnderTest) -> Answers:
    """A model built on the meta device, moved off it with to_empty and loaded gives the same outputs."""
    original, model = step.exact_copy, step.fresh.on_meta()
    if model is None:
        raise Unknown(NOT_MADE)
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


@property_of("round trips", passes=8, uses=OTHER_BATCHES)
def cache(step: StepUnderTest) -> Answers:
    """Generation with a cache gives, token by token, the logits of one pass over the whole sequence."""
    model, facts = step.exact.model, step.facts
    needs(step.copies.loss_runs_model, step.copies.refusal)
    needs("past_key_values" in signature(model.forward).parameters, "the model takes no past_key_values")
    needs(facts.causal and facts.tokens.column >= 0, "its inputs are not the tokens that it predicts")
    name = str(facts.tokens.place[-1]) if isinstance(step.batch, Mapping) else "input_ids"
    full, stepwise = generated(step.exact, facts.tokens.ids, name)
    if (size := distance(full, stepwise)) > step.rounding:
        apart = (full - stepwise).abs().amax((0, 2)) > step.rounding * full.abs().max()
        say = f"with a cache the logits differ by {size:.1e}, from token {int(apart.int().argmax())} on"
        yield fail("", say, "look at positions, the mask and what is kept of each layer")

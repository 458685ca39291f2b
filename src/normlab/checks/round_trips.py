"""Test what should give the same again: low precision, a state dict, the meta device, and a cache."""

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

    Roundings of n operations that are independent of each other add up to √n of them. All n that make the
    single number of a loss may round in the same direction, and so may its own type: n + 1.
    """
    for path, ratio, operations in roundings(step):
        if ratio > operations**0.5:
            evidence = f"its output is {ratio:.0f} roundings off its twin in float32"
            evidence += f", whose {operations} operations explain {operations**0.5:.1f}"
            yield fail(path, evidence, "compute angles, positions and norms in float32")
    if (of_loss := roundings_of_loss(step)) is not None:
        ratio, operations = of_loss
        if ratio > operations + 1:
            evidence = f"it is {ratio:.0f} roundings off that of the same outputs in float32"
            evidence += f", and {operations} operations make it of them"
            yield fail("loss", evidence, "compute the loss in float32: outputs.float()")


@property_of("round trips", explains=["meta"], passes=3, uses=FORWARD)
def state_dict(step: StepUnderTest) -> Answers:
    """A freshly made model that loads the state dict gives the same outputs.

    f(x; make(), loaded) = f(x): what is not in the state dict is lost with the process. Without ``make``, a
    copy with zeros in all that the state dict holds stands in; it has the same values elsewhere, so that it
    cannot show what a new model would lack there.
    """
    original, made = step.exact_copy, step.fresh.built()
    unsaved = loose_tensors(original)
    if made is not None:
        model = made
    else:
        model = copied_model(original)
        for _, tensor in tensors_in(model.state_dict()):
            tensor.zero_()
    difference = difference_when_loaded(step, model)
    if difference is not None:
        module, evidence = difference
        # what no state dict holds is the likely cause, if it is in that module
        place = next((name for name in unsaved if name.rpartition(".")[0] == module), module)
        lost = f"; no state dict holds {', '.join(unsaved[:3])}" if unsaved else ""
        yield fail(place, evidence + lost, "register what is drawn or learnt, as a parameter or a buffer")
    elif frozen := [*left_out(step, original)]:
        yield note(frozen[0], f"the state dict leaves out what is frozen ({len(frozen)} in all)")
    elif unsaved and made is None:
        yield note(unsaved[0], "no state dict holds it, and nothing shows whether a new model has the same")


@property_of("round trips", passes=3, uses=FORWARD)
def meta(step: StepUnderTest) -> Answers:
    """A model built on the meta device, moved off it with to_empty and loaded gives the same outputs.

    On the way, ties are lost, and so are buffers that no state dict holds. That is a note for the user's own
    ``make``, whose author may fill and tie them again; for a library's class it is left to the library.
    """
    original, model = step.exact_copy, step.fresh.on_meta()
    if model is None:
        raise Unknown(NOT_MADE)
    why = "make() builds the model on a device of its own, or returns one that it has"
    needs(all(p.is_meta for p in model.parameters()), why)
    tied, of_user = shared_names(model), step.setup.make is not None
    saved = model.state_dict()
    lost = [name for name, _ in model.named_buffers() if name not in saved] + loose_tensors(model)
    if lost and not of_user:
        raise Unknown(f"no state dict holds {len(lost)} tensors, such as {lost[0]}: from_pretrained() does")
    model = model.to_empty(device=next(original.parameters()).device)
    with torch.no_grad():
        # empty memory may hold the right numbers by chance: NaN shows what loading leaves as it is
        for tensor in chain(model.parameters(), model.buffers()):
            tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.zero_()
    if lost:
        yield note(lost[0], f"no state dict holds {', '.join(lost[:3])}: fill them again after to_empty()")
    if of_user:
        still_tied = shared_names(model)
        untied = [name for names in tied if names not in still_tied for name in names[1:]]
        if untied:
            yield note(min(untied), "to_empty() loses its tie, which must be made again")
    if not lost and (difference := difference_when_loaded(step, model)) is not None:
        module, evidence = difference
        yield fail(module, evidence, "make() must build the model as it is trained")


@property_of("round trips", passes=8, uses=OTHER_BATCHES)
def cache(step: StepUnderTest) -> Answers:
    """Generation with a cache gives, token by token, the logits of one pass over the whole sequence.

    f(x[t] | cache of x[< t]) = f(x[≤ t])[t]: no later token may matter to a causal model, so what it keeps
    of the earlier ones must be enough.
    """
    model, facts = step.exact.model, step.facts
    needs(step.copies.loss_runs_model, step.copies.refusal)
    needs("past_key_values" in signature(model.forward).parameters, "the model takes no past_key_values")
    needs(facts.causal and facts.tokens.column >= 0, "its inputs are not the tokens that it predicts")
    # the keyword of transformers, where the batch has none
    keyword = str(facts.tokens.place[-1]) if isinstance(step.batch, Mapping) else "input_ids"
    at_once, stepwise = generated(step.exact, facts.tokens.ids, keyword)
    size = distance(at_once, stepwise)
    if size > step.rounding:
        off_by_token = (at_once - stepwise).abs().amax((0, 2))
        differs = off_by_token > step.rounding * at_once.abs().max()
        evidence = (
            f"with a cache the logits differ by {size:.2g}, from token {int(differs.int().argmax())} on"
        )
        yield fail("", evidence, "look at positions, the mask and what is kept of each layer")

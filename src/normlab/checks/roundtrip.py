"""Properties of round trips: saving and loading a model, and a generation with a cache, change nothing."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.checks.property import Answers, Untestable, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.compare import distance, whole
from normlab.trace.functions import Functions
from normlab.trace.tensors import tensors_in
from normlab.trace.untouched import same_random_state, undisturbed

OTHER_SEED: Final = 7
"""A model is made anew by another seed, so that what is not loaded differs."""
GENERATED: Final = 24
"""Tokens of a sequence that is generated with a cache; the first of them are read at once."""


def _original(step: Step) -> nn.Module:
    """The model of the exact trace. Raises Untestable where that is the user's own."""
    return step.exact.model if step.copyable else step.copy()


def made_anew(step: Step) -> nn.Module | None:
    """A model of ``make``, or of Hugging Face's class on its configuration; None where there is neither.

    Raises Untestable where the class makes a model with other tensors.
    """
    library, model, make = sys.modules.get("transformers"), step.model, step.setup.make
    if make is None and (library is None or not isinstance(model, library.PreTrainedModel)):
        return None
    with same_random_state(OTHER_SEED):
        made = make() if make is not None else type(model)(copy.deepcopy(model.config))
    if make is None and made.state_dict().keys() != model.state_dict().keys():
        raise Untestable("the model was changed after its class had made it: pass make=")
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return made.to(kinds.pop()) if len(kinds) == 1 else made


def _loaded(step: Step, model: nn.Module) -> tuple[str, str] | None:
    """Load the state of the exact trace's model; return where and how that model then differs."""
    model = model.double() if step.is_exact else model
    try:
        result = model.load_state_dict(copy.deepcopy(step.exact.model.state_dict()), strict=False)
    except RuntimeError as error:
        return "", f"the state does not fit a model made anew: {str(error).splitlines()[-1].strip()}"
    if keys := [*result.missing_keys, *result.unexpected_keys]:
        return keys[0], f"{len(keys)} names are in one state dict only: the model's, or that of one made anew"
    apart = step.difference(step.exact, step.exact.again(model=model), whole)
    return (apart.module, f"outputs differ by {apart.size:.1e} after the round trip") if apart else None


@property_of("round trips", explains=["meta"], passes=5)
def state_dict(step: Step) -> Answers:
    """A freshly made model that loads the state dict puts out the same.

    Without ``make`` it is a copy whose parameters and saved buffers are zero.
    """
    original, made = _original(step), made_anew(step)
    unsaved, model = _unregistered(original), copy.deepcopy(original) if made is None else made
    if made is None:
        for _, tensor in tensors_in(model.state_dict()):
            tensor.zero_()
    if (apart := _loaded(step, model)) is not None:
        place = next((n for n in unsaved if n.rpartition(".")[0] == apart[0]), apart[0])
        lost = f"; no state dict holds {', '.join(unsaved[:3])}" if unsaved else ""
        yield fail(place, apart[1] + lost, "register what is drawn or learnt, as a parameter or a buffer")
    elif unsaved and made is None:
        yield note(unsaved[0], "no state dict holds it; make= would show whether it is made the same")


def _unregistered(model: nn.Module) -> list[str]:
    """Floating tensors that modules hold as plain attributes."""
    known = {id(t) for t in chain(model.parameters(), model.buffers())}
    return [
        f"{path}.{name}".strip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, nn.Module)
        and any(t.is_floating_point() and id(t) not in known for _, t in tensors_in(value))
    ]


@property_of("round trips", passes=4)
def meta(step: Step) -> Answers:
    """A model that is built on the meta device, emptied onto a real one and loaded puts out the same.

    Buffers that no state dict holds, and ties, are lost on this way. A note names those of the user's own
    models: their author may fill and tie them again, as Hugging Face's from_pretrained does.
    """
    original = _original(step)
    with torch.device("meta"):
        model = made_anew(step)
    if model is None:
        raise Untestable("the model cannot be made anew: pass make=")
    if not all(p.is_meta for p in model.parameters()):
        raise Untestable("make() builds the model on a device of its own, or returns one that it has")
    tied, own = _ties(model), step.setup.make is not None
    lost = [n for n, _ in model.named_buffers() if n not in model.state_dict()] + _unregistered(model)
    if lost and not own:
        raise Untestable(f"no state dict holds {len(lost)} tensors, as {lost[0]}: from_pretrained() does")
    model = model.to_empty(device=next(original.parameters()).device)
    with torch.no_grad():
        for t in chain(model.parameters(), model.buffers()):
            t.fill_(float("nan")) if t.is_floating_point() else t.zero_()
    if lost:
        yield note(lost[0], f"no state dict holds {', '.join(lost[:3])}: fill them again after to_empty()")
    if own and (untied := sorted(tied - _ties(model))):
        yield note(untied[0], "to_empty() loses its tie, which must be made again")
    if not lost and (apart := _loaded(step, model)) is not None:
        yield fail(*apart, "make() must build the model as it is trained")


def _ties(model: nn.Module) -> set[str]:
    """Names of parameters that are others, too."""
    first = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    return {n for n, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != n}


@property_of("round trips", passes=5)
def cache(step: Step) -> Answers:
    """A generation with a cache has, token by token, the logits of the full pass."""
    model, facts = _original(step), step.facts
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise Untestable("the model takes no past_key_values")
    if not facts.causal or facts.tokens.column < 0:
        raise Untestable("its inputs are not the tokens that it predicts")
    ids = facts.tokens.ids[:2, :GENERATED].to(next(model.parameters()).device)
    name = facts.tokens.place[-1] if isinstance(step.batch, Mapping) else "input_ids"
    start, width, past = max(ids.shape[1] // 6, 1), ids.shape[1], None
    with undisturbed(model), torch.no_grad(), Functions(exact=step.is_exact, dropout=False):
        if step.is_exact:
            torch.set_default_dtype(torch.float64)
        whole, parts = _generated(model(**{name: ids, "use_cache": False}))[0], list[Tensor]()
        for t in (0, *range(start, width)):
            part = ids[:, t : t + 1] if t else ids[:, :start]
            logits, past = _generated(model(**{name: part, "past_key_values": past, "use_cache": True}))
            if past is None:
                raise Untestable("its output has no past_key_values")
            parts.append(logits)
    stepwise = torch.cat(parts, 1)
    if (size := distance(whole, stepwise)) > step.rounding:
        apart = (whole - stepwise).abs().amax((0, 2)) > step.rounding * whole.abs().max()
        evidence = f"with a cache the logits differ by {size:.1e}, from token {int(apart.int().argmax())} on"
        yield fail("", evidence, "look at positions, the mask and what is kept of each layer")


def _generated(output: Any) -> tuple[Tensor, Any]:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise Untestable("its output has no logits")
    return logits, getattr(output, "past_key_values", None)

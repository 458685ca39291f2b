"""Properties of round trips: saving and loading a model, and a generation with a cache, change nothing."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step, distance
from normlab.trace.functions import Functions
from normlab.trace.tensors import tensors_in
from normlab.trace.untouched import same_random_state, undisturbed

OTHER_SEED: Final = 7
"""A fresh model is drawn by another seed, so that what is not loaded differs."""
GENERATED: Final = 24
"""Tokens of a sequence that is generated with a cache; the first of them are read at once."""


def maker(step: Step) -> Callable[[], nn.Module] | None:
    """How to make the model anew: ``make``; for Hugging Face's models, their class on their configuration."""
    if step.setup.make is not None:
        return step.setup.make
    library = sys.modules.get("transformers")
    if library is not None and isinstance(step.model, library.PreTrainedModel):
        return lambda: type(step.model)(copy.deepcopy(step.model.config))
    return None


def fresh(step: Step, make: Callable[[], nn.Module]) -> nn.Module:
    """A model that was made anew, in the types of the one under test."""
    with same_random_state(OTHER_SEED):
        model = make()
    kinds = {p.dtype for p in step.model.parameters() if p.is_floating_point()}
    return model.to(kinds.pop()) if len(kinds) == 1 else model


def entries(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of its state dict, copied."""
    return {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}


def same_outputs(step: Step, model: nn.Module) -> tuple[float, str] | None:
    """Compare a model, in the precision of ``step.exact``, with it; None where they agree."""
    other = step.exact.again(model=model)
    found = step.difference(step.exact, other, lambda x: x)
    return None if found is None else (found.size, found.module)


# ------------------------------------------------------------------------------------------------ state dict
@property_of("round trips", explains=["meta"], passes=5)
def state_dict(step: Step) -> Iterator[Violation | Note]:
    """A freshly made model that loads the state dict puts out the same.

    Without ``make`` it is a copy whose parameters and saved buffers are zero. It is compared in float64.
    """
    original, state = copyable(step), entries(step.exact.model)
    make = maker(step)
    if make is None:
        model = copy.deepcopy(original)
        with torch.no_grad():
            for tensor in model.state_dict(keep_vars=True).values():
                if isinstance(tensor, Tensor):
                    tensor.zero_()
    else:
        model = fresh(step, make)
        if {type(m) for m in model.modules()} != {
            type(m) for m in original.modules()
        } and step.setup.make is None:
            raise Untestable("the model was changed after its class had made it: pass make=")
        model = model.double() if step.is_exact else model
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        yield fail(
            "", f"its state does not fit a model made anew: {str(error).splitlines()[-1].strip()}", MADE
        )
        return
    keys = [*result.missing_keys, *result.unexpected_keys]
    if keys:
        what = "is not in the state dict" if result.missing_keys else "is unknown to a model made anew"
        yield fail(
            keys[0], f"it {what} (nor are {len(keys) - 1} others)" if len(keys) > 1 else f"it {what}", MADE
        )
        return
    found = same_outputs(step, model)
    if found is not None:
        unsaved = unregistered(original)
        yield fail(
            next((n for n in unsaved if n.rpartition(".")[0] == found[1]), found[1]),
            f"outputs differ by {found[0]:.1e} after they were saved and loaded"
            + (f"; no state dict holds {', '.join(unsaved[:3])}" if unsaved else ""),
            "register what is drawn or learnt as a parameter or a buffer",
        )
    elif make is None and (unsaved := unregistered(original)):
        yield note(unsaved[0], "a tensor that no state dict holds; pass make= to see whether it is made anew")


MADE: Final = "make() must build the model as it is trained"


def copyable(step: Step) -> nn.Module:
    """The model of the exact trace. Raises Untestable where that is the user's own."""
    trace = step.exact
    return trace.model if step.copyable else step.copy()


def unregistered(model: nn.Module) -> list[str]:
    """Floating tensors that modules hold as plain attributes."""
    found = list[str]()
    known = {id(t) for t in chain(model.parameters(), model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            inner = {} if name.startswith("_") or isinstance(value, nn.Module) else dict(tensors_in(value))
            if any(t.is_floating_point() and id(t) not in known for t in inner.values()):
                found.append(f"{path}.{name}".strip("."))
    return found


# ------------------------------------------------------------------------------------------------------ meta
@property_of("round trips", passes=4)
def meta(step: Step) -> Iterator[Violation | Note]:
    """A model that is built on the meta device, emptied onto a real one and loaded puts out the same.

    Buffers that no state dict holds, and ties, are lost on this way; they are named in a note, since the
    author may fill them again.
    """
    make = maker(step)
    if make is None:
        raise Untestable("a model cannot be made anew: pass make=")
    original, state = copyable(step), entries(step.exact.model)
    with torch.device("meta"):
        model = fresh(step, make)
    if not all(p.is_meta for p in model.parameters()):
        raise Untestable("make() builds the model on a device of its own, or returns one that it has")
    plain = unregistered(model)
    tied = _ties(model)
    model = model.to_empty(device=next(original.parameters()).device)
    with torch.no_grad():
        for t in chain(model.parameters(), model.buffers()):
            if t.is_floating_point():
                t.fill_(float("nan"))
    model = model.double() if step.is_exact else model
    missing = model.load_state_dict(state, strict=False).missing_keys
    lost = [n for n, b in model.named_buffers() if n not in state]
    if lost or plain:
        yield note(
            (lost or plain)[0],
            f"{', '.join([*lost, *plain][:3])}: in no state dict, and lost from meta to to_empty(); "
            "fill them again, or make the buffers persistent",
        )
    if len(tied) > len(_ties(model)):
        yield note(next(iter(tied - _ties(model))), "its tie is lost by to_empty(): tie again after it")
    if missing:
        yield fail(missing[0], f"{len(missing)} entries are not in the state dict", MADE)
    elif not lost and not plain and (found := same_outputs(step, model)) is not None:
        yield fail(
            found[1], f"outputs differ by {found[0]:.1e} after meta, to_empty and load_state_dict", MADE
        )


def _ties(model: nn.Module) -> set[str]:
    seen: dict[int, str] = {}
    tied = set[str]()
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in seen:
            tied.add(name)
        seen.setdefault(id(p), name)
    return tied


# ----------------------------------------------------------------------------------------------------- cache
@property_of("round trips", passes=12)
def cache(step: Step) -> Iterator[Violation | Note]:
    """A generation with a cache has, token by token, the logits of the full pass, in float64."""
    model, facts = copyable(step), step.facts
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise Untestable("the model takes no past_key_values")
    if not facts.causal:
        raise Untestable("the model does not generate: its targets are not the next tokens")
    ids = facts.tokens.ids[:2, :GENERATED].to(next(model.parameters()).device)
    name = facts.tokens.place[-1] if isinstance(step.batch, Mapping) else "input_ids"
    with undisturbed(model), torch.no_grad(), Functions(exact=step.is_exact, dropout=False):
        if step.is_exact:
            torch.set_default_dtype(torch.float64)
        whole = _logits(model(**{name: ids, "use_cache": False}))
        start, width = max(ids.shape[1] // 6, 1), ids.shape[1]
        output = model(**{name: ids[:, :start], "use_cache": True})
        parts = [_logits(output)]
        for t in range(start, width):
            past = getattr(output, "past_key_values", None)
            if past is None:
                raise Untestable("its output has no past_key_values")
            output = model(**{name: ids[:, t : t + 1], "past_key_values": past, "use_cache": True})
            parts.append(_logits(output))
    stepwise = torch.cat(parts, 1)
    if (size := distance(whole, stepwise)) > step.rounding:
        apart = ((whole - stepwise).abs().amax((0, 2)) > step.rounding * whole.abs().max()).nonzero()
        first = int(apart[0]) if len(apart) else 0
        yield fail(
            "",
            f"with a cache the logits differ by {size:.1e}, from token {first} on",
            "look at positions and the mask",
        )


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise Untestable("its output has no logits")
    return logits

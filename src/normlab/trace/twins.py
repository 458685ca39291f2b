"""The same by another way: each module in float32, the state loaded anew, rows with other padding, tokens one
by one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normlab.trace.compare import distance, whole
from normlab.trace.exact import shaken
from normlab.trace.facts import Unknown
from normlab.trace.facts.padding import Arranged
from normlab.trace.facts.tokens import Tokens
from normlab.trace.functions import Functions
from normlab.trace.prepared import Step
from normlab.trace.step import Weights
from normlab.trace.tensors import apart, first_calls, map_tensors, tensors_in
from normlab.trace.trace import Trace

DRAWS: Final = 3


class Rounding(NamedTuple):
    """How far a module is from its twin."""

    module: str
    ratio: float
    """Its error, in units of what one rounding of its inputs and output makes."""
    operations: int


class LowCalls(NamedTuple):
    """The first call of each module of a pass in which something is in low precision."""

    calls: Mapping[str, Any]
    types: set[torch.dtype]
    cast: bool
    """Whether anything runs under autocast."""


def low_calls(step: Step) -> LowCalls:
    """Run the model once, under autocast where the user's step runs it so.

    Raises Unknown where all is in float32.
    """
    trace, cast = step.plain.again(model=step.copy()), None
    if step.setup.step is not None:
        with suppress(Exception):
            cast = step.twice[1].cast
    inner = {path: module for path, module in trace.model.named_modules() if path}
    types, casts = {p.dtype for p in trace.model.parameters()}, set[torch.dtype]()
    device = next(trace.model.parameters()).device.type

    def keep(values: Any) -> Any:
        casts.update([torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else ())
        return map_tensors(values, lambda _, x: x.detach().clone())

    with torch.autocast(device, cast, enabled=cast is not None), first_calls(inner, keep) as calls:
        trace.once()
    low = {torch.bfloat16, torch.float16} & (types | casts)
    if not low:
        raise Unknown("no parameter is in low precision, and nothing runs under autocast")
    return LowCalls(calls, low, bool(casts))


def roundings(step: Step) -> Iterator[Rounding]:
    """Measure the first call of each module in low precision, inner ones first.

    Raises Unknown where all is in float32.
    """
    low, twins = low_calls(step), step.copy().float().eval()
    eps = max(torch.finfo(t).eps for t in low.types)
    for path, (values, written) in low.calls.items():
        with suppress(Exception):  # a module may ask for its own type
            twin = twins.get_submodule(path)
            weights = dict(twin.named_parameters()) if low.cast else {}
            yield Rounding(path, *_ratio(twin, weights, values, _floating(written), eps))


def _ratio(
    twin: nn.Module, weights: Weights, values: Any, written: list[Tensor], eps: float
) -> tuple[float, int]:
    operations: list[str] = []
    wide = map_tensors(values, lambda _, x: x.float() if x.is_floating_point() else x)
    generator = torch.Generator().manual_seed(0)

    def moved_by_one(_: Any, x: Tensor) -> Tensor:
        return shaken(x, eps, generator) if x.is_floating_point() else x

    def run(weights: Any, read: Any) -> list[Tensor]:
        args, keywords = apart(read)
        return _floating(functional_call(twin, weights, args, keywords))

    with torch.no_grad():
        with Functions(see=lambda name, *_: operations.append(name)):
            plain = run({}, wide)
        moved = [run(*(map_tensors(x, moved_by_one) for x in (weights, wide))) for _ in range(DRAWS)]
    worst = 0.0
    for i, (x, own) in enumerate(zip(plain, written, strict=False)):
        if x.shape == own.shape and own.numel() > 1:
            fair = max(_apart(x, m[i]) for m in moved)
            worst = max(worst, _apart(x, own) / math.hypot(fair, eps / 12**0.5))
    return worst, max(len(operations), 1)


def _floating(values: Any) -> list[Tensor]:
    return [x for _, x in tensors_in(values) if x.is_floating_point()]


def _apart(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    known = torch.isfinite(a).all() and torch.isfinite(b).all()
    return float((a - b).norm() / a.norm().clamp_min(1e-300)) if known else 0.0


GENERATED: Final = 24
"""Tokens of a sequence that is generated with a cache; the first of them are read at once."""


def difference_when_loaded(step: Step, model: nn.Module) -> tuple[str, str] | None:
    """Load the state of the exact trace's model, and what is left out; return where and how that differs."""
    model, own = model.double() if step.is_exact else model, step.exact.model
    state = copy.deepcopy(own.state_dict())
    state.update(left_out(step, own))
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        return "", f"the state does not fit a model made anew: {str(error).splitlines()[-1].strip()}"
    if keys := [*result.missing_keys, *result.unexpected_keys]:
        return keys[0], f"either the model or one made anew has no such name ({len(keys)} in all)"
    apart = step.difference(step.exact, step.exact.again(model=model), whole)
    return (apart.module, f"outputs differ by {apart.size:.1e} after the round trip") if apart else None


def left_out(step: Step, model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are declared frozen, and that no state dict holds."""
    held = model.state_dict().keys()
    return {n: p for n, p in model.named_parameters() if n not in held and step.declare.is_frozen(n)}


def off_arranged(
    step: Step, real: Tensor, one: Arranged, other: Arranged | None = None, **where: Any
) -> float:
    """How far outputs at these tokens `[B, T]` differ in a batch that is arranged so from those in another
    one, or in the step's own; NaN where it does not run. ``where`` is which tokens, and which places alone.
    """
    a, b = (_arranged(step, real, way, **where) for way in (one, other or Arranged(one.rows)))
    return math.nan if a is None or b is None or a.shape != b.shape else distance(a, b)


def _arranged(
    step: Step, real: Tensor, arranged: Arranged, tokens: Tokens | None = None, **where: Any
) -> Tensor | None:
    base, (rows, columns, _), facts = step.logits(step.exact), arranged, step.facts
    pick, shown = real[rows], base if base.shape[0] == facts.rows else base.transpose(0, 1)
    if columns is None:
        shown = shown[rows]
    else:
        try:
            batch = facts.rearranged(arranged, tokens or facts.tokens, **where)
            shown = step.logits(step.exact.again(batch=batch))
        except Exception:  # a model of one width takes no other
            return None
        shown = shown if base.shape[0] == facts.rows else shown.transpose(0, 1)
        pick = pick.gather(1, columns(real.shape[1]))
    if (tokens and tokens.place != facts.tokens.place) or not facts.by_position(base):
        return shown
    if shown.shape[1] < pick.shape[1]:  # the last token has no output
        pick = (pick & pick.roll(-1, 1))[:, : shown.shape[1]]
    return shown[:, : pick.shape[1]][pick]


def generated(trace: Trace, ids: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the logits of a full pass over ids `[B, T]`, and of a generation of them with a cache.

    Raises Unknown for a model that has no cache.
    """
    model, past, parts = trace.model, None, list[Tensor]()
    ids = ids[:2, :GENERATED].to(next(model.parameters()).device)
    start = max(ids.shape[1] // 6, 1)
    with trace.running():
        full = _attribute(model(**{name: ids, "use_cache": False}), "logits")
        for part in (ids[:, :start], *ids[:, start:].split(1, dim=1)):
            output = model(**{name: part, "past_key_values": past, "use_cache": True})
            past = _attribute(output, "past_key_values")
            parts.append(_attribute(output, "logits"))
    return full, torch.cat(parts, 1)


def _attribute(output: Any, name: str) -> Any:
    value = getattr(output, name, None)
    if value is None:
        raise Unknown(f"its output has no {name}")
    return value

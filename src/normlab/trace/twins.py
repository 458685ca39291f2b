"""The same model by another way: each module in float32, its state loaded anew, tokens one by one."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace.compare import whole
from normlab.trace.exact import shaken
from normlab.trace.facts import Unknown
from normlab.trace.functions import Functions
from normlab.trace.prepared import Step
from normlab.trace.tensors import apart, first_calls, map_tensors, tensors_in
from normlab.trace.trace import Trace

DRAWS: Final = 3


class Rounding(NamedTuple):
    """How far a module is from its twin."""

    module: str
    ratio: float
    """Its error, in units of what one rounding of its inputs and output makes."""
    operations: int


def roundings(trace: Trace, eps: float) -> Iterator[Rounding]:
    """Measure the first call of each module, inner ones first; ``eps`` is that of the low precision."""
    twins = dict(copy.deepcopy(trace.model).float().eval().named_modules())
    inner = {path: module for path, module in trace.model.named_modules() if path}
    with first_calls(inner, lambda x: map_tensors(x, lambda _, y: y.detach().clone())) as calls:
        trace.once()
    for path, (values, written) in calls.items():
        with suppress(Exception):  # a module may ask for its own type
            yield Rounding(path, *_ratio(twins[path], values, _floating(written), eps))


def _ratio(twin: nn.Module, values: Any, written: list[Tensor], eps: float) -> tuple[float, int]:
    operations: list[str] = []
    wide = map_tensors(values, lambda _, x: x.float() if x.is_floating_point() else x)
    generator = torch.Generator().manual_seed(0)

    def moved_by_one(_: Any, x: Tensor) -> Tensor:
        return shaken(x, eps, generator) if x.is_floating_point() else x

    def run(read: Any) -> list[Tensor]:
        args, keywords = apart(read)
        return _floating(twin(*args, **keywords))

    with torch.no_grad():
        with Functions(see=lambda name, *_: operations.append(name)):
            plain = run(wide)
        moved = [run(map_tensors(wide, moved_by_one)) for _ in range(DRAWS)]
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

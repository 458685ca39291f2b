"""The property of low precision: what rounding explains, and what it does not."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.checks.property import Note, Untestable, Violation, fail, property_of
from normlab.checks.step import Step
from normlab.trace.functions import Functions
from normlab.trace.tensors import Side, forward_hooks, map_tensors, tensors_in
from normlab.trace.untouched import undisturbed

LOW: Final = (torch.bfloat16, torch.float16)
DRAWS: Final = 3
Call = tuple[str, Any, list[Tensor]]
"""A module, what it read, and the floating tensors that it wrote."""


@property_of("round trips", explains=["overfit"], passes=12)
def precision(step: Step) -> Iterator[Violation | Note]:
    """Each module in low precision gives what its twin in float32 gives on the same inputs, up to rounding.

    One rounding of its inputs and of its output moves the output by some error. The operations inside round,
    too, each by itself: n of them explain the root of n times that error, and what lies above is lost by the
    order of the computation, as in angles or sums that are kept in low precision.
    """
    low = next((p.dtype for p in step.model.parameters() if p.dtype in LOW), None)
    if low is None:
        raise Untestable("no parameter is in low precision")
    model = step.copy()
    twins = dict(copy.deepcopy(model).float().eval().named_modules())
    for path, values, written in _calls(step, model):
        if path:
            ratio, count = _ratio(twins[path], values, written, torch.finfo(low).eps)
            if ratio > count**0.5:
                say = f"its output is {ratio:.0f} roundings off its twin in float32, whose {count} operations"
                yield fail(
                    path, f"{say} explain {count**0.5:.1f}", "compute angles, positions and norms in float32"
                )
                return


def _calls(step: Step, model: nn.Module) -> list[Call]:
    """The first call of each module, inner ones first."""
    entered: list[tuple[str, Any]] = []
    calls: dict[str, Call] = {}

    def see(path: str, side: Side, values: Any) -> None:
        kept = map_tensors(values, lambda _, x: x.detach().clone())
        if side == "input":
            entered.append((path, kept))
            return
        while entered:
            name, read = entered.pop()
            if name == path:
                break
        else:
            return
        calls.setdefault(path, (path, read, [x for _, x in tensors_in(kept) if x.is_floating_point()]))

    with undisturbed(model), torch.no_grad(), forward_hooks(dict(model.named_modules()), see):
        step.loss_of(model, step.batch)
    return list(calls.values())


def _ratio(twin: nn.Module, values: Any, written: list[Tensor], eps: float) -> tuple[float, int]:
    """How many times the error of one rounding the error of a module is; and how many operations it has."""
    operations: list[str] = []
    wide = map_tensors(values, lambda _, x: x.float() if x.is_floating_point() else x)
    generator = torch.Generator().manual_seed(0)

    def shaken(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator) - 0.5
        return x * (1 + eps * noise.to(x)) if x.is_floating_point() else x

    try:
        with torch.no_grad(), Functions(see=lambda name, *_: operations.append(name)):
            plain = _run(twin, wide)
        with torch.no_grad():
            moved = [_run(twin, map_tensors(wide, lambda _, x: shaken(x))) for _ in range(DRAWS)]
    except Exception:
        return 0.0, 1
    worst = 0.0
    for i, own in enumerate(written):
        if i >= len(plain) or plain[i].shape != own.shape or own.numel() < 2:
            continue
        fair = max(_apart(plain[i], m[i]) for m in moved)
        fair = math.hypot(fair, eps / 12**0.5)
        worst = max(worst, _apart(plain[i], own) / fair)
    return worst, max(len(operations), 1)


def _run(module: nn.Module, values: dict[Any, Any]) -> list[Tensor]:
    args = [values[k] for k in sorted(k for k in values if isinstance(k, int))]
    output = module(*args, **{k: v for k, v in values.items() if isinstance(k, str)})
    return [x for _, x in tensors_in(output) if x.is_floating_point()]


def _apart(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return 0.0
    return float((a - b).norm() / a.norm().clamp_min(1e-300))

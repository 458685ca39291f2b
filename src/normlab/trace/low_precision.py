"""What low precision costs: each module and the loss, computed again in float32 and compared.

The unit is what one rounding causes. A module's inputs, weights and output are rounded to bfloat16 or
float16, and so are the results of the operations inside of it, so its output may be off by a few such units.
An output that is off by far more than its operations explain loses its numbers in some other way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normlab.trace.autograd import Weights
from normlab.trace.compare import shaken
from normlab.trace.facts import Unknown
from normlab.trace.functions import FunctionCall, Functions
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import apart, copied_batch, first_calls, map_tensors, tensors_in
from normlab.trace.trace import Trace

DRAWS: Final = 3
"""How often everything is moved by a random rounding; the largest effect counts."""
INTEGERS: Final = (torch.int32, torch.int64)
LOW: Final = frozenset({torch.bfloat16, torch.float16})


def low_calls(step: StepUnderTest) -> tuple[Mapping[str, Any], float, bool]:
    """Run the model once, under autocast if the user's step runs it so.

    Returns:
        The arguments and outputs of the first call of each module, by path; the largest relative rounding;
        and whether anything runs under autocast.

    Raises Unknown if all is in float32.
    """
    trace = step.unchanged
    inner = {path: module for path, module in trace.model.named_modules() if path}
    parameter_types = {p.dtype for p in trace.model.parameters()}
    autocast_types = set[torch.dtype]()
    device = _device_of(trace)

    def keep(values: Any) -> Any:
        if torch.is_autocast_enabled(device):
            autocast_types.add(torch.get_autocast_dtype(device))
        return copied_batch(values)  # objects too: a cache is filled by the call that it enters

    with _as_the_step_runs_it(step), first_calls(inner, keep) as calls:
        trace.once()
    output_types = {x.dtype for _, outputs in calls.values() for x in _floating(outputs)}
    low_types = LOW & (parameter_types | autocast_types | output_types)
    if not low_types:
        raise Unknown("nothing is in low precision: no parameter, and no output of a module")
    return calls, max(torch.finfo(dtype).eps for dtype in low_types), bool(autocast_types)


def _device_of(trace: Trace) -> str:
    return next(trace.model.parameters()).device.type


def _as_the_step_runs_it(step: StepUnderTest) -> AbstractContextManager[Any]:
    """Return the autocast under which the user's step runs the model, switched off if there is none."""
    dtype = None
    if step.setup.step is not None:
        with suppress(Exception):  # the step is anybody's; without one, the model runs as it is
            dtype = step.whole_step.two_runs.first.cast
    return torch.autocast(_device_of(step.unchanged), dtype, enabled=dtype is not None)


def _floating(values: Any) -> list[Tensor]:
    return [x for _, x in tensors_in(values) if x.is_floating_point()]


# ---------------------------------------------------------------------------------------------------- modules


def roundings(step: StepUnderTest) -> Iterator[tuple[str, float, int]]:
    """Yield each module with the error of its first call in low precision, inner ones first, in units of what
    one rounding of its inputs and output causes, and its number of operations.

    A module that makes another choice in float32, such as other experts for a token, is left out: it then
    computes another function, and how far apart two functions are is no matter of rounding. Raises Unknown if
    all is in float32.
    """
    calls, eps, has_autocast = low_calls(step)
    wide_model = step.copies.make().float().eval()
    for path, (arguments, low_outputs) in calls.items():
        with suppress(Exception):  # a module may insist on its own dtype
            wide_module = wide_model.get_submodule(path)
            # autocast rounds weights too; those that are stored in low precision are rounded already
            weights = dict(wide_module.named_parameters()) if has_autocast else {}
            wide_arguments = copied_batch(arguments, torch.float32)
            outputs, operations, choices = _run(wide_module, wide_arguments)
            if choices and not _are_equal(choices, _choices_in_low_precision(step, path, arguments)):
                continue
            moved = _moved_by_one_rounding(wide_module, weights, wide_arguments, eps)
            yield path, _in_roundings(outputs, moved, _floating(low_outputs), eps), max(operations, 1)


def _run(module: nn.Module, arguments: Any) -> tuple[list[Tensor], int, list[Tensor]]:
    """Run a module on copies of its arguments. Return its outputs, how many functions it called, and what
    it chose: the integers that functions made of other numbers, such as the experts with the largest scores.
    """
    operations, choices = 0, list[Tensor]()

    def see(call: FunctionCall) -> None:
        nonlocal operations
        operations += 1
        if _floating((call.args, call.kwargs)):
            results = (x for _, x in tensors_in(call.result))
            choices.extend(x.clone() for x in results if x.dtype in INTEGERS)

    args, keywords = apart(copied_batch(arguments))
    with torch.no_grad(), Functions(see=see):
        outputs = _floating(module(*args, **keywords))
    return outputs, operations, choices


def _choices_in_low_precision(step: StepUnderTest, path: str, arguments: Any) -> list[Tensor]:
    """Return what a module of the user's model chooses when it is called again with these arguments."""
    trace, autocast = step.unchanged, _as_the_step_runs_it(step)
    with trace.running(), autocast:
        _, _, choices = _run(trace.model.get_submodule(path), arguments)
    return choices


def _are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _moved_by_one_rounding(
    wide_module: nn.Module, weights: Weights, wide_arguments: Any, eps: float
) -> list[list[Tensor]]:
    """Return the outputs for inputs and weights that are each moved by a random rounding."""
    generator = torch.Generator().manual_seed(0)
    outputs = list[list[Tensor]]()
    with torch.no_grad():
        for _ in range(DRAWS):
            moved_weights = _shaken(copied_batch(weights), eps, generator)
            args, keywords = apart(_shaken(copied_batch(wide_arguments), eps, generator))
            outputs.append(_floating(functional_call(wide_module, moved_weights, args, keywords)))
    return outputs


def _shaken(values: Any, eps: float, generator: torch.Generator) -> Any:
    """Return values with each number in them moved by a random rounding."""
    return map_tensors(values, lambda _, x: shaken(x, eps, generator) if x.is_floating_point() else x)


def _in_roundings(
    outputs: list[Tensor], moved: list[list[Tensor]], low_outputs: list[Tensor], eps: float
) -> float:
    """Return the largest error of an output in low precision, divided by what one rounding causes."""
    worst = 0.0
    for i, (wide, low) in enumerate(zip(outputs, low_outputs, strict=False)):
        if wide.shape != low.shape or low.numel() <= 1:
            continue
        by_inputs = max(_relative_distance(wide, other[i]) for other in moved)
        # the output itself is rounded, too: by at most half of eps, with a root mean square of eps / sqrt(12)
        by_output = eps / 12**0.5
        worst = max(worst, _relative_distance(wide, low) / math.hypot(by_inputs, by_output))
    return worst


def _relative_distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference relative to that of the first; 0 if one is not finite, which is a
    finding of its own.
    """
    a, b = a.detach().double(), b.detach().double()
    is_finite = torch.isfinite(a).all() and torch.isfinite(b).all()
    return float((a - b).norm() / a.norm().clamp_min(1e-300)) if is_finite else 0.0


# --------------------------------------------------------------------------------------------------- the loss


def roundings_of_loss(step: StepUnderTest) -> tuple[float, int] | None:
    """Return how far the loss that is made of outputs in low precision is from that of the same outputs in
    float32, and how many operations make it.

    The distance is counted in roundings of the loss, or in what one rounding of the outputs and of the batch
    does to it where that is more. None without such outputs, or if the loss is made of other things as well.
    """
    trace = step.unchanged
    with _as_the_step_runs_it(step):
        with first_calls({"": trace.model}, copied_batch) as calls:
            low_loss = trace.once().loss
        outputs = calls[""][1] if "" in calls else None
        low_types = {x.dtype for x in _floating(outputs)} & LOW
        if low_loss is None or not low_types or not step.copies.loss_runs_model:
            return None
        again, _ = _loss_of_outputs(step, trace, outputs, trace.batch)
        if not torch.equal(low_loss, again):
            return None
    eps, generator = max(torch.finfo(dtype).eps for dtype in low_types), torch.Generator().manual_seed(0)
    wide_outputs, wide_batch = (copied_batch(values, torch.float32) for values in (outputs, trace.batch))
    loss, operations = _loss_of_outputs(step, trace, wide_outputs, wide_batch)
    one_rounding = eps / 2
    for _ in range(DRAWS):
        moved_outputs = _shaken(wide_outputs, eps, generator)
        moved_batch = _shaken(wide_batch, eps, generator)
        moved_loss, _ = _loss_of_outputs(step, trace, moved_outputs, moved_batch)
        one_rounding = max(one_rounding, _relative_distance(loss, moved_loss))
    return _relative_distance(loss, low_loss) / one_rounding, operations


def _loss_of_outputs(step: StepUnderTest, trace: Trace, outputs: Any, batch: Any) -> tuple[Tensor, int]:
    """Return the loss of these outputs, whatever the model reads, and how many functions make it."""
    model, calls = step.copies.make(), list[str]()
    if all(x.dtype not in LOW for x in _floating(outputs)):
        model = model.float()
    model.forward = lambda *_, **__: outputs

    def counted(model: nn.Module, batch: Any) -> Tensor:
        with Functions(see=lambda call: calls.append(call.name)):
            return trace.loss_of(model, batch)

    return trace.again(model=model, batch=batch, loss_of=counted).loss, len(calls)

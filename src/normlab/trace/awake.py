"""A step made awake and exact: no branch is silent, nothing is dropped, and any change shows.

At the start of a training ReZero's scalars, and FixUp's and LoRA's last matrices, are zero: whatever their
branches compute, the output does not depend on it. An awake model holds small draws in their place. In
float64 rounding is so small that what two runs show beyond it is a real difference.

``diagnosis.recording`` wakes a model in its own way: there a branch must add something that is seen in
float32 beside the stream, so its draws are larger, and it counts as zero what is too small for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import in_one_line
from normlab.trace.copies import copied_model
from normlab.trace.tensors import is_zero, later_counts, map_tensors
from normlab.trace.trace import Trace


def awake_step(trace: Trace, copy: Callable[[], nn.Module]) -> Trace:
    """Return the same step without dropout on a copy of its model, which is made awake: in float64, unless it
    does not run there or gives another loss.
    """

    def awake() -> Trace:
        model = copy()
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        with torch.no_grad():
            for name, value in _awake_weights(model).items():
                tensors[name].copy_(value)
        return trace.again(model=model, dropout=False)

    # the same copy is widened, parameter by parameter, for two of a large model would not fit in memory
    return _widened(awake, lambda step: {"model": step.model.double()})


def awake_in_place(trace: Trace) -> Trace:
    """Return the same step without dropout on the same model, which gets other weights in each pass: those of
    ``awake_step``, in float64 under the same conditions.
    """
    awake = trace.again(weights=_awake_weights(trace.model), dropout=False)

    def wide_weights(step: Trace) -> dict[str, Any]:
        held = {**step.parameters, **step.buffers}
        return {"weights": {n: x.double() for n, x in held.items() if x.is_floating_point()}}

    return _widened(lambda: awake, wide_weights)


def why_inexact(trace: Trace) -> str:
    """Say why ``awake_step`` leaves this step in its own precision: what the model raises in float64, or the
    loss that it gives there.
    """
    try:
        model = copied_model(trace.model).double()
        wide = trace.again(model=model, batch=_wide_numbers(trace.batch), exact=True)
        wide_loss, loss = float(wide.loss), float(trace.loss)
    except Exception as error:  # the model may be anyone's
        return f"in float64 the model raises {in_one_line(error)}"
    return f"the loss is {wide_loss:.4g} in float64, but {loss:.4g} in the model's own precision"


def _awake_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return small draws for parameters that are zero, and counts as they are late in training: a gate that
    opens during training hides its branch until then.
    """
    generator, values = torch.Generator().manual_seed(3), dict[str, Tensor]()
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.numel() and is_zero(p):
            values[name] = (0.02 * torch.randn(p.shape, generator=generator)).to(p)
    return values | later_counts(model)


def _widened(awake: Callable[[], Trace], changes: Callable[[Trace], dict[str, Any]]) -> Trace:
    """Return a step in float64, or the step as it is if that does not run or gives another loss.

    Args:
        awake: makes the step in its own precision; it is called again once the changes have used it up.
        changes: what makes a step's model or weights float64.
    """
    narrow = awake()
    try:
        loss = float(narrow.loss)
        wide = narrow.again(**changes(narrow), batch=_wide_numbers(narrow.batch), exact=True)
        wide_loss = float(wide.loss)
        # a twentieth is far more than rounding does to a loss, and far less than another computation would;
        # a loss that is not a number is a finding, which float64 does not change
        apart = abs(wide_loss - loss)
        allowed = 0.05 * abs(loss) + 1e-3
        if apart <= allowed or wide_loss != wide_loss:
            return wide
        # where the step draws random numbers, float64 draws other ones: it may be as far off as other seeds
        narrow = awake()
        drawn = max(abs(float(narrow.again(seed=seed).loss) - loss) for seed in (1, 2))
    except Exception:  # the model may be anyone's
        return awake()
    return wide if apart <= allowed + 4 * drawn else narrow


def _wide_numbers(batch: Any) -> Any:
    """Return the batch with its floating-point numbers in float64."""
    return map_tensors(batch, lambda _, x: x.double() if x.is_floating_point() else x)

"""What happens before the first property: memory is asked for, the step is run once, a pass is timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from torch import nn
from torch.nn.parameter import is_lazy

from normlab.base.memory import available_bytes, gibibytes
from normlab.base.units import count
from normlab.errors import UserError
from normlab.setups.step import require_one_number
from normlab.trace.budget import Deadline, OutOfTimeError, passes_until
from normlab.trace.passes import LARGE_MODEL
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import refusal
from normlab.trace.trace import Trace

PASSES_OF_CHECK: Final = 250
"""About how many passes all properties take together."""


def require_memory(model: nn.Module) -> None:
    """Raise UserError if a large model's check needs more memory than is free: for its weights as they were,
    and in float64. The system would end the process without a word.
    """
    # lazy and meta parameters hold no numbers; they are refused later, with the reason
    parameters = [p for p in model.parameters() if not (is_lazy(p) or p.is_meta)]
    size = sum(p.numel() for p in parameters)
    needed = sum(p.nbytes + 8 * p.numel() * (p.device.type == "cpu") for p in parameters)
    free = available_bytes()
    if size > LARGE_MODEL and needed > free:
        raise UserError(
            f"{type(model).__name__} has {size:,} parameters: a check needs about {gibibytes(needed)} of "
            f"memory beside the model, and {gibibytes(free)} are free; check a smaller one"
        )


def prepare(step: StepUnderTest) -> None:
    """Run the passes that every property builds on, and measure how long one takes.

    Raises UserError if the step cannot be run, or if the budget does not hold these passes.
    """
    deadline = Deadline(step.ends, free=1)
    why_whole = ""

    def of_tested_part() -> Trace:
        nonlocal why_whole
        why_whole = step.why_whole  # here, since it may run the model, and not once the time is over
        return step.unchanged

    try:
        with passes_until(deadline):
            _require_loss(step, of_tested_part)
            _ = step.estimates.pass_s
            if step.estimates.reaches_whole_batch:
                _require_loss(step, lambda: step.on_whole_batch)
    except OutOfTimeError:
        raise UserError(_too_short(step, deadline, why_whole)) from None


def _too_short(step: StepUnderTest, deadline: Deadline, why_whole: str) -> str:
    """Say that the budget is too short, and which one would do. This runs nothing more of the user's."""
    now = time.monotonic()
    took, pass_s = now - step.started, deadline.pass_s(now)
    enough = math.ceil(took + PASSES_OF_CHECK * pass_s)
    because = f"; the whole batch is used because, {why_whole}" if why_whole else ""
    return (
        f"budget_s={step.budget_s:g} is too short: one pass takes about {pass_s:.2g} s, and {took:.2g} s "
        f"were over after {count(deadline.begun, 'pass')}, before any property; budget_s={enough} is enough "
        f"for most of them{because}"
    )


def _require_loss(step: StepUnderTest, trace_of: Callable[[], Trace]) -> None:
    """Raise UserError if the step cannot be run once, its loss is not one number, or what makes its optimizer
    or its schedule is at fault.
    """
    try:
        loss = trace_of().loss
    except UserError:
        raise
    except Exception as error:
        raise UserError(_what_raised(step, error)) from error
    require_one_number(loss)
    try:
        _ = step.whole_step.rates
    except UserError:
        raise
    except Exception:  # a property reports it
        return


def _what_raised(step: StepUnderTest, error: Exception) -> str:
    """Say which call raised, with what it was given."""
    if step.setup.loss is None:
        return refusal(type(step.model).__name__, step.batch, error, "loss")
    sentence = refusal("loss(model, batch)", step.batch, error, "")
    if isinstance(error, TypeError):  # as of a criterion of torch, which takes no model
        sentence += ". It is called with the model and the batch: loss=lambda model, batch: …"
    return sentence

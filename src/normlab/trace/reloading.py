"""A model's state, saved and loaded into another copy: what is left out, and what then differs."""

from __future__ import annotations

from torch import Tensor, nn

from normlab.trace.compare import whole
from normlab.trace.step_under_test import StepUnderTest


def difference_when_loaded(step: StepUnderTest, model: nn.Module) -> tuple[str, str] | None:
    """Load the state of the exact trace's model, and what that leaves out, into a model made anew.

    Returns:
        Where the two differ then, and how; None if they do not.
    """
    trained = step.exact.model
    if step.is_exact:
        model = model.double()
    state = {**trained.state_dict(), **left_out(step, trained)}
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        return "", f"the state does not fit a model made anew: {str(error).splitlines()[-1].strip()}"
    if keys := [*result.missing_keys, *result.unexpected_keys]:
        return keys[0], f"either the model or one made anew has no such name ({len(keys)} in all)"
    apart = step.comparison.difference(step.exact, step.exact.again(model=model), whole)
    return (apart.module, f"outputs differ by {apart.size:.2g} after the round trip") if apart else None


def left_out(step: StepUnderTest, model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are declared frozen and that no state dict holds."""
    saved = model.state_dict().keys()
    return {n: p for n, p in model.named_parameters() if n not in saved and step.declare.is_frozen(n)}

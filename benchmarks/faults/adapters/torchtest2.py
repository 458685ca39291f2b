"""torchtest2: ``check_model`` with every check that applies without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from training import Finding, NotCalledError, PublicCase, WithLoss, training

PACKAGE = "torchtest2"
HOW = (
    "`check_model` with its default checks on what the model is called with, its loss and its optimizer; "
    "warnings and failures count"
)
ASKS_PLACE = False
STATES = {
    "output_finite": ("finite",),
    "output_varies": ("reach", "inputs"),
    "eval_determinism": ("modes", "seeds"),
    "loss": ("finite", "loss"),
    "initial_loss": ("start", "loss", "targets"),
    "optimizer_coverage": ("optimizer_coverage",),
    "gradient_flow": ("gradients", "reach", "frozen"),
    "gradient_magnitude": ("finite", "start"),
    "params_change": ("gradients", "optimizer_coverage", "update", "frozen", "schedule"),
    "frozen_params": ("frozen", "groups"),
    "input_dependency": ("reach", "inputs", "padding"),
    "batch_independence": ("rows",),
    "overfit_batch": ("learns", "step"),
    "gradcheck": ("derivative",),
}


def states(check: str) -> tuple[str, ...]:
    """Return the causes that a check states by its documentation, its list of typical bugs included."""
    return STATES.get(check, ())


BY_INPUTS = ("output_varies", "input_dependency", "batch_independence")


def findings(case: PublicCase) -> list[Finding]:
    """Return the warnings and failures of one report.

    A model that is never called whole is evaluated by its loss, without the checks that change inputs.
    """
    import torchtest2

    given, again = training(case), training(case)
    globs = given.arguments.get("declare", {}).get("frozen", ())
    how: dict[str, Any] = {
        "loss_fn": lambda loss, _: loss,
        "forward_fn": lambda model, inputs, batch: WithLoss(given)(batch),
        "optimizer": given.optimizers[0] if len(given.optimizers) == 1 else None,
        "frozen": [glob.removesuffix("*").removesuffix(".") for glob in globs],
    }
    try:
        inputs: Any = again.inputs()
    except NotCalledError:
        inputs = torch.zeros(1)
        how |= {"eval_forward_fn": lambda model, inputs: WithLoss(given)(), "skip": BY_INPUTS}
    torch.manual_seed(0)
    report = torchtest2.check_model(given.model, inputs, given.batch, **how)
    counted = [*report.failures, *report.warnings]
    return [Finding(result.name, "", result.message[:300]) for result in counted]

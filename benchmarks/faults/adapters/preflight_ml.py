"""preflight-ml: all of its checks, with a loader of the one batch, the model and its loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from training import Finding, PublicCase, WithLoss, tensors_of, training

PACKAGE = "preflight-ml"
HOW = "`run_checks` on a loader of the batch, the model and its loss; whatever does not pass counts"
ASKS_PLACE = False
STATES = {
    "gradient_check": ("gradients", "reach", "frozen"),
    "nan_inf_detection": ("finite",),
    "normalisation_sanity": ("inputs",),
    "channel_ordering": ("inputs", "order"),
    "class_imbalance": ("targets", "counted"),
    "label_leakage": ("targets",),
}


def states(check: str) -> tuple[str, ...]:
    """Return the causes that a check states."""
    return STATES.get(check, ())


class Rows:
    """A batch that is cut as a tensor is: the checker takes the first rows of inputs and targets."""

    def __init__(self, batch: Any):
        self.batch = batch

    def __getitem__(self, rows: slice) -> Any:
        return cut(self.batch, rows)


def cut(part: Any, rows: slice) -> Any:
    """Return these rows of every tensor in a batch."""
    if isinstance(part, Tensor):
        return part[rows] if part.dim() else part
    if isinstance(part, dict):
        return {name: cut(each, rows) for name, each in part.items()}
    if isinstance(part, list | tuple):
        return type(part)(cut(each, rows) for each in part)
    return part


def findings(case: PublicCase) -> list[Finding]:
    """Hand over a model that gives its loss; a loss that cannot be had of two rows is no finding."""
    from preflight.runner import run_checks

    given = training(case)
    loader = [[Rows(given.batch), *tensors_of(given.batch)]]
    results = run_checks(loader, model=WithLoss(given), loss_fn=lambda loss, _: loss)
    failed = [result for result in results if not result.passed]
    ours = ("Backward pass failed", "Check raised an unexpected error", "Could not iterate")
    return [Finding(r.name, "", r.message[:300]) for r in failed if not r.message.startswith(ours)]

"""torchtest: its suite on the model and its loss as one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from training import Finding, PublicCase, WithLoss, training

PACKAGE = "torchtest"
HOW = "`test_suite` with every test but those of ranges and of a GPU; each test is asked for by itself"
ASKS_PLACE = False
STATES = {
    "vars_change": ("gradients", "update", "optimizer_coverage", "frozen", "schedule"),
    "non_train_vars": ("frozen", "groups"),
    "nan_vals": ("finite",),
    "inf_vals": ("finite",),
}


def states(check: str) -> tuple[str, ...]:
    """Return the causes that a test states."""
    return STATES.get(check, ())


class Whole(WithLoss):
    """Gives the loss of the case whatever it is called with, as the tool moves inputs to a device itself."""

    def forward(self, batch: Any = None) -> Tensor:
        return super().forward()


class Together:
    """All optimizers of a case as one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def findings(case: PublicCase) -> list[Finding]:
    """Ask for each test by itself, as the suite ends with the first that fails."""
    from torchtest import torchtest as tool

    told = []
    for test in STATES:
        given = training(case)
        model, batch = Whole(given), [torch.zeros(1), torch.zeros(1)]
        asked: dict[str, Any] = {f"test_{test}": True}
        if test == "non_train_vars":
            asked = {test: [(name, p) for name, p in model.named_parameters() if not p.requires_grad]}
        try:
            tool.test_suite(model, lambda loss, _: loss, Together(given.optimizers), batch, **asked)
        except (tool.VariablesChangeException, tool.NaNTensorException, tool.InfTensorException) as failed:
            told.append(Finding(test, "", str(failed)[:300]))
    return told

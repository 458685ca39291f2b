"""What a check takes for a setup, refuses, and gives back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normlab
from normlab.errors import UserError, is_own
from normlab.setups.setup import Setup
from normlab.trace.step_under_test import StepUnderTest

from .tiny import Decoder, groups, loss_of, report_of, tokens


@pytest.mark.parametrize(
    "odd",
    [
        {
            "loss": lambda m, ids: F.cross_entropy(
                m(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none"
            )
        },
        {"optimizer": lambda m: (groups(m) for _ in range(1))},
        {"optimizer": lambda m: None},
        {"optimizer": int},
        {"optimizer": groups, "scheduler": lambda o: None},
    ],
)
def test_functions_that_return_something_else_are_refused(odd: dict[str, Any]):
    with pytest.raises(UserError):
        report_of("finite", **odd)


def test_an_error_is_of_the_line_that_raised_it():
    def of(raises: Any) -> bool:
        with pytest.raises((TypeError, AttributeError, UserError)) as caught:
            raises()
        return is_own(caught.value)

    assert of(lambda: Setup(None, None))
    assert not of(lambda: None + 1)


def test_functions_see_the_wrapper_that_the_model_has():
    def step(model: nn.Module, ids: Any, optimizer: Any, scheduler: Any) -> None:
        model.train()
        optimizer.zero_grad()
        with model.no_sync():
            (loss_of(model, ids[:2]) / 2).backward()
        (loss_of(model.module, ids[2:]) / 2).backward()
        optimizer.step()

    report = report_of(
        "finite", "optimizer_coverage", "step", "repeats",
        model=nn.DataParallel(Decoder()),
        loss=lambda m, ids: loss_of(m.module, ids),
        optimizer=lambda m: groups(m.module),
        step=step,
    )  # fmt: skip
    assert report.holds == ("finite", "optimizer_coverage", "step", "repeats")


def test_large_records_are_given_back():
    step = StepUnderTest(Setup(Decoder(), torch.cat([tokens()] * 8), loss_of))
    assert step.exact.events
    step.turn_to("another")
    assert "events" not in vars(step.exact)


def test_what_does_not_apply_is_said_so_without_a_budget_for_it():
    why = normlab.check(Decoder(0.0), tokens(), loss=loss_of, optimizer=groups, budget_s=1e-3).untestable
    without = {"step", "compiled_equals_plain", "dropout_repeats", "precision"}
    assert {name for name in ("overfit", "derivative", *without) if "budget_s=" in why[name]} == {
        "overfit",
        "derivative",
    }

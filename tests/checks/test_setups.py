"""What a check takes for a setup, refuses, and gives back."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normlab
from normlab.checks.check import examine, properties
from normlab.checks.property import Answers, Property
from normlab.errors import UserError, is_own
from normlab.setups.setup import Setup
from normlab.trace.preparation import prepare
from normlab.trace.step_under_test import StepUnderTest

from .tiny import Decoder, groups, loss_of, report_of, tokens


@pytest.mark.parametrize(
    ("odd", "refusal"),
    [
        (
            {
                "loss": lambda m, ids: F.cross_entropy(
                    m(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none"
                )
            },
            r"must return one number",
        ),
        ({"optimizer": lambda m: (groups(m) for _ in range(1))}, r"optimizer\(model\) returned generator"),
        ({"optimizer": lambda m: None}, r"optimizer\(model\) returned None"),
        ({"optimizer": int}, r"optimizer\(model\) raised TypeError"),
        ({"optimizer": groups, "scheduler": lambda o: None}, r"scheduler\(optimizer\) returned None"),
    ],
)
def test_functions_that_raise_or_return_something_else_are_refused(odd: dict[str, Any], refusal: str):
    with pytest.raises(UserError, match=refusal):
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
    step = prepared()
    step.budget_s = 0.0
    why = examine(step, properties()).untestable
    asked = ("overfit", "derivative", "dropout_repeats", "step", "compiled_equals_plain")
    # only a backward pass shows whether it runs anything again
    assert {name for name in asked if "budget" in why[name]} == {"overfit", "derivative", "dropout_repeats"}


def test_no_pass_begins_after_the_budget_and_the_rest_is_untested():
    begun = list[float]()

    def endless(step: StepUnderTest) -> Answers:
        """It runs passes for ever, and takes what they raise for an answer."""
        while True:
            begun.append(time.monotonic())
            with suppress(Exception):
                step.exact.again().once()

    step = prepared()
    step.budget_s = time.monotonic() - step.started + 0.5
    report = examine(step, [Property("endless", "outputs", endless, passes=2), properties()[-1]])
    assert report.failures == ()
    assert report.untestable.keys() == {"endless", properties()[-1].name}
    assert all("budget" in why for why in report.untestable.values())
    assert sum(at > step.ends for at in begun) <= 1


def test_a_budget_of_less_than_one_pass_is_refused_with_the_time_of_one():
    with pytest.raises(UserError, match=r"pass .*\d s.*budget_s=\d+"):
        normlab.check(Decoder(0.0), tokens(), loss=loss_of, optimizer=groups, budget_s=1e-3)


def prepared() -> StepUnderTest:
    step = StepUnderTest(Setup(Decoder(0.0), tokens(), loss_of, optimizer=groups))
    prepare(step)
    return step

"""The losses that a step adds up are checked one by one, and any that is not checked is named."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

import normlab
from checks.tiny import Decoder, loss_of, tokens
from normlab.report.contract import document
from normlab.setups.setup import Setup


def two_losses() -> Setup:
    """A setup whose loss is the sum of two, each from a pass of its own."""
    torch.manual_seed(0)
    model, old, new = Decoder(dropout=0.0), tokens(), tokens().flip(1)

    def both(model, batch):
        return loss_of(model, batch["old"]) + loss_of(model, batch["new"])

    added = [Setup(model, old, loss=loss_of), Setup(model, new, loss=loss_of)]
    return Setup(model, {"old": old, "new": new}, loss=both, added=added)


def test_losses_that_the_budget_does_not_reach_are_named(monkeypatch):
    clock = time.monotonic

    def lose_an_hour(name, done, of):
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)

    report = normlab.check(two_losses(), budget_s=60, progress=lose_an_hour)
    assert [loss.number for loss in report.unreached_losses] == [1, 2]
    assert len({loss.reason for loss in report.unreached_losses}) == 1
    lines = [line.text for line in report.lines() if line.kind == "untestable"]
    assert all(any(loss.reason in line for line in lines) for loss in report.unreached_losses)
    plain = document(report.to_dict())["unreached_losses"]
    assert [loss["number"] for loss in plain] == [1, 2]


@pytest.mark.slow
def test_a_loss_that_raises_is_named_with_the_reason_and_the_others_are_reached():
    def broken(model, batch):
        raise ValueError("no such row")

    setup = two_losses()
    first, second = setup.added
    setup = replace(setup, added=[first, replace(second, loss=broken)])
    report = normlab.check(setup)
    assert [loss.number for loss in report.unreached_losses] == [2]
    assert "no such row" in report.unreached_losses[0].reason


@pytest.mark.slow
def test_losses_that_are_reached_are_not_named():
    assert normlab.check(two_losses()).unreached_losses == ()

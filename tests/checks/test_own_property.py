"""A property from outside the package: one function, which is judged, traced and explained like others."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from checks.tiny import Decoder, loss_of, report_of, tokens
from normlab.checks.explanations import explanations
from normlab.checks.property import OTHER_BATCHES, PROPERTIES, fail, needs, property_of
from normlab.checks.tracing import trace_property
from normlab.cli.main import main


@pytest.fixture(autouse=True)
def own_property():
    """Register the property of CONTRIBUTING for one test."""

    @property_of("tokens", passes=2, uses=OTHER_BATCHES)
    def row_order(step):
        """The loss is the same whatever the order of the batch's rows.

        The rows are reversed, and the loss must be the same but for rounding.
        """
        count = step.facts.rows
        needs(count > 1, "the batch holds one row; pass a batch of two rows or more")
        reversed_rows = step.facts.with_rows(torch.arange(count).flip(0))
        before = step.exact.loss.item()
        after = step.exact.again(batch=reversed_rows).loss.item()
        if abs(after - before) > step.rounding * abs(before):
            yield fail("loss", f"a loss of {after:.9g}, not {before:.9g}")

    yield
    del PROPERTIES["row_order"]


def loss_by_place(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """A loss in which the first row counts twice."""
    return loss_of(model, ids) + loss_of(model, ids[:1])


def test_it_holds_fails_or_cannot_be_tested():
    assert report_of("row_order").holds == ("row_order",)
    (failure,) = report_of("row_order", loss=loss_by_place).failures
    assert (failure.property, failure.module) == ("row_order", "loss")
    assert "one row" in report_of("row_order", batches=tokens()[:1]).untestable["row_order"]


def test_it_is_traced_and_its_pass_is_seen():
    traced = trace_property("row_order", Decoder(), tokens(), loss=loss_by_place)
    assert traced.verdict == "fails"
    assert traced.statement == "The loss is the same whatever the order of the batch's rows."
    assert "batch" in {change.kind for entry in traced.entries for change in entry.setting.changes}


def test_it_comes_last_and_is_explained_by_its_docstring(capsys):
    known = explanations()
    assert list(known)[-1] == "row_order"
    assert main(["explain", "row_order"]) == 0
    assert "reversed" in capsys.readouterr().out
    assert main(["explain", "row_order", "--json"]) == 0
    (explained,) = json.loads(capsys.readouterr().out)
    assert (explained["formulation"], explained["source"]) == ("", "")

"""A baseline names what differs from it, in words that say what was and what is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normlab.checks.baseline import changed_parameters, parameters_of


class Scaled(nn.Module):
    """A matrix and a factor without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.factor = nn.Linear(4, 4, bias=False), nn.Parameter(torch.ones(()))


def freeze(model: Scaled) -> None:
    model.factor.requires_grad = False


def give_an_axis(model: Scaled) -> None:
    model.factor = nn.Parameter(torch.ones(1))


def tie(model: Scaled) -> None:
    model.matrix.other = model.factor


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        (freeze, "factor", "its trainable was True, and is False"),
        (give_an_axis, "factor", "its shape was [], and is [1]"),
        (tie, "matrix.other", "it is new"),
    ],
    ids=["trainable", "shape", "new"],
)
def test_what_differs_is_named_with_both_values(change, place, words):
    torch.manual_seed(0)
    model = Scaled()
    before = parameters_of(model)
    assert list(changed_parameters(model, before)) == []
    change(model)
    named = {violation.module: violation.evidence for violation in changed_parameters(model, before)}
    assert named[place] == words

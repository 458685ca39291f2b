"""Two passes of a model that calls other modules by what it reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normlab.diagnosis.reading.calls import ModuleCall, calls, first_change

LEAST = 100.0


class Routed(nn.Module):
    """Gives each token `[D]` to the expert of the sign of its first entry."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, chosen = torch.zeros_like(x), (x[..., 0] > 0).long()
        for i, expert in enumerate(self.experts):
            if (held := chosen == i).any():
                y[held] = expert(x[held])
        return self.last(y)


def passed(model: nn.Module, x: Tensor, kept: int) -> list[ModuleCall]:
    with torch.no_grad(), calls(model, lambda y: y[:, :kept].clone() if y.ndim > 2 else None) as found:
        model(x)
    return found


def test_a_module_that_runs_in_one_pass_alone_is_not_compared():
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(2, 6, 4)
    x[..., 0] = 1.0
    routed = x.clone()
    routed[:, 4:, 0] = -1.0
    one, other = (passed(model, y, kept=4) for y in (x, routed))
    assert len(one) != len(other)
    for pair in ((one, other), (other, one)):
        assert first_change(*pair, LEAST) == ("", 0.0)


def test_the_last_output_that_is_compared_is_that_of_the_model():
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(2, 6, 4)
    x[..., 0] = 1.0
    one, other = passed(model, x, kept=6), passed(model, -x, kept=6)
    _, change = first_change(one, other, LEAST)
    outputs = [found[-1].output[0] for found in (one, other)]
    digit = outputs[0].abs().max() * torch.finfo(torch.float32).eps
    assert change == pytest.approx(((outputs[0] - outputs[1]).abs().max() / digit).item())


def test_calls_of_one_module_are_compared_in_their_order():
    x, y = torch.ones(1, 2, 3), torch.full((1, 2, 3), 2.0)
    twice = [ModuleCall("shared", (x,), (x,)), ModuleCall("shared", (x,), (y,))]
    other = [ModuleCall("shared", (x,), (x,)), ModuleCall("shared", (x,), (x,))]
    assert first_change(twice, twice, LEAST) == ("", 0.0)
    assert first_change(twice, other, LEAST)[0] == "shared"
    assert first_change(twice, other[:1], LEAST) == ("", 0.0)

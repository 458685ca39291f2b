"""The comparison itself: a wrong value and a wrong derivative are found, on every path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normlab.nn import Attention, Context
from oracles import comparing
from oracles.adapter import Choices, Weights, attention
from oracles.comparing import arrays_of, compare, scattered
from oracles.toys import CONFIG, normal


class Scaled(nn.Module):
    """a x + b, with errors on request."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        y = self.a * x + self.b
        if self.wrong == "value":
            return y + 1e-7
        return y if self.wrong != "derivative" else y + 1e-7 * (self.a - self.a.detach())


def check(module: nn.Module) -> None:
    x = normal(4, 3)
    compare(module, lambda: module(x), lambda w: w["a"] * w["x"] + w["b"], {"x": x})


def test_errors_are_found_and_the_wrong_parameter_is_named():
    check(scattered(Scaled()))
    with pytest.raises(AssertionError, match="tolerance"):
        check(scattered(Scaled("value")))
    wrong = r"trained: parameters, our derivative, the oracle's: \[\('a', [^']+\)\]$"
    with pytest.raises(AssertionError, match=wrong):
        check(scattered(Scaled("derivative")))


@pytest.mark.parametrize("path", comparing.PATHS, ids=lambda path: path.__name__)
def test_every_path_is_compared(monkeypatch, path):
    module = scattered(Attention(CONFIG, source="self"))
    x = normal(5, 6)
    monkeypatch.setattr(comparing, "PATHS", (path,))

    def oracle(arrays: dict) -> object:
        return 1.000001 * attention(Weights(arrays), Choices(CONFIG, "post"), "self_attention")(
            arrays["x"], None
        )

    with pytest.raises(AssertionError, match="tolerance"):
        compare(module, lambda: module(x[None], Context())[0], oracle, {"x": x})


def test_scattered_parameters_stand_at_no_special_value():
    arrays = arrays_of(scattered(Attention(CONFIG, source="memory")))
    assert all(((abs(a) > 0.19) & (abs(a) < 0.81)).all() for a in arrays.values())
    assert all((a < 0).any() and (a > 0).any() for a in arrays.values())

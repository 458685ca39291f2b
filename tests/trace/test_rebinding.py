"""A user's step, made again for copies: it reaches the copies wherever it reached what was copied."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from normlab.trace.rebinding import step_for_copies

WIDTH = 3
calls = 0
"""Counted by ``counted``, which stands for a step that counts in its file."""


def mean_of(x: torch.Tensor, *, model: nn.Module) -> torch.Tensor:
    return model(x).mean()


def counted(x: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    return x.sum()


def closed_over(model: nn.Module) -> Any:
    return lambda x: model(x).mean()


def with_default(model: nn.Module) -> Any:
    def step(x: torch.Tensor, used: nn.Module = model) -> torch.Tensor:
        return used(x).mean()

    return step


def of_a_function_in_a_partial(model: nn.Module) -> Any:
    return partial(lambda step, x: step(x), closed_over(model))


STEPS = {
    "closure": closed_over,
    "default": with_default,
    "partial": lambda model: partial(mean_of, model=model),
    "partial that holds a closure": of_a_function_in_a_partial,
}


class StepOfAScript:
    """An object that is a step; it is handed the model, and keeps what it knows of its script."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).mean()


def copied_and_doubled(model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """Return a copy with twice the weights, so that it is seen in the result which of the two has run."""
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(model, memo)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    return copied, memo


@pytest.mark.parametrize("make_step", STEPS.values(), ids=STEPS)
def test_the_new_step_runs_the_copy_and_the_given_one_the_original(make_step):
    model, x = nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH)
    _, memo = copied_and_doubled(model)
    given = make_step(model)
    new = step_for_copies(given, memo)
    assert torch.equal(new(x), 2 * model(x).mean())
    assert torch.equal(given(x), model(x).mean())


def test_an_object_that_is_a_step_is_returned_as_it_is():
    model = nn.Linear(WIDTH, WIDTH)
    _, memo = copied_and_doubled(model)
    step = StepOfAScript(model)
    assert step_for_copies(step, memo) is step


def test_what_the_new_step_counts_is_not_counted_in_the_users_file():
    before = calls
    step_for_copies(counted, {})(torch.ones(2))
    assert calls == before
    counted(torch.ones(2))
    assert calls == before + 1

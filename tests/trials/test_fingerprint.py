"""Digests of a setup: what changes the losses of its trials changes a digest, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

from normlab.trials.fingerprint import fingerprint
from trials.tiny import setup


def smoothed(model: nn.Module, ids: Tensor, *, smoothing: float) -> Tensor:
    logits = model(ids[:, :-1]).transpose(1, 2)
    return F.cross_entropy(logits, ids[:, 1:], label_smoothing=smoothing)


class Smoothed(nn.Module):
    """A loss that is an object."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, model: nn.Module, ids: Tensor) -> Tensor:
        return smoothed(model, ids, smoothing=self.smoothing)


def decaying(optimizer: Optimizer, power: float) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: (step + 1) ** -power)


def with_schedule(make: Callable[[Optimizer, float], Any], value: float) -> dict[str, str]:
    # an object, since a function would be digested by its own source
    given = setup()
    scheduled = replace(given, scheduler=make(given.optimizer, value))
    return fingerprint(scheduled, list(given.batches))


def with_loss(make: Callable[[float], Any], value: float) -> dict[str, str]:
    given = setup(loss=make(value))
    return fingerprint(given, list(given.batches))


MADE = {
    "steps of a schedule": (
        "scheduler",
        partial(with_schedule, lambda o, value: StepLR(o, int(100 * value))),
    ),
    "function of a schedule": ("scheduler", partial(with_schedule, decaying)),
    "partial of a loss": ("loss", partial(with_loss, lambda value: partial(smoothed, smoothing=value))),
    "attribute of a loss": ("loss", partial(with_loss, Smoothed)),
}


@pytest.mark.parametrize(("name", "marks"), MADE.values(), ids=MADE)
def test_another_value_changes_its_digest_alone(name, marks):
    torch.manual_seed(0)
    first, again, other = marks(0.25), marks(0.25), marks(0.5)
    assert first == again
    assert {mark for mark in first if first[mark] != other[mark]} == {name}


def test_the_same_value_under_another_name_is_another_partial():
    first, other = (
        with_loss(lambda value, name=name: partial(smoothed, **{name: value}), 0.25) for name in "ab"
    )
    assert first["loss"] != other["loss"]

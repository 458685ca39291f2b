"""Optimisers: the update against its equation, and what the loop relies on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normlab.optim import OPTIMISERS, build_optimiser
from normlab.spec.config import OptimConfig


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_follows_its_equation(weight_decay):
    config = OptimConfig(betas=(0.8, 0.9), eps=1e-3, weight_decay=weight_decay)
    rng = np.random.default_rng(1)
    x, m, v = rng.normal(size=5), np.zeros(5), np.zeros(5)
    p = torch.nn.Parameter(torch.from_numpy(x.copy()))
    optimiser = build_optimiser([p], config)
    for step, lr in ((1, 0.1), (2, 0.03), (3, 0.2)):
        gradient = rng.normal(size=5)
        p.grad = torch.from_numpy(gradient.copy())
        optimiser.param_groups[0]["lr"].fill_(lr)
        optimiser.step()
        gradient = gradient + weight_decay * x
        m = 0.8 * m + 0.2 * gradient
        v = 0.9 * v + 0.1 * gradient**2
        x = x - lr * (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.9**step)) + 1e-3)
        np.testing.assert_allclose(p.detach(), x, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_learning_rate_is_a_tensor_that_starts_at_zero(name):
    p = torch.nn.Parameter(torch.ones(3))
    optimiser = build_optimiser([p], OptimConfig(optimiser=name))
    p.grad = torch.ones(3)
    optimiser.step()
    assert torch.equal(p.detach(), torch.ones(3))
    assert optimiser.param_groups[0]["lr"].shape == ()


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(
        ValueError, match=r"^unknown optimiser 'adan', did you mean 'adam'\? \(allowed: adam\)$"
    ):
        build_optimiser([], OptimConfig(optimiser="adan"))


def test_an_unknown_schedule_is_refused_before_any_step():
    with pytest.raises(ValueError, match=r"^unknown schedule 'linaer', did you mean 'linear'\? \(allowed: "):
        build_optimiser([], OptimConfig(schedule="linaer"))

"""Optimizers: the update against its equation and against torch's plain one, and what the loop relies on."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from cases import each
from normlab.errors import UserError
from normlab.lab.config import OptimConfig
from normlab.optim import OPTIMIZERS, build_optimizer

BETAS, EPS, MOMENTUM = (0.8, 0.9), 1e-3, 0.7
RATES = (0.1, 0.03, 0.2, 0.0, 0.05, 0.1, 0.07, 0.1, 0.02, 0.1)


# ------------------------------------------------------------- updates as the papers write them, in float64


def moments(g, kept, n):
    """Exponential means of gradient and square, with and without the correction for their start."""
    m, v = kept.get("m", 0 * g), kept.get("v", 0 * g)
    kept["m"], kept["v"] = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2
    return kept["m"] / (1 - BETAS[0] ** n), kept["v"] / (1 - BETAS[1] ** n)


def adam(x, g, kept, n, lr, decay):
    m, v = moments(g + decay * x, kept, n)
    return x - lr * m / (np.sqrt(v) + EPS)


def adamw(x, g, kept, n, lr, decay):
    m, v = moments(g, kept, n)
    return x - lr * (m / (np.sqrt(v) + EPS) + decay * x)


def sgd(x, g, kept, n, lr, decay):
    g = g + decay * x
    kept["u"] = MOMENTUM * kept["u"] + g if n > 1 else g
    return x - lr * kept["u"]


def radam_sgd(x, g, kept, n, lr, decay, held=1):
    m, _ = moments(g, kept, n)
    longest = 2 / (1 - BETAS[1]) - 1
    length = longest - 2 * n * BETAS[1] ** n / (1 - BETAS[1] ** n)
    if length <= 5:
        return x - held * lr * (m + decay * x)
    x = x - lr * decay * x
    adaptive = math.sqrt(1 - BETAS[1] ** n) / (np.sqrt(kept["v"]) + EPS)
    rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return x - lr * math.sqrt(rectified) * m * adaptive


EQUATIONS = {
    "adam": adam,
    "adamw": adamw,
    "sgd": sgd,
    "radam": partial(radam_sgd, held=0),
    "radam_sgd": radam_sgd,
    "muon": adamw,  # which is what vectors get
    "muon_original": adamw,
}


def steps(optimizer, p, gradients):
    for lr, gradient in zip(RATES, gradients, strict=True):
        p.grad = gradient.clone()
        optimizer.param_groups[0]["lr"].fill_(lr)
        optimizer.step()
        yield lr, p.detach().clone()


def config_of(name, weight_decay, momentum=MOMENTUM):
    return OptimConfig(optimiser=name, betas=BETAS, eps=EPS, momentum=momentum, weight_decay=weight_decay)


@each("weight_decay", [0.0, 0.1])
@each("name", OPTIMIZERS)
def test_an_optimizer_follows_its_equation(name, weight_decay):
    rng = np.random.default_rng(1)
    x, gradients, kept = rng.normal(size=5), rng.normal(size=(len(RATES), 5)), {}
    p = torch.nn.Parameter(torch.from_numpy(x.copy()))
    optimizer = build_optimizer(nn.ParameterList([p]), config_of(name, weight_decay))
    for n, (lr, found) in enumerate(steps(optimizer, p, torch.from_numpy(gradients)), start=1):
        x = EQUATIONS[name](x, gradients[n - 1], kept, n, lr, weight_decay)
        np.testing.assert_allclose(found, x, rtol=1e-6)  # lr is a tensor in float32


def test_radam_is_tested_on_both_sides_of_its_threshold():
    longest = 2 / (1 - BETAS[1]) - 1
    lengths = [longest - 2 * n * BETAS[1] ** n / (1 - BETAS[1] ** n) for n in range(1, len(RATES) + 1)]
    assert [length > 4 for length in lengths].index(True) == 4, "the paper's threshold is passed at step 5"
    assert [length > 5 for length in lengths].index(True) == 5, "and that of the code at step 6"


PLAIN = {
    "adam": lambda p, c, lr: torch.optim.Adam(
        p, lr, c.betas, c.eps, c.weight_decay, foreach=False, fused=False
    ),
    "adamw": lambda p, c, lr: torch.optim.AdamW(
        p, lr, c.betas, c.eps, c.weight_decay, foreach=False, fused=False
    ),
    "sgd": lambda p, c, lr: torch.optim.SGD(
        p, lr, c.momentum, weight_decay=c.weight_decay, foreach=False, fused=False
    ),
    "radam_sgd": lambda p, c, lr: torch.optim.RAdam(
        p, lr, c.betas, c.eps, c.weight_decay, decoupled_weight_decay=True, foreach=False
    ),
    "muon": lambda p, c, lr: torch.optim.Muon(
        p, lr, c.weight_decay, c.momentum, adjust_lr_fn="match_rms_adamw"
    ),
    "muon_original": lambda p, c, lr: torch.optim.Muon(p, lr, c.weight_decay, c.momentum),
}


@each("weight_decay", [0.0, 0.1])
@each(("name", "momentum"), [*((name, MOMENTUM) for name in PLAIN), ("sgd", 0.0)])
def test_a_fused_step_with_a_tensor_rate_is_the_plain_step_with_a_number(name, momentum, weight_decay):
    config = config_of(name, weight_decay, momentum)
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(7, 33, generator=generator)
    gradients = torch.randn(len(RATES), 7, 33, generator=generator)
    p, q = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    plain = PLAIN[name]([q], config, 0.5)
    for lr, found in steps(build_optimizer(nn.ParameterList([p]), config), p, gradients):
        plain.param_groups[0]["lr"] = lr
        q.grad = p.grad.clone()
        plain.step()
        torch.testing.assert_close(found, q.detach(), rtol=1e-5, atol=1e-6)


def test_every_optimizer_has_an_equation_and_a_plain_one():
    assert set(EQUATIONS) == {*PLAIN, "radam"} == set(OPTIMIZERS)


def test_radam_holds_its_first_steps_after_a_restart_as_well():
    """A new optimizer with the state of another one goes on at its step, and the rate stays the caller's."""
    p = torch.nn.Parameter(torch.ones(3))
    config, lr = config_of("radam", 0.1), torch.tensor(0.1)
    optimizer = OPTIMIZERS["radam"]([p], lr, config)
    for n in range(1, 8):
        before = p.detach().clone()
        p.grad = torch.ones(3)
        optimizer.step()
        assert torch.equal(p.detach(), before) == (n <= 5), n
        assert optimizer.param_groups[0]["lr"] == 0.1
        state = optimizer.state_dict()
        optimizer = OPTIMIZERS["radam"]([p], lr, config)
        optimizer.load_state_dict(state)


def test_radam_without_any_update_is_refused():
    with pytest.raises(UserError, match=r"\(0.9, 0.5\).*radam_sgd"):
        build_optimizer(nn.ParameterList([torch.ones(1)]), OptimConfig(optimiser="radam", betas=(0.9, 0.5)))


# ------------------------------------------------------------------------------------ what the loop relies on


@each("name", OPTIMIZERS)
def test_the_learning_rate_is_a_tensor_that_starts_at_zero(name):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(nn.ParameterList([p]), OptimConfig(optimiser=name, weight_decay=0.1))
    p.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3))
    assert optimizer.param_groups[0]["lr"].shape == ()


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"optimizer 'adan', .*'adam'\? .*\badam, "):
        build_optimizer(nn.Linear(1, 1), OptimConfig(optimiser="adan"))


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("linaer", r"^unknown schedule 'linaer', did you mean 'linear'\? \(allowed: "),
        ("step_decay", r"^schedule 'step_decay' decays at optim.decay_step = 0, "),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_any_step(schedule, said):
    with pytest.raises(ValueError, match=said):
        build_optimizer(nn.ParameterList(), OptimConfig(schedule=schedule, warmup_steps=100))


@each("name", ["adam", "adamw", "sgd", "radam", "radam_sgd"])
def test_weight_decay_can_be_left_to_the_matrices(name):
    """As in BERT: a step moves biases and gains as one without decay does, and matrices as one with it."""
    moved = {}
    for decay, on in ((0.0, "all"), (0.1, "all"), (0.1, "matrices")):
        generator = torch.Generator().manual_seed(1)
        parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in ((3, 2), (3,), (1,))]
        config = OptimConfig(optimiser=name, weight_decay=decay, weight_decay_on=on)
        optimizer = build_optimizer(nn.ParameterList(parameters), config)
        for _ in range(8):
            for group in optimizer.param_groups:
                group["lr"].fill_(0.1)
            for parameter in parameters:
                parameter.grad = parameter.detach() + 1
            optimizer.step()
        moved[decay, on] = [p.detach().clone() for p in parameters]
    matrix, *others = moved[0.1, "matrices"]
    assert torch.equal(matrix, moved[0.1, "all"][0])
    assert not torch.equal(matrix, moved[0.0, "all"][0])
    assert all(map(torch.equal, others, moved[0.0, "all"][1:]))

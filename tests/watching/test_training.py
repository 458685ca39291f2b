"""What trains in a block is watched from its first step on, and trains as it would have."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from normlab.watching.training import follow
from normlab.watching.watcher import Watch

pytestmark = pytest.mark.filterwarnings("ignore:normlab")  # these models have no blocks


def train(steps=4, *, micro_batches=1, divided=True, scaled=False, closure=False, parts=1):
    """Train a layer, or several that no module holds; return the layers and the losses of the steps."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(parts)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    losses = []

    def backward():
        loss = 0.0
        for _ in range(micro_batches):
            x = torch.randn(3, 4)
            for layer in layers:
                x = layer(x)
            one = x.square().mean() / (micro_batches if divided else 1)
            scaler.scale(one).backward()
            loss += one.item()
        losses.append(loss)
        return loss

    for _ in range(steps):
        optimizer.zero_grad()
        if closure:
            optimizer.step(backward)
        else:
            backward()
            scaler.step(optimizer)
            scaler.update()
    return layers, losses


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"micro_batches": 4},
        {"micro_batches": 4, "divided": False},
        {"scaled": True},
        {"closure": True},
        {"parts": 3},
    ],
    ids=str,
)
def test_every_loss_is_that_whose_gradient_the_optimizer_gets(options, tmp_path):
    plain, expected = train(**options)
    seen = []
    with Watch(every_steps=1, emit=seen.append) as watch:
        training = follow(watch)
        watched, _ = train(**options)
    losses = [record.value for record in seen if record.signal == "loss"]
    assert losses == pytest.approx(expected)
    assert training.is_attached
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(a.weight, b.weight)


def test_what_is_patched_is_put_back():
    places = [
        (nn.Module, "__call__"),
        (Optimizer, "__init__"),
        (Optimizer, "zero_grad"),
        (torch.amp.GradScaler, "scale"),
        (torch.Tensor, "backward"),
        (torch.autograd, "backward"),
    ]
    before = [vars(owner)[name] for owner, name in places]
    with Watch(emit=lambda record: None) as watch:
        follow(watch)
        train(1)
    assert [vars(owner)[name] for owner, name in places] == before


def test_an_evaluation_is_no_training():
    with Watch(emit=lambda record: None) as watch:
        training = follow(watch)
        with torch.no_grad():
            nn.Linear(2, 2)(torch.ones(1, 2))
    assert not training.is_attached

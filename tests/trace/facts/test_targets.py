"""Targets are read off a loss's gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from normlab.trace.facts.targets import read_targets

from .reader import VOCAB, ids


def gradient(logits, loss):
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(loss(logits), logits)[0]


@pytest.fixture
def logits():
    return torch.randn(3, 5, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("penalty", [0.0, 1e-2])
def test_targets_are_read_off_the_gradient(logits, smoothing, penalty):
    asked = ids(rows=3, width=5)
    asked[0, 2:] = -100

    def loss(z):
        whole = F.cross_entropy(z.flatten(0, 1), asked.flatten(), label_smoothing=smoothing)
        return whole + penalty * z.logsumexp(-1)[asked >= 0].square().mean()

    read = read_targets(logits, gradient(logits, loss))
    assert read is not None
    assert torch.equal(read.counted, asked >= 0)
    assert torch.equal(read.ids[read.counted], asked[asked >= 0])
    assert read.weight[read.counted].sum() == pytest.approx(1, abs=1e-6)
    assert read.smoothing == pytest.approx(smoothing, abs=1e-6)
    assert (read.excess > 1e-4) == bool(penalty)


def test_weights_of_positions_are_read(logits):
    asked, weight = ids(rows=3, width=5), torch.rand(15, dtype=torch.float64)
    read = read_targets(
        logits,
        gradient(
            logits,
            lambda z: (weight * F.cross_entropy(z.flatten(0, 1), asked.flatten(), reduction="none")).sum(),
        ),
    )
    assert read is not None
    assert torch.allclose(read.weight.flatten(), weight)
    assert torch.allclose(read.nll, F.cross_entropy(logits.transpose(1, 2), asked, reduction="none"))


@pytest.mark.parametrize("loss", [lambda z: z.square().mean(), lambda z: F.mse_loss(z.softmax(-1), z * 0)])
def test_other_losses_have_no_targets(logits, loss):
    assert read_targets(logits, gradient(logits, loss)) is None

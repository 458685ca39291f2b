"""The loss against a loop over tokens and against torch's cross-entropy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cases import each
from normlab.lab.tasks.task import label_smoothed, z_loss
from oracles import losses

V = 7


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    logits = (2 * torch.randn(3, 4, V, dtype=torch.float64)).requires_grad_()
    return logits, torch.tensor([[3, 4, 5, 3], [6, 3, 0, 0], [0, 0, 0, 0]])


@each("smoothing", [0.0, 0.1, 0.6])
@each("masked", [False, True])
def test_sums_equal_a_loop_over_tokens(batch, smoothing, masked):
    logits, target = batch
    allowed = torch.ones(V, dtype=torch.bool)
    if masked:
        allowed[[0, 1, 2]] = False
    sums = label_smoothed(logits, target, smoothing, allowed if masked else None, 0)
    rows = zip(logits.detach().numpy(), target.tolist(), strict=True)
    expected = np.sum([losses.label_smoothed(s, t, smoothing, allowed.tolist()) for s, t in rows], axis=0)
    assert [sums.loss.item(), sums.nll.item()] == pytest.approx(expected.tolist(), rel=1e-12)
    assert not sums.nll.requires_grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sums_and_gradients_equal_torch(batch, smoothing):
    logits, target = batch
    ours = label_smoothed(logits, target, smoothing, None, 0).loss
    theirs = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum", label_smoothing=smoothing
    )
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_masked_types_get_no_gradient_and_probability_zero(batch, smoothing):
    logits, target = batch
    allowed = torch.tensor([False, False, True, True, True, True, True])
    sums = label_smoothed(logits, target, smoothing, allowed, 0)
    (gradient,) = torch.autograd.grad(sums.loss, logits)
    assert gradient.isfinite().all()
    assert not gradient[..., :2].any()
    assert not gradient[target == 0].any(), "nothing is learned where nothing is predicted"
    assert gradient[target != 0][:, 2:].all()
    louder = logits.detach().clone()
    louder[..., :2] += 50
    assert torch.equal(label_smoothed(louder, target, smoothing, allowed, 0).loss, sums.loss.detach())


def test_bf16_logits_are_summed_in_float32():
    torch.manual_seed(2)
    logits, target = torch.randn(8, 50, V).bfloat16(), torch.randint(1, V, (8, 50))
    sums = label_smoothed(logits, target, 0.1, None, 0)
    assert sums.loss.dtype == torch.float32
    torch.testing.assert_close(sums.loss, label_smoothed(logits.float(), target, 0.1, None, 0).loss)


def test_z_loss_is_a_loop_over_the_tokens_that_are_predicted(batch):
    logits, target = batch
    log_z = [
        np.log(np.exp(row).sum())
        for rows, wanted in zip(logits.detach().numpy(), target.tolist(), strict=True)
        for row, token in zip(rows, wanted, strict=True)
        if token
    ]
    assert z_loss(logits, target, 0).item() == pytest.approx(np.square(log_z).sum(), rel=1e-12)
    assert z_loss(logits.detach().bfloat16(), target, 0).dtype == torch.float32

"""Norms: values against NumPy, gradients against finite differences, corner inputs, starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normlab.nn import Norm
from oracles import methods

every_norm = pytest.mark.parametrize("name", Norm.registry)


@every_norm
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_values_and_gradients(name, scale):
    torch.manual_seed(1)
    norm = Norm.registry[name](6).double()
    for p in norm.parameters():
        torch.nn.init.normal_(p)
    x = (scale * torch.randn(2, 3, 6, dtype=torch.float64)).requires_grad_()
    weights = methods.Weights({n: p.detach().numpy() for n, p in norm.named_parameters()})
    expected = methods.NORMS[name](x.detach().numpy(), weights)
    np.testing.assert_allclose(norm(x).detach(), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(norm, (x,), eps=1e-6 * scale, atol=1e-4 / scale)


@every_norm
def test_a_zero_vector_stays_finite(name):
    x = torch.zeros(1, 4, requires_grad=True)
    y = Norm.registry[name](4)(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(1, 4))
    assert x.grad.isfinite().all()


@every_norm
def test_at_the_start_a_standard_normal_vector_keeps_its_length(name):
    torch.manual_seed(2)
    norm = Norm.registry[name](512)
    x = torch.randn(64, 512)
    assert norm(7 * x).norm(dim=-1).mean().item() == pytest.approx(512**0.5, rel=1e-3)
    assert all(p.dim() == 1 for p in norm.parameters()), "scalars have shape [1]: sharding refuses 0-d"

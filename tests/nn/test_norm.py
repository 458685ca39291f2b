"""Norms: derivatives at every scale, corner inputs, starts, use without a model. The oracles test values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import each
from normlab.nn import Norm

every_norm = each("name", Norm.registry)


@every_norm
@each("scale", [1e-3, 1.0, 1e3])
def test_gradients(name, scale):
    torch.manual_seed(1)
    norm = Norm.registry[name](6).double()
    for p in norm.parameters():
        nn.init.normal_(p)
    x = (scale * torch.randn(2, 3, 6, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(norm, (x,), eps=1e-6 * scale, atol=1e-4 / scale)


@every_norm
def test_a_zero_vector_stays_finite(name):
    x = torch.zeros(1, 4, requires_grad=True)
    y = Norm.registry[name](4)(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(1, 4))
    assert x.grad.isfinite().all()


@every_norm
def test_at_the_start_a_standard_normal_vector_keeps_its_length_or_its_direction_is_squashed(name):
    """A norm divides by a length, whatever that was; a squashing function has a start and a bound instead."""
    torch.manual_seed(2)
    norm = Norm.registry[name](512)
    x = torch.randn(64, 512)
    if hasattr(norm, "alpha"):
        assert norm(1e-3 * x).norm(dim=-1).mean() < 1e-2 * 512**0.5
        assert norm(1e6 * x).abs().max().item() == pytest.approx(1.0)
    else:
        assert norm(7 * x).norm(dim=-1).mean().item() == pytest.approx(512**0.5, rel=1e-3)
        torch.testing.assert_close(norm(7 * x), norm(70 * x), rtol=1e-3, atol=1e-4)
    assert all(p.dim() == 1 for p in norm.parameters()), "scalars have shape [1]: sharding refuses 0-d"


@every_norm
def test_a_norm_is_usable_alone_and_where_a_stream_ends(name):
    kind = Norm.registry[name]
    net = nn.Sequential(nn.Linear(3, 8), kind(8), nn.Linear(8, 1))
    net(torch.randn(5, 3)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    final = kind.final(8)
    trained = any(p.requires_grad for p in final.parameters())
    assert trained or type(final) is kind, "what a stream ends with is trained, if the method trains any norm"

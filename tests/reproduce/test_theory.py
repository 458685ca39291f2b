"""The setting of the theory: its networks against lines written out, its facts against other ways to them."""

from __future__ import annotations

import math

import pytest
import torch

from normlab.reproduce.gradients import _base
from normlab.reproduce.statements import norm_factor
from normlab.reproduce.theory import Setting


def test_attention_is_uniform_and_feed_forwards_have_no_bias():
    setting = Setting("pre", layers=1, dim=8, tokens=5, seed=0, ffn_dim=16)
    attention, feed_forward = (sublayer.f for sublayer in setting.stack)
    x = torch.randn(1, 5, 8)
    expected = x.mean(1, keepdim=True) @ attention.value
    assert torch.allclose(attention(x), expected.expand(1, 5, 8))
    assert torch.allclose(feed_forward(x), (x @ feed_forward.inner).clamp(min=0) @ feed_forward.outer)


def test_matrices_have_xavier_s_variance():
    setting = Setting("post", layers=1, dim=200, tokens=2, seed=0, ffn_dim=600)
    assert setting.outer()[0].var().item() == pytest.approx(2 / 800, rel=0.02)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_totals_are_what_the_next_norm_reads(placement):
    setting = Setting(placement, layers=2, dim=16, tokens=3, seed=1)
    with torch.no_grad():
        end = setting.stack(setting.x)[0]
    assert torch.allclose(torch.layer_norm(setting.totals()[-1], (16,)), end, atol=1e-6)


def test_seeds_draw_other_networks_and_the_same_one_again():
    a, b, c = (Setting("post", layers=1, dim=8, tokens=3, seed=s)().item() for s in (0, 0, 1))
    assert a == b != c


def test_the_norm_s_factor_is_two_thirds_where_the_feed_forward_adds_a_half():
    found = norm_factor(layers=3, dim=256, tokens=16, seeds=3)
    assert found.low < 2 / 3 < found.high or found.value == pytest.approx(2 / 3, rel=0.02)


@pytest.mark.parametrize("base", [math.sqrt(2 / 3), 1.0, 1.2])
def test_the_base_of_a_decay_is_found(base):
    rows = [
        {
            "placement": "post",
            "where": "theory",
            "signal": "W2",
            "layer": n,
            "seed": s,
            "grad_l2": (s + 1) * base ** (6 - n),
        }
        for n in range(1, 7)
        for s in range(3)
    ]
    assert _base(rows, "post", "theory", "W2").value == pytest.approx(base)

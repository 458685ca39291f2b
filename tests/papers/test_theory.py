"""The setting of the theory: its networks against formulas, its facts against other ways to them."""

from __future__ import annotations

import pytest
import torch

from normlab.papers.studies.lemmas import TheoryNetwork, mean_field_scales, norm_factors


def test_attention_is_uniform_and_feed_forwards_have_no_bias():
    setting = TheoryNetwork("pre", layers=1, dim=8, tokens=5, seed=0, ffn_dim=16)
    attention, feed_forward = (sublayer.f for sublayer in setting.stack)
    x = torch.randn(1, 5, 8)
    expected = x.mean(1, keepdim=True) @ attention.value
    assert torch.allclose(attention(x), expected.expand(1, 5, 8))
    assert torch.allclose(feed_forward(x), (x @ feed_forward.inner).clamp(min=0) @ feed_forward.outer)


def test_matrices_have_xavier_s_variance():
    setting = TheoryNetwork("post", layers=1, dim=200, tokens=2, seed=0, ffn_dim=600)
    assert setting.outer()[0].var().item() == pytest.approx(2 / 800, rel=0.02)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_totals_are_what_the_next_norm_reads(placement):
    setting = TheoryNetwork(placement, layers=2, dim=16, tokens=3, seed=1)
    with torch.no_grad():
        end = setting.stack(setting.x)[0]
    assert torch.allclose(torch.layer_norm(setting.totals()[-1], (16,)), end, atol=1e-6)


def test_seeds_draw_other_networks_and_the_same_one_again():
    a, b, c = (TheoryNetwork("post", layers=1, dim=8, tokens=3, seed=s)().item() for s in (0, 0, 1))
    assert a == b != c


def test_the_norm_s_factor_is_two_thirds_with_the_correction_of_the_width():
    """At d 32 two thirds alone would be 6% off."""
    found = norm_factors(layers=2, dim=32, tokens=16, seeds=200)
    assert [one.value for one in found] == pytest.approx([1.0, 1.0], abs=0.02)
    assert all(one.low <= 1.005 and one.high >= 0.995 for one in found)


def test_the_mean_field_has_the_scale_of_a_wide_network():
    """As a mean over seeds: tokens become alike, so that one network counts as one draw."""
    depths = (1, 3)
    expected = mean_field_scales(16, depths)
    seen = [
        [setting.totals()[n - 1].square().mean().item() for n in depths]
        for setting in (TheoryNetwork("pre", layers=3, dim=128, tokens=16, seed=s) for s in range(60))
    ]
    assert [sum(column) / 60 for column in zip(*seen, strict=True)] == pytest.approx(expected, rel=0.03)


def test_the_mean_field_of_one_token_is_lemma_2_s_upper_bound():
    assert mean_field_scales(1, (1, 2)) == pytest.approx([2.5, 4.0])

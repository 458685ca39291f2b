from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chi2

from normlab.diagnosis.theory import (
    ScaleBounds,
    bounded_fraction,
    chi_square_tail,
    ffn_gain,
    hidden_scales,
    layer_norm_jacobian,
    relu_mean_square,
    rms_norm_jacobian,
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def within_sampling_error(observed: torch.Tensor, expected: float) -> None:
    error = observed.std() / len(observed) ** 0.5
    assert abs(observed.mean() - expected) < 4 * error
    assert error < 0.01 * expected, "too few samples to tell"


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_lemma_1_is_the_mean_square_of_a_rectified_gaussian(sigma):
    within_sampling_error((sigma * drawn(4000, 32)).relu().square().mean(-1), relu_mean_square(sigma**2))


@pytest.mark.parametrize(("dim", "inner"), [(12, 12), (12, 24), (8, 32)])
def test_the_gain_of_a_feed_forward_branch_is_what_xavier_draws(dim, inner):
    std = (2 / (dim + inner)) ** 0.5
    x, first, second = (
        drawn(20_000, 1, dim),
        drawn(20_000, dim, inner, seed=1),
        drawn(20_000, inner, dim, seed=2),
    )
    y = (x @ first * std).relu() @ second * std
    within_sampling_error((y.square().sum(-1) / x.square().sum(-1)).flatten(), ffn_gain(dim, inner))


def test_published_and_derived_gains():
    assert ffn_gain(512, 512) == pytest.approx(1 / 2)
    assert ffn_gain(512, 1024) == pytest.approx(4 / 9)
    assert ffn_gain(512, 2048) == pytest.approx(8 / 25)


def sublayers(*kinds: str) -> list:
    return [SimpleNamespace(role=role, placement=where) for role, where in (kind.split() for kind in kinds)]


def test_scales_of_lemma_2_by_hand():
    layer = ("self_attention {}", "ffn {}")
    pre = sublayers(*[kind.format("pre") for kind in layer * 3])
    found = list(hidden_scales(pre, start=1.0, ffn_gains=[None, 0.5] * 3))
    assert [s.after for s in found[1::2]] == [ScaleBounds(1 + n / 2, 1 + 3 * n / 2) for n in (1, 2, 3)]
    assert found[2].before == found[1].after == found[1].total
    post = sublayers(*[kind.format("post") for kind in layer * 3])
    found = list(hidden_scales(post, start=2.0, ffn_gains=[None, 0.5] * 3))
    assert [s.total.known for s in found[1::2]] == [1.5] * 3
    assert [s.total for s in found[::2]] == [(2, 4), (1, 2), (1, 2)]
    assert {s.after.known for s in found} == {1.0}


def test_nothing_is_said_of_what_the_lemma_does_not_cover():
    kinds = sublayers("self_attention other", "ffn pre", "ffn post", "branch post", "cross_attention pre")
    other, pre, post, unknown, cross = hidden_scales(kinds, start=1.0, ffn_gains=[None, 0.5, 0.5, None, None])
    assert (other.branch, other.total, other.after) == (None, None, None)
    assert (pre.before, pre.branch, pre.after) == (None, ScaleBounds(0.5, 0.5), None)
    assert (post.branch, post.total, post.after.known) == (None, None, 1.0)
    assert (unknown.branch, unknown.total, unknown.after.known) == (None, None, 1.0)
    assert cross.total == ScaleBounds(1.0, 2.0)
    (gated,) = hidden_scales(sublayers("ffn pre"), start=1.0, ffn_gains=[None])
    assert gated.total is None


@pytest.mark.parametrize("dim", [64, 512])
@pytest.mark.parametrize("epsilon", [0.1, 0.3])
def test_the_chi_square_tail_is_below_its_bound(dim, epsilon):
    z = drawn(8000, dim).square().sum(-1)
    measured = (z >= (1 + epsilon) * dim).double().mean().item()
    true = chi2.sf((1 + epsilon) * dim, dim)
    assert measured == pytest.approx(true, abs=4 * math.sqrt(true / len(z)) + 1e-3)
    assert max(measured, true) < chi_square_tail(dim, epsilon)


def test_the_published_tail():
    assert chi_square_tail(512, 0.1) == pytest.approx(0.53, abs=0.005)
    with pytest.raises(ValueError, match="between 0 and 1"):
        chi_square_tail(512, 1.0)


def test_bounded_fraction_counts_one_side():
    assert bounded_fraction(torch.tensor([0.0, 1.0, 1.09, 1.91])).item() == pytest.approx(0.75)
    z = drawn(5000, 512).square().sum(-1)
    assert bounded_fraction(z, 0.1).item() >= 1 - chi_square_tail(512, 0.1)


@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_lemma_3_is_exact_with_the_mean_taken_away(mean):
    x = mean + drawn(5, 6)
    for token in x:
        layer, rms = (
            torch.func.jacrev(lambda v: torch.nn.functional.layer_norm(v, (6,), eps=0.0))(token),
            torch.func.jacrev(lambda v: v / v.square().mean().sqrt())(token),
        )
        values = torch.linalg.svdvals(layer)
        torch.testing.assert_close(values[:4], layer_norm_jacobian(token).expand(4))
        assert values[4:].max() < 1e-7
        torch.testing.assert_close(torch.linalg.matrix_norm(rms, 2), rms_norm_jacobian(token))
    off = layer_norm_jacobian(x) / rms_norm_jacobian(x)
    assert (off.mean() > 2) == (mean > 0), "the published form is off where the mean dominates"

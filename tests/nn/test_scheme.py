"""Schemes: what they fill, with which deviation and from which generator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cases import each
from contracts.outsiders import NAMES
from contracts.variants import CONFIG, VOCAB, build, perturbed
from normlab.nn import Sublayer
from normlab.nn.init import SCHEMES, initialise_

XAVIER = {"attention": (2 / (64 + 64)) ** 0.5, "ffn": (2 / (64 + 192)) ** 0.5}
DEVIATIONS = {
    "xavier": XAVIER,
    "xavier_uniform": XAVIER,
    "smallinit": {**XAVIER, "attention": (2 / (64 + 4 * 64)) ** 0.5},
    "looklinear": XAVIER,
    "uniformattention": {**XAVIER, "query": 0.0, "key": 0.0},
    "normal002": {"attention": 0.02, "ffn": 0.02},
    # the decoder has six sublayers; the encoder has four
    "gpt2start": {"attention": 0.02, "ffn": 0.02, "output": 0.02 / 6**0.5, "ffn_out": 0.02 / 6**0.5},
    "truncnormal": {"attention": 0.986 * 0.02, "ffn": 0.986 * 0.02},
    "zerooutputs": {"attention": 64**-0.5, "ffn": 64**-0.5, "output": 0.0, "ffn_out": 0.0},
    "ngptstart": {"attention": 64**-0.5, "ffn": 64**-0.5},
    "nanochatstart": {"attention": 64**-0.5, "ffn": 0.4 / 64**0.5, "output": 0.0, "ffn_out": 0.0},
    NAMES["scheme"]: {"attention": 64**-0.5, "ffn": 64**-0.5, "ffn_out": 192**-0.5},
}


@each("scheme", DEVIATIONS)
def test_standard_deviations(scheme):
    """Every matrix has its deviation and a mean of 0; the contracts test the placement's gain."""
    model = build(replace(CONFIG, dim=64, ffn_dim=192, scheme=scheme))
    for sublayer in model.decoder:
        for name, weight in sublayer.f.matrices().items():
            kind = "ffn" if name.startswith("ffn") else "attention"
            expected = DEVIATIONS[scheme].get(name, DEVIATIONS[scheme][kind])
            spread = 5 / weight.numel() ** 0.5  # half of a mirrored matrix is drawn
            assert weight.std().item() == pytest.approx(expected, rel=spread), name
            assert abs(weight.mean().item()) <= expected * spread, name


def test_every_scheme_has_its_deviation_here():
    assert DEVIATIONS.keys() == {*SCHEMES, NAMES["scheme"]}


def test_a_uniform_scheme_has_a_bound():
    weight = torch.empty(64, 192)
    SCHEMES["xavier_uniform"].fill_(weight, "ffn_out", 0.5, torch.Generator().manual_seed(1))
    bound = 0.5 * (6 / (64 + 192)) ** 0.5
    assert 0.99 * bound < weight.abs().max().item() <= bound


def test_look_linear_makes_a_feed_forward_linear():
    branch = build(replace(CONFIG, scheme="looklinear")).encoder.sublayers[1].f
    x = torch.randn(2, 5, 16)
    a, b = branch(x, None)
    torch.testing.assert_close(branch(2 * x[0] - 3 * x[1], None), 2 * a - 3 * b, rtol=1e-4, atol=1e-5)
    w = branch.matrices()
    half = w["ffn_out"][:, :12] @ w["ffn_in"][:12]
    torch.testing.assert_close(a, x[0] @ half.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"activation": "gelu"}, "LookLinear is defined for ReLU only, not for gelu"),
        ({"ffn_dim": 25}, "LookLinear mirrors one half of the feed-forward, and its width 25 is odd"),
    ],
)
def test_what_look_linear_may_not_be_combined_with(choices, reason):
    assert SCHEMES["looklinear"].conflict(replace(CONFIG, **choices)) == reason
    assert SCHEMES["looklinear"].conflict(CONFIG) is None
    assert SCHEMES["xavier"].conflict(replace(CONFIG, **choices)) is None


@pytest.mark.slow
@each("scheme", SCHEMES)
@each(
    "config",
    [
        CONFIG,
        replace(CONFIG, decoder_layers=0, position_encoding="learned"),
        replace(CONFIG, embedding="untied"),
    ],
    ids=["seq2seq", "encoder", "untied"],
)
def test_everything_that_is_drawn_is_drawn_anew(config, scheme):
    """The start is the same whatever stood in the weights before."""
    models = [perturbed(config, seed=s, dtype=torch.float32) for s in (1, 2)]
    for model in models:
        initialise_(model, scheme, 5)
        for module in model.modules():
            if isinstance(module, Sublayer):
                assert not any(p.any() for n, p in module.f.named_parameters() if n.endswith("bias"))
    placed = (".place.", "_norm.", ".end.", "segments", "token_bias")
    first, second = (
        {n: p for n, p in m.named_parameters() if not any(w in n for w in placed)} for m in models
    )
    assert all(torch.equal(p, second[n]) for n, p in first.items())
    assert first["embedding.weight"].shape == (VOCAB, CONFIG.dim)


def test_packed_projections_count_as_matrices_of_their_own():
    """Xavier's deviation for 64 inputs and 3 x 64 outputs would be 0.088."""
    packed = build(replace(CONFIG, dim=64, scheme="xavier")).encoder.sublayers[0].f
    shapes = {name: tuple(w.shape) for name, w in packed.matrices().items()}
    assert shapes == dict.fromkeys(("query", "key", "value", "output"), (64, 64))
    assert packed.matrices()["value"].data_ptr() == packed.qkv.weight[128:].data_ptr()
    assert packed.qkv.weight.std().item() == pytest.approx((2 / (64 + 64)) ** 0.5, rel=0.06)

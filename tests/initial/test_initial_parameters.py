"""Embeddings, positions, heads, norms and the placements' own parameters before training."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from cases import each
from initial.measured import PLACEMENTS, VOCAB, all_of, assert_drawn, model_of, sized, started, sublayers
from normlab.nn import (
    HEAD_GAINS,
    Embedding,
    Norm,
    Placement,
    PositionEncoding,
    QueryKeyNorm,
    Site,
    Sublayer,
    sites,
)
from normlab.nn.init import SCHEMES, initialise_
from oracles import adapter, initial, norms
from oracles.adapter import Weights
from oracles.comparing import arrays_of, ours_alone

every_placement = pytest.mark.parametrize("placement", PLACEMENTS)
SMALL = [(3, 2), (2, 0), (0, 2)]


# ------------------------------------------------------------------------------ embeddings and positions


@each("placement", PLACEMENTS)
def test_a_model_of_a_placement(placement):
    """Its embeddings, and the parameters that the initialisation leaves alone: one a sublayer or a layer."""
    place = adapter.PLACEMENTS[placement]
    std = initial.embedding_std("plain", 64)
    for layers in SMALL:
        model = model_of(sized(placement, *layers))
        arrays = started(model)
        assert_drawn([arrays["embedding.weight"]], initial.embedding_gain(placement, *layers) * std)
        assert_drawn([arrays["embedding.output"]], initial.classifier_gain(placement) * std)
        found = [(m, n) for m in model.modules() if isinstance(m, Sublayer) for n in place.keys]
        for sublayer, name in found:
            values = sublayer.place.get_parameter(name).detach().numpy()
            assert all_of(values, expected_start(placement, place.keys[name], sublayer.site))
        own = [name for name in arrays if ".place." in name and "norm" not in name]
        assert len(own) == (sum(layers) * len(place.keys) if place.by_layer else len(found))
    tied = started(model_of(sized(placement, 3, 2, embedding="plain")))["embedding.weight"]
    assert_drawn([tied], initial.embedding_gain(placement, 3, 2) * std)


@each("scheme", [name for name in ours_alone(SCHEMES) if SCHEMES[name].of_tables])
def test_a_scheme_that_fills_tables(scheme):
    """Tokens, an output matrix of its own and positions are drawn as the scheme's source says."""
    arrays = started(model_of(sized("pre", 0, 2, position_encoding="learned", max_positions=300)), scheme)
    tables = {"embedding": "embedding.weight", "unembedding": "embedding.output"}
    for matrix, name in {**tables, "positions": "position_encoding.weight"}.items():
        assert_drawn([arrays[name]], initial.scheme_std(scheme, matrix, VOCAB, 64), what=f"{scheme} {matrix}")


def test_fixnorm_is_uniform():
    weight = started(model_of(sized("pre", 1, 1, embedding="fixnorm")))["embedding.weight"]
    assert weight.shape == (VOCAB, 64)
    assert_drawn([weight], initial.embedding_std("fixnorm", 64))
    assert 0.0099 < np.abs(weight).max() <= 0.01


def test_every_embedding_is_tested_here():
    assert set(ours_alone(Embedding.registry)) == {"plain", "untied", "fixnorm"}


def test_positions():
    """Learned ones are as large as the embeddings before the factor of the input."""
    config = sized("post", 1, 1, position_encoding="learned", max_positions=300)
    weight = started(model_of(config))["position_encoding.weight"]
    assert weight.shape == (300, 64)
    assert_drawn([weight], initial.embedding_std("plain", 64))
    for name in set(ours_alone(PositionEncoding.registry)) - {"learned"}:
        model = model_of(sized("post", 1, 1, position_encoding=name))
        assert not [p for p in started(model) if p.startswith("position_encoding")]


def test_heads_of_an_encoder_alone():
    config = sized("post", 1, 0)
    model = model_of(config)
    for scheme in ("xavier", "smallinit"):
        arrays = started(model, scheme)
        for name in ("transform", "pooler", "next_sentence"):
            weight = arrays[f"{name}.weight"]
            assert_drawn([weight], initial.scheme_std("xavier", "ffn_in", *weight.shape))
            assert not arrays[f"{name}.bias"].any()
        assert not arrays["token_bias"].any()


# ------------------------------------------------------------------------------------------------ norms


@each("dim", [64, 7])
@each("name", ours_alone(Norm.registry))
def test_norms(name, dim):
    module, oracle = Norm.registry[name](dim), adapter.NORMS[name]
    found = adapter.norm_bundle(Weights(arrays_of(module)), oracle)
    expected = norms.STARTS[oracle](dim)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].shape == value.shape
        assert all_of(found[key], float(value.flat[0]))


@each("name", ours_alone(Norm.registry))
@each("placement", ["sandwich", "periln", "mixln", "residual", "normformer"])
def test_norms_in_a_model(placement, name):
    """The initialisation leaves them at their start, and each is as wide as what it norms."""
    model = model_of(sized(placement, 2, 2, norm=name, qk_norm="normed", inner_norm="innernorm"))
    initialise_(model, "xavier", 1)
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, Norm)]
    inside = 10 - 2  # none in the two cross-attentions
    assert len(found) >= 10 + inside + 6 * 2 + 2, "one a sublayer, one in each, two an attention, two ends"
    for path, module in found:
        in_feed_forward = hasattr(model.get_submodule(path.rpartition(".")[0]), "outer")
        fresh = arrays_of(type(module)(192 if in_feed_forward else 64))
        found_here = arrays_of(module)
        assert found_here.keys() == fresh.keys()
        assert all(np.array_equal(found_here[key], fresh[key]) for key in fresh), path


# ---------------------------------------------------------------------------- the placements' parameters


def expected_start(placement: str, theirs: str, site: Site) -> float:
    """These are omega, alpha, s, a, lam, r and mu; an omega that a batch sets later is 1 until then."""
    if placement in ("admin", "admin_code"):
        return 1.0
    sublayers = site.layers * len(site.roles)
    return initial.parameter_start(theirs, layers=site.layers, sublayers=sublayers, layer=site.layer)


@each("placement", PLACEMENTS)
def test_parameters_of_placements(placement):
    depths = [(6, 6), (18, 18), (60, 12), (100, 100), (18, 19), (24, 25), (19, 0), (25, 0), (0, 18), (0, 24)]
    for layers, (stack, i) in product(depths, (("encoder", 0), ("decoder", 1))):
        roles, depth = adapter.roles_of(stack, sized(placement, *layers)), layers[i]
        first = Site(stack, roles[0], 0, 0, 64, *layers, roles=roles)
        for site in [*sites(first)][:: max(1, depth // 2)] if depth else []:
            found = arrays_of(Placement.registry[placement](site))
            keys = adapter.PLACEMENTS[placement].keys
            assert set(keys) == {name for name in found if "norm" not in name}
            for ours, theirs in keys.items():
                assert all_of(found[ours], expected_start(placement, theirs, site)), site


# --------------------------------------------------------------------------------- inside the branches


@pytest.mark.parametrize("length", [2, 64, 75])
def test_gain_of_cosines(length):
    config = sized("post", 1, 1, qk_norm="qknorm", qk_norm_len=length)
    found = [p["g_qk"] for _, role, _, p in sublayers(started(model_of(config)), config) if role != "ffn"]
    assert len(found) == 3
    for g in found:
        assert g.shape == (1,)
        assert all_of(g, initial.qk_gain_start(length))


def test_scales_of_ngpt():
    """Stored as the inverse root of the width, they are 1 where they are used."""
    config = sized("ngpt", 0, 1, qk_norm="ngptnormed", activation="ngptswiglu", logit_map="logitscale")
    arrays = started(model_of(config))
    attention, ffn = (p for _, _, _, p in sublayers(arrays, config))
    for scales, size in ((attention["s_qk"], 64), (ffn["s_uv"], 2 * 192), (8 * arrays["logit_map.s"], VOCAB)):
        assert scales.shape == (size,)
        np.testing.assert_allclose(scales, 1, rtol=1e-6)


def test_gains_of_heads():
    config = sized("normformer", 1, 1)
    found = [p["gamma_h"] for _, role, _, p in sublayers(started(model_of(config)), config) if role != "ffn"]
    assert [g.shape for g in found] == [(4,)] * 3
    assert all(all_of(g, 1.0) for g in found)


def test_every_choice_inside_a_branch_is_tested_here():
    normed = {name for name, oracle in adapter.QK_NORMS.items() if oracle in adapter.NORMED_SIDES}
    assert set(ours_alone(QueryKeyNorm.registry)) - normed == {"scaled", "qknorm", "ropenormed", "ngptnormed"}
    assert set(ours_alone(HEAD_GAINS)) == {"noheadgain", "headgain"}

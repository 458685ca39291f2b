"""The initial deviation of every matrix against the oracles' gain x scheme, at the papers' depths."""

from __future__ import annotations

import numpy as np
import pytest

from cases import each
from initial.measured import (
    PLACEMENTS,
    assert_drawn,
    expected_std,
    matrices,
    model_of,
    schemes_of,
    sized,
    started,
    sublayers,
)
from normlab.lab.config import ModelConfig
from normlab.nn import BIASES
from normlab.nn.init import SCHEMES
from oracles import adapter, initial
from oracles.adapter import Array
from oracles.comparing import ours_alone

every_placement = pytest.mark.parametrize("placement", PLACEMENTS)


def check_matrices(arrays: dict[str, Array], config: ModelConfig, scheme: str) -> None:
    found = matrices(arrays, config)
    stacks = [s for s, n in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)) if n]
    gate = {"ffn_gate"} if config.activation == "swiglu" else set()
    assert found.keys() == {
        (stack, role, matrix)
        for stack in stacks
        for role in adapter.roles_of(stack, config)
        for matrix in ({"ffn_in", "ffn_out"} | gate if role == "ffn" else initial.ATTENTION_MATRICES)
    }
    for (stack, role, matrix), weights in found.items():
        std = expected_std(config, scheme, stack, role, matrix, weights[0].shape)
        mirrored = scheme == "looklinear" and matrix in ("ffn_in", "ffn_out")
        what = f"{config.encoder_placement} {scheme} {stack} {role} {matrix}"
        assert_drawn(weights, std, copies=2 if mirrored else 1, what=what)
        largest = max(np.abs(w).max() for w in weights)
        bound = 3**0.5 * std
        if scheme in initial.UNIFORM:
            assert largest <= bound * (1 + 1e-6), what
        else:
            assert largest > bound or std == 0.0, f"{what} is drawn from a normal distribution"


@every_placement
def test_every_scheme_plain_or_gated_with_shared_keys(placement):
    """Xavier both ways; each other scheme one way or the other by turns, so that it meets both."""
    plain, gated = sized(placement, 6, 6), sized(placement, 6, 6, activation="swiglu", kv_heads=2)
    models = {config: model_of(config) for config in (plain, gated)}
    tried = []
    for i, scheme in enumerate(ours_alone(SCHEMES)):
        turn = i + PLACEMENTS.index(placement)
        for config in (plain, gated) if scheme == "xavier" else ((plain, gated)[turn % 2],):
            if scheme in schemes_of(config):
                check_matrices(started(models[config], scheme), config, scheme)
                tried.append(scheme)
    assert tried[:2] == ["xavier", "xavier"]


@every_placement
def test_every_shape(placement):
    """The gain knows both depths, Xavier neither. ``test_a_hundred_layers`` has the deep ones."""
    for layers in ((18, 6), (6, 0), (0, 12)):
        config = sized(placement, *layers)
        check_matrices(started(model_of(config)), config, "xavier")


def knows_depth(placement: str) -> bool:
    """Whether some matrix of a placement starts smaller in a deeper model."""
    return any(
        initial.gain(placement, stack, matrix, 6, 6) != initial.gain(placement, stack, matrix, 100, 100)
        for stack in ("encoder", "decoder")
        for matrix in initial.MATRICES
    )


@pytest.mark.slow
@each("placement", list(filter(knows_depth, PLACEMENTS)))
def test_a_hundred_layers(placement):
    config = sized(placement, 100, 100)
    check_matrices(started(model_of(config)), config, "xavier")


def test_all_schemes_are_tried():
    for placement in PLACEMENTS:
        schemes = schemes_of(sized(placement, 6, 6))
        only_xavier = placement in ("deepnorm", "tfixup", "subln")
        others = ["smallinit", "looklinear", "uniformattention", *initial.LANGUAGE_MODEL_STARTS]
        if placement in ("rezero", "rezero_post", "skipinit"):  # 0 times 0 never learns
            others = [name for name in others if name not in ("zerooutputs", "nanochatstart")]
        others = [] if only_xavier else others
        assert schemes == ["xavier", "xavier_uniform", *others]


def test_two_seeds_and_two_sites_differ_and_one_seed_repeats():
    config = sized("post", 2, 2)
    first, again, other = (started(model_of(config), seed=seed) for seed in (1, 1, 2))
    weights = [w for group in matrices(first, config).values() for w in group]
    assert len({w.tobytes() for w in weights}) == len(weights) == 2 * 6 + 2 * 10
    for name, array in first.items():
        assert np.array_equal(array, again[name])
        assert not array.any() or (array == array.flat[0]).all() or not np.array_equal(array, other[name])


# ------------------------------------------------------------------------------------------- LookLinear


@pytest.mark.parametrize("layers", [(6, 6), (0, 6)], ids=str)
def test_looklinear_makes_the_feed_forward_linear(layers):
    config = sized("post", *layers)
    model = model_of(config)
    found = matrices(started(model, "looklinear"), config)
    rng = np.random.default_rng(1)
    for stack in {stack for stack, _, _ in found}:
        for w_in, w_out in zip(found[stack, "ffn", "ffn_in"], found[stack, "ffn", "ffn_out"], strict=True):
            assert initial.looklinear_is_mirrored(w_in, w_out)
            x = rng.normal(size=(5, 64))
            y = np.maximum(x @ w_in.T.astype(float), 0) @ w_out.T
            half = len(w_in) // 2
            np.testing.assert_allclose(y, x @ w_in[:half].T @ w_out[:, :half].T, atol=1e-12)
            assert y.std() > 0.1
    for scheme in ("xavier", "smallinit", "xavier_uniform"):
        found = matrices(started(model, scheme), config)
        for (stack, role, matrix), weights in found.items():
            if matrix == "ffn_in":
                assert not initial.looklinear_is_mirrored(weights[0], found[stack, role, "ffn_out"][0])


# ----------------------------------------------------------------------------------------------- biases


@each("bias", ours_alone(BIASES))
@each("layers", [(2, 2), (2, 0), (0, 2)])
def test_biases_are_zero(layers, bias):
    config = sized("pre", *layers, bias=bias)
    count = 0
    for _, _, _, p in sublayers(started(model_of(config)), config):
        for key, value in p.items():
            if key.startswith(("b_", "pre_", "post_")):
                assert not value.any()
                count += 1
    per_matrix = {"bias": 1, "nobias": 0, "scalarbias": 2}[bias]
    roles = {(2, 2): 2 * 6 + 2 * 10, (2, 0): 2 * 6, (0, 2): 2 * 6}[layers]
    assert count == per_matrix * roles

"""Norms, branches, embeddings and positions against their oracles: value and every derivative."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cases import each, pairwise
from normlab.lab.config import ModelConfig
from normlab.nn import (
    BIASES,
    GATES,
    HEAD_GAINS,
    INNER_NORMS,
    Activation,
    Attention,
    Context,
    Embedding,
    FeedForward,
    Norm,
    Placement,
    PositionEncoding,
    QueryKeyNorm,
)
from normlab.nn.init import SCHEMES
from normlab.nn.position import sinusoids
from oracles import adapter, embeddings, names, norms
from oracles.adapter import Choices, Weights
from oracles.comparing import compare, ours_alone, scattered
from oracles.toys import CONFIG, normal

HEADS = [(6, 3, 0), (6, 2, 0), (6, 3, 1), (12, 6, 2), (10, 5, 5)]
"""Width, heads and heads of keys and values."""

every_norm = each("norm", ours_alone(Norm.registry))


@each(
    ("registry", "known"),
    [
        (Placement.registry, adapter.PLACEMENTS),
        (Norm.registry, adapter.NORMS),
        (Embedding.registry, adapter.EMBEDDINGS),
        (PositionEncoding.registry, adapter.POSITIONS),
        (Activation.registry, adapter.ACTIVATIONS),
        (QueryKeyNorm.registry, adapter.QK_NORMS),
        (BIASES, adapter.BIASES),
        (INNER_NORMS, adapter.INNER_NORMS),
        (HEAD_GAINS, adapter.HEAD_GAINS),
        (SCHEMES, names.SCHEMES),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_all_that_is_registered_has_an_oracle(registry, known):
    assert set(ours_alone(registry)) == set(known), (
        "write the oracle, and name it in tests/oracles/adapter.py"
    )


# ------------------------------------------------------------------------------------------------ norms


def check_norm(norm: str, x: Tensor) -> None:
    module, theirs = scattered(Norm.registry[norm](x.shape[-1])), adapter.NORMS[norm]

    def oracle(arrays: dict[str, np.ndarray]) -> np.ndarray:
        return norms.NORMS[theirs](arrays["x"], adapter.norm_bundle(Weights(arrays), theirs))

    compare(module, lambda: module(x), oracle, {"x": x})


@each(
    ("norm", "scale", "shape"),
    pairwise(ours_alone(Norm.registry), [1e-3, 1.0, 1e3], [(5, 6), (4, 3), (1, 7)]),
    ids=str,
)
def test_norms(norm, shape, scale):
    check_norm(norm, normal(*shape, scale=scale))


@every_norm
def test_norms_of_vectors_shorter_than_any_epsilon(norm):
    check_norm(norm, normal(2, 5, scale=1e-7))


@every_norm
def test_final_norms(norm):
    ours = {theirs: name for name, theirs in adapter.NORMS.items()}
    expected = ours[norms.FINAL[adapter.NORMS[norm]]]
    assert type(Norm.registry[norm].final(6)) is Norm.registry[expected]


# --------------------------------------------------------------------------------------------- branches


def check_attention(config: ModelConfig, role: str) -> None:
    choices = Choices(config, "post")
    source = "memory" if role == "cross_attention" else "self"
    module = scattered(Attention(config, source=source, causal=role == "causal_attention"))
    inputs = {"x": normal(5, config.dim)}
    if source == "memory":
        inputs["memory"] = normal(7, config.dim, seed=12)

    def ours() -> Tensor:
        memory = inputs.get("memory")
        context = Context(memory=None if memory is None else memory[None])
        return module(inputs["x"][None], context)[0]

    def oracle(arrays: dict[str, np.ndarray]) -> np.ndarray:
        return adapter.attention(Weights(arrays), choices, role)(arrays["x"], arrays.get("memory"))

    compare(module, ours, oracle, inputs)


ROLES = ("self_attention", "causal_attention", "cross_attention")
SIZES = [("sinusoidal", *heads) for heads in HEADS]
SIZES += [("rope", *heads) for heads in HEADS if heads[0] // heads[1] % 2 == 0]


@pytest.mark.parametrize(
    ("role", "size", "qk_norm", "bias", "inner_norm", "head_gain", "gate", "head_dim"),
    pairwise(
        ROLES,
        SIZES,
        *map(ours_alone, (QueryKeyNorm.registry, BIASES, INNER_NORMS, HEAD_GAINS, GATES)),
        [0, 4],
    ),
    ids=str,
)
def test_attention(role, size, qk_norm, bias, inner_norm, head_gain, gate, head_dim):
    names = ("position_encoding", "dim", "heads", "kv_heads")
    options = {"qk_norm": qk_norm, "bias": bias, "inner_norm": inner_norm, "head_gain": head_gain}
    options |= {"attention_gate": gate, "head_dim": head_dim, "rope_theta": 50.0}
    check_attention(replace(CONFIG, **dict(zip(names, size, strict=True)), **options), role)


@every_norm
@each("role", ROLES)
def test_attention_with_norms_inside(role, norm):
    check_attention(replace(CONFIG, norm=norm, qk_norm="normed", inner_norm="innernorm", kv_heads=1), role)


@each(
    ("activation", "bias", "inner_norm", "norm"),
    pairwise(*map(ours_alone, (Activation.registry, BIASES, INNER_NORMS)), ["layernorm", "scalenorm"]),
)
def test_feed_forward(activation, bias, inner_norm, norm):
    config = replace(CONFIG, activation=activation, bias=bias, inner_norm=inner_norm, norm=norm)
    choices = Choices(config, "post")
    module = scattered(FeedForward(config))
    x = normal(5, config.dim)

    def oracle(arrays: dict[str, np.ndarray]) -> np.ndarray:
        return adapter.feed_forward(Weights(arrays), choices)(arrays["x"], None)

    compare(module, lambda: module(x[None], Context())[0], oracle, {"x": x})


# ------------------------------------------------------------------------------ embeddings and positions


@pytest.mark.parametrize("name", ours_alone(Embedding.registry))
def test_embeddings(name):
    module = scattered(Embedding.registry[name](7, 6))
    ids, x = torch.tensor([3, 0, 3, 6, 1]), normal(5, 6)
    into, out = adapter.EMBEDDINGS[name]

    def oracle(arrays: dict[str, np.ndarray]) -> np.ndarray:
        w = Weights({f"embedding.{name}": array for name, array in arrays.items()})
        return np.concatenate([into(w, ids.numpy()), out(w, arrays["x"])], axis=1)

    compare(module, lambda: torch.cat([module(ids), module.logits(x)], 1), oracle, {"x": x})


@pytest.mark.parametrize(("length", "dim"), [(1, 2), (7, 6), (300, 64)])
def test_sinusoids_in_float32(length, dim):
    np.testing.assert_allclose(sinusoids(length, dim), embeddings.sinusoids(length, dim), atol=1e-7)


@pytest.mark.parametrize("name", ours_alone(PositionEncoding.registry))
def test_positions_are_added_to_the_embeddings(name):
    module = scattered(PositionEncoding.registry[name](replace(CONFIG, max_positions=300)))
    arrays = {f"position_encoding.{key}": p.detach().numpy() for key, p in module.named_parameters()}
    for length in (5, 300):
        x = normal(length, 6).detach()
        added = adapter.POSITIONS[name](Weights(arrays), length, 6)
        np.testing.assert_allclose(module(x[None])[0].detach(), x.numpy() + added, atol=1e-7)
        one = module(x[None], length - 1)[0].detach()
        np.testing.assert_allclose(one, x.numpy() + added[-1:], atol=1e-7)

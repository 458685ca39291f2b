"""Every placement, norm and embedding against its NumPy form: outputs, gradients, constants, profile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from contracts.variants import MIXED, UNIFORM, label, perturbed, tokens
from normlab.init import profile_
from normlab.nn import Embedding, Norm, Placement, Seq2Seq, Site
from normlab.nn.embedding import sinusoids
from normlab.spec.config import ModelConfig
from oracles import methods

# A variant without an oracle yet is held by the contracts alone until its oracle is written.
KNOWN = [
    c
    for c in UNIFORM + MIXED
    if {c.encoder_placement, c.decoder_placement} <= methods.PLACEMENTS.keys() and c.norm in methods.NORMS
]


def recipe(c: ModelConfig) -> methods.Recipe:
    return methods.Recipe(
        c.encoder_placement,
        c.decoder_placement,
        c.norm,
        c.embedding,
        c.heads,
        c.encoder_layers,
        c.decoder_layers,
    )


def oracle_model(config: ModelConfig) -> tuple[Seq2Seq, dict[str, np.ndarray]]:
    """A float64 model with exact positions, and its weights."""
    model = perturbed(config)
    model.positions = torch.from_numpy(methods.positions(8, config.dim))
    return model, {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def sentences() -> list[tuple[list[int], list[int]]]:
    return [tuple([i for i in row.tolist() if i] for row in pair) for pair in zip(*tokens(), strict=True)]


def test_the_oracles_cover_what_is_registered():
    assert Placement.registry.keys() == methods.PLACEMENTS.keys()
    assert Norm.registry.keys() == methods.NORMS.keys()
    assert Embedding.registry.keys() == {"plain", "fixnorm"}


@pytest.mark.parametrize("config", KNOWN, ids=label)
@pytest.mark.parametrize("grad", [True, False], ids=["trained", "searched"])
def test_logits_equal_the_oracle(config, grad):
    model, arrays = oracle_model(config)
    with torch.set_grad_enabled(grad):
        ours = model(*tokens()).detach().numpy()
    for row, (source, target) in enumerate(sentences()):
        expected = methods.logits(methods.Weights(arrays), recipe(config), source, target)
        np.testing.assert_allclose(ours[row, : len(target)], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", [c for c in KNOWN if c.embedding == "fixnorm" or c in MIXED], ids=label)
def test_gradients_equal_central_differences_of_the_oracle(config):
    """Every parameter, along one random direction each."""
    model, arrays = oracle_model(config)
    source, target = sentences()[2]
    rng = np.random.default_rng(3)
    cotangent = rng.normal(size=(len(target), 13))
    out = model(torch.tensor([source]), torch.tensor([target]))[0]
    (out * torch.from_numpy(cotangent)).sum().backward()
    for name, parameter in model.named_parameters():
        direction = rng.normal(size=arrays[name].shape)

        def along(step: float, name: str = name, direction: np.ndarray = direction) -> float:
            moved = methods.Weights({**arrays, name: arrays[name] + step * direction})
            return float((methods.logits(moved, recipe(config), source, target) * cotangent).sum())

        ours = float((parameter.grad.numpy() * direction).sum())
        assert ours == pytest.approx(methods.central_difference(along), rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize(("n", "m"), [(6, 6), (12, 3), (18, 0), (0, 24)])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_deepnorm_constants(stack, n, m):
    place = Placement.registry["deepnorm"]
    site = Site(stack, "ffn", 0, 0, 8, n, m, Norm.registry["layernorm"])
    assert place.constants(site) == pytest.approx(methods.deepnorm_constants(stack, n, m), rel=1e-12)
    beta = methods.deepnorm_constants(stack, n, m)[1]
    gains = {
        name: place(site).gain(name) for name in ("query", "key", "value", "output", "ffn_in", "ffn_out")
    }
    assert gains == pytest.approx(dict.fromkeys(gains, beta) | {"query": 1.0, "key": 1.0})


@pytest.mark.parametrize("config", [c for c in UNIFORM if c.encoder_placement == "admin"], ids=label)
def test_admin_profile_equals_the_oracle(config):
    model, arrays = oracle_model(config)
    for name, parameter in model.named_parameters():
        if name.endswith("omega"):
            torch.nn.init.ones_(parameter)
            arrays[name][:] = 1.0
    given = profile_(model, lambda: model(*tokens()))
    expected = methods.admin_profile(methods.Weights(arrays), recipe(config), sentences())
    assert len(given) == 10
    for stack, omegas in expected.items():
        for i, omega in enumerate(omegas):
            found = dict(model.named_parameters())[f"{stack}.sublayers.{i}.place.omega"].detach()
            np.testing.assert_allclose(found, np.full(config.dim, omega), rtol=1e-6)
            assert given[f"{stack}.sublayers.{i}"] == pytest.approx(omega**2, rel=1e-6)


@pytest.mark.parametrize(("length", "dim"), [(1, 2), (7, 6), (300, 64)])
def test_positions(length, dim):
    np.testing.assert_allclose(sinusoids(length, dim), methods.positions(length, dim), atol=1e-7)

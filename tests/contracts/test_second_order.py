"""The fast path against the plain one, and the plain one's second derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from cases import each
from contracts.variants import (
    PARTS,
    assert_close,
    backward,
    grads,
    inputs,
    label,
    logits_of,
    loss_of,
    perturbed,
)
from normlab.nn import reference
from normlab.nn.kernels import ops

every_part = each("config", PARTS, ids=label)


@pytest.mark.slow
@each("config", PARTS, ids=label)
def test_the_fast_path_equals_the_reference(config, monkeypatch):
    """Values and gradients, trained and searched, by the fused kernel and by that for short sentences."""
    model = perturbed(config).train()
    ids = inputs(model)
    with reference():
        loss, plain, searched = backward(model), grads(model), logits_of(model, *ids)
    for scores in (0, ops._PLAIN_ATTENTION_SCORES):
        monkeypatch.setattr(ops, "_PLAIN_ATTENTION_SCORES", scores)
        assert_close(backward(model), loss)
        assert_close(grads(model), plain)
        with torch.no_grad():
            assert_close(logits_of(model, *ids), searched)


WITH_HESSIAN = [c for c in PARTS if "gpas" not in (c.encoder_placement, c.decoder_placement)]
"""GPAS stops a gradient, so that what is followed is no function's gradient, and has no Hessian."""


@pytest.mark.slow
@each("config", WITH_HESSIAN, ids=label)
def test_the_reference_is_twice_differentiable(config):
    """Its Hessian times a direction against central differences of its gradients."""
    model = perturbed(config).train()
    weights = list(model.parameters())
    generator = torch.Generator().manual_seed(3)
    direction = [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in weights]
    torch._foreach_div_(direction, flat(direction).norm())
    with reference():
        first = torch.autograd.grad(loss_of(model), weights, create_graph=True)
        slope = sum((g * v).sum() for g, v in zip(first, direction, strict=True))
        product = flat(torch.autograd.grad(slope, weights))
        step = 1e-6
        sides = [flat(gradients_at(model, weights, direction, side * step)) for side in (1, -1)]
    difference = (sides[0] - sides[1]) / (2 * step)
    assert product.norm() > 1e-3 * flat(first).norm()
    assert (product - difference).norm() < 1e-6 * product.norm()


@pytest.mark.slow
@every_part
def test_the_reference_maps_over_weights(config):
    """``vmap`` over two models' weights gives the logits of each."""
    models = [perturbed(config, seed=seed) for seed in (1, 2)]
    ids = inputs(models[0])

    def logits(*weights: dict[str, Tensor]) -> Tensor:
        found = functional_call(models[0], weights, ids)
        return found[0] if isinstance(found, tuple) else found

    with reference():
        found = vmap(logits)(*stack_module_state(models))
    assert_close(found, torch.stack([logits_of(model, *ids) for model in models]))


def gradients_at(model, weights: list[Tensor], direction: list[Tensor], far: float) -> list[Tensor]:
    """The gradients with the weights moved so far along the direction."""
    with torch.no_grad():
        torch._foreach_add_(weights, direction, alpha=far)
        moved = torch.enable_grad()(lambda: torch.autograd.grad(loss_of(model), weights))()
        torch._foreach_sub_(weights, direction, alpha=far)
    return list(moved)


def flat(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([p.flatten() for p in parts])

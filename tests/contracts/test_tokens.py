"""Rows of padding alone add nothing, and every source token matters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cases import each
from contracts.variants import (
    SEQ2SEQ,
    TOLERANCE,
    VARIANTS,
    assert_close,
    backward,
    grads,
    inputs,
    label,
    logits_of,
    perturbed,
)
from normlab.nn.norm import Derf, DyT

every_variant = each("config", VARIANTS, ids=label)


@pytest.mark.slow
@every_variant
def test_a_row_of_padding_alone_adds_nothing_to_loss_and_gradients(config):
    model = perturbed(config)
    ids = inputs(model)
    loss, expected = backward(model, *ids), grads(model)
    wider = [torch.cat((side, torch.zeros_like(side[:1]))) for side in ids]
    assert_close(backward(model, *wider), loss)
    found = grads(model)
    assert_close(found, expected)
    assert all(g.isfinite().all() for g in found.values())


@pytest.mark.slow
@each("config", SEQ2SEQ, ids=label)
def test_every_source_token_matters_to_every_target_position(config):
    model = perturbed(config)
    source, target = inputs(model)
    unsaturated_(model, source, target)
    for s in range(source.shape[1]):
        changed = source[:1].clone()
        changed[0, s] = 4 + (source[0, s] - 3) % 8
        there = moved(logits_of(model, changed, target[:1]), logits_of(model, source[:1], target[:1]))
        assert there.all()


@torch.no_grad()
def unsaturated_(model: nn.Module, *ids: Tensor) -> None:
    """Keep the arguments of tanh and erf in norms, which are exactly 1 or -1 for large ones, at 2 at most."""

    def limit(norm: nn.Module, args: tuple[Tensor]) -> None:
        norm.alpha.mul_(2 / (norm.alpha * args[0]).abs().max().clamp(min=2))

    handles = [m.register_forward_pre_hook(limit) for m in model.modules() if isinstance(m, (DyT, Derf))]
    model(*ids)
    for handle in handles:
        handle.remove()


def moved(after: Tensor, before: Tensor) -> Tensor:
    """The positions `[B, T]` whose logits differ by more than rounding."""
    return (after - before).abs().amax(-1) > TOLERANCE * before.abs().max()

"""Positions depend on earlier tokens alone where they are causal, and never on padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from contracts.variants import (
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
from normlab.nn import PAD, Encoder

every_variant = pytest.mark.parametrize("config", VARIANTS, ids=label)
PATHS = {"trained": True, "searched": False}
"""Whether gradients are kept, which decides how attention is computed."""


@every_variant
def test_a_future_token_changes_nothing_in_the_past(config):
    """Only an encoder attends to later tokens, and there every position does."""
    model = perturbed(config)
    ids = inputs(model)
    changed = ids[-1].clone()
    changed[0, 3] = 4 + (changed[0, 3] - 3) % 8
    reached = torch.zeros(changed.shape, dtype=torch.bool)
    reached[0, 0 if isinstance(model, Encoder) else 3 :] = True
    for path, grad in PATHS.items():
        with torch.set_grad_enabled(grad):
            before, after = (logits_of(model, *ids[:-1], t).detach() for t in (ids[-1], changed))
        assert torch.equal(moved(after, before), reached), path


@every_variant
def test_padding_and_company_change_nothing(config):
    """More padding, and a batch of one instead of three, give the same logits where there is a token."""
    model = perturbed(config)
    ids = inputs(model)
    for grad in PATHS.values():
        with torch.set_grad_enabled(grad):
            together = logits_of(model, *(F.pad(side, (0, 3)) for side in ids)).detach()
            for row in range(len(ids[-1])):
                alone = [side[row][side[row] != PAD][None] for side in ids]
                found = logits_of(model, *alone).detach()[0]
                assert_close(together[row, : len(found)], found)


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


@every_variant
def test_every_source_token_matters_to_every_target_position(config):
    model = perturbed(config)
    *sources, target = inputs(model)
    for source in sources:
        for s in range(source.shape[1]):
            changed = source[:1].clone()
            changed[0, s] = 4 + (source[0, s] - 3) % 8
            assert moved(
                logits_of(model, changed, target[:1]), logits_of(model, source[:1], target[:1])
            ).all()


def moved(after: Tensor, before: Tensor) -> Tensor:
    """The positions `[B, T]` whose logits differ by more than rounding."""
    return (after - before).abs().amax(-1) > TOLERANCE * before.abs().max()

"""What a position may depend on, and that padding is nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from contracts.variants import SIZE, VARIANTS, label, perturbed, tokens
from normlab.nn import PAD

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
every_variant = pytest.mark.parametrize("config", VARIANTS, ids=label)


@every_variant
@pytest.mark.parametrize("grad", [True, False], ids=["trained", "searched"])
def test_a_future_token_changes_nothing_in_the_past(config, grad):
    model, (source, target) = perturbed(config), tokens()
    changed = target.clone()
    changed[0, 3] = 4 + (target[0, 3] - 3) % 8
    with torch.set_grad_enabled(grad):
        before, after = (model(source, t).detach() for t in (target, changed))
    torch.testing.assert_close(after[0, :3], before[0, :3], **CLOSE)
    assert not torch.allclose(after[0, 3], before[0, 3])
    assert not torch.allclose(after[0, 4], before[0, 4])
    torch.testing.assert_close(after[1:], before[1:], **CLOSE)


@every_variant
@pytest.mark.parametrize("grad", [True, False], ids=["trained", "searched"])
def test_padding_and_company_change_nothing(config, grad):
    """More padding, and a batch of one instead of three, give the same logits where there is a token."""
    model, (source, target) = perturbed(config), tokens()
    with torch.set_grad_enabled(grad):
        together = model(F.pad(source, (0, 3)), F.pad(target, (0, 2))).detach()
        for row in range(len(source)):
            s, t = (side[row][side[row] != PAD] for side in (source, target))
            alone = model(s[None], t[None]).detach()[0]
            torch.testing.assert_close(together[row, : len(t)], alone, **CLOSE)


@every_variant
def test_a_row_of_padding_alone_adds_nothing_to_loss_and_gradients(config):
    model, pair = perturbed(config), tokens()
    found = []
    for source, target in (pair, [torch.cat((side, torch.zeros_like(side[:1]))) for side in pair]):
        model.zero_grad()
        loss = F.cross_entropy(
            model(source, target).flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum"
        )
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    assert all(t.isfinite().all() for t in found[1])


def test_every_source_token_matters_to_every_target_position():
    model, (source, target) = perturbed(SIZE), tokens()
    for s in range(source.shape[1]):
        changed = source[:1].clone()
        changed[0, s] = 4 + (source[0, s] - 3) % 8
        moved = (model(changed, target[:1]) - model(source[:1], target[:1])).abs().amax(-1)
        assert (moved > 1e-9).all()


def test_positions_grow_as_they_are_needed():
    model = perturbed(SIZE)
    ids = torch.full((1, 700), 5)
    at_once = model.embed(ids)
    torch.testing.assert_close(model.embed(ids[:, :3], 699), at_once[:, 699:].expand(1, 3, -1))
    torch.testing.assert_close(perturbed(SIZE).embed(ids[:, :3], 699), at_once[:, 699:].expand(1, 3, -1))
    assert "positions" not in model.state_dict()

"""Embeddings: what they give as input and output, and how they start."""

from __future__ import annotations

import pytest
import torch

from normlab.nn import Embedding


def started(name: str, seed: int = 1) -> Embedding:
    embedding = Embedding.registry[name](300, 64)
    embedding.init_(torch.Generator().manual_seed(seed))
    return embedding


@pytest.mark.parametrize("name", Embedding.registry)
def test_input_is_scaled_and_output_is_not(name):
    embedding = started(name)
    rows = embedding.vectors()
    ids = torch.tensor([[5, 9], [0, 5]])
    torch.testing.assert_close(embedding(ids), 8 * rows[ids])
    columns = getattr(embedding, "output", rows)
    torch.testing.assert_close(embedding.logits(rows[:3]), rows[:3] @ columns.T)
    # Every start gives vectors of length 1, at least on average.
    assert rows.square().sum(-1).mean().item() == pytest.approx(1.0, rel=0.05)
    assert torch.equal(started(name).weight, embedding.weight)
    assert not torch.equal(started(name, seed=2).weight, embedding.weight)


def test_plain_start():
    weight = started("plain").weight
    assert weight.std().item() == pytest.approx(1 / 8, rel=0.03)


def test_fixnorm_start_and_length():
    embedding = started("fixnorm")
    assert embedding.weight.abs().max().item() <= 0.01
    assert embedding.weight.std().item() == pytest.approx(0.01 / 3**0.5, rel=0.03)
    torch.testing.assert_close(embedding.vectors().norm(dim=-1), torch.ones(300))


def test_an_untied_output_has_its_own_start_and_its_own_factor():
    embedding = Embedding.registry["untied"](300, 64)
    embedding.init_(torch.Generator().manual_seed(1), gain=0.5, classifier_gain=2.0)
    assert embedding.weight.std().item() == pytest.approx(0.5 / 8, rel=0.03)
    assert embedding.output.std().item() == pytest.approx(2 / 8, rel=0.03)
    assert not torch.allclose(4 * embedding.weight, embedding.output)

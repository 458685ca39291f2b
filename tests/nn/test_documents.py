"""Documents that are packed into one row are computed as if each stood alone."""

from __future__ import annotations

import pytest
import torch

from normlab.base.model_config import ModelConfig
from normlab.lab.config import Config
from normlab.lab.recipes.grammar import resolve
from normlab.lab.tasks.task import build_model
from normlab.nn import Decoder
from normlab.nn.kernels import ops

IDS = torch.tensor([[3, 5, 6, 7, 3, 8, 9, 3, 3, 4, 5, 6], [9, 8, 3, 5, 4, 6, 5, 4, 7, 9, 0, 0]])
DOCUMENTS = (IDS == 3).cumsum(1)


def decoder(recipe, **more):
    sizes = {"dim": 16, "ffn_dim": 32, "heads": 2, "encoder_layers": 0, "decoder_layers": 2, "dropout": 0.0}
    config = resolve(recipe, Config(task="language_model", model=ModelConfig(**sizes, **more)))
    return build_model(Decoder, config.model, 10, 0).eval()


@pytest.mark.parametrize("recipe", ["pre", "pre+learned", "post+rope"])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_each_document_is_computed_alone(recipe, window, fused, monkeypatch):
    if fused:
        monkeypatch.setattr(ops, "_FEW_QUERIES", 0)  # so few would take the path of a search
    model = decoder(recipe, sliding_window=window)
    packed = model(IDS, DOCUMENTS)
    for row, documents, logits in zip(IDS, DOCUMENTS, packed, strict=True):
        for number in documents.unique():
            own = documents == number
            assert torch.allclose(logits[own], model(row[own][None])[0], atol=1e-5)
    assert not torch.allclose(packed, model(IDS), atol=1e-3)


@torch.no_grad()
def test_one_document_is_a_row_as_before():
    model = decoder("pre+rope")
    assert torch.allclose(model(IDS, torch.zeros_like(IDS)), model(IDS), atol=1e-6)


def test_gradients_are_finite_with_the_mask():
    model = decoder("pre").train()
    loss = model(IDS, DOCUMENTS).logsumexp(-1).sum()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name

"""Schemes: what they fill, from which generator."""

from __future__ import annotations

import pytest
import torch

from contracts.variants import SIZE, VOCAB, perturbed
from normlab.init import SCHEMES, initialise_
from normlab.nn import Sublayer


@pytest.mark.parametrize("scheme", SCHEMES)
def test_everything_that_is_drawn_is_drawn_anew(scheme):
    """Initialising twice gives the first start again, whatever stood in the weights."""
    models = [perturbed(SIZE, seed=s, dtype=torch.float32) for s in (1, 2)]
    for model in models:
        initialise_(model, scheme, 5)
    for model in models:
        for module in model.modules():
            if isinstance(module, Sublayer):
                again = module.f
                assert not any(p.any() for n, p in again.named_parameters() if n.endswith("bias"))
    first, second = (
        {n: p for n, p in m.named_parameters() if ".f." in n or n == "embedding.weight"} for m in models
    )
    assert all(torch.equal(p, second[n]) for n, p in first.items())
    assert first["embedding.weight"].shape == (VOCAB, SIZE.dim)


def test_packed_projections_count_as_matrices_of_their_own():
    weight = torch.empty(64, 64)
    SCHEMES["xavier"](weight, "query", 1.0, torch.Generator().manual_seed(1))
    packed = perturbed(SIZE).encoder.sublayers[0].f
    shapes = {name: tuple(w.shape) for name, w in packed.matrices().items()}
    assert shapes == dict.fromkeys(("query", "key", "value", "output"), (16, 16))
    assert packed.matrices()["value"].data_ptr() == packed.qkv.weight[32:].data_ptr()
    assert weight.std().item() == pytest.approx(1 / 8, rel=0.06)

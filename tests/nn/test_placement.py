"""The registry of placements, and what a placement refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from normlab.nn import Attention, Norm, Placement, PostNorm, Site
from normlab.spec.config import ModelConfig

SITE = Site("encoder", "ffn", 0, 0, 8, 2, 2, Norm.registry["layernorm"])


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=r"^the placement name 'post' is taken by PostNorm$"):

        class Again(PostNorm, name="post"):
            pass

    assert Placement.registry["post"] is PostNorm


@pytest.mark.parametrize("name", Placement.registry)
def test_what_a_placement_states(name):
    place = Placement.registry[name]
    assert place.name == name
    assert "arXiv" in place.__doc__
    assert place.conflict(norm="layernorm", scheme="xavier") is None
    built = []
    site = replace(SITE, norm=lambda dim: built.append(dim) or torch.nn.Identity())
    place(site), place.begin(site), place.end(site)
    assert place.normed == bool(built)
    if not place.profiled:
        with pytest.raises(NotImplementedError, match=f"^placement '{name}' has no data-dependent start$"):
            place(SITE).start_(torch.ones(()))


def test_scalars_have_a_shape():
    """Sharding refuses parameters without dimensions."""
    for place in Placement.registry.values():
        assert all(p.dim() == 1 for p in place(SITE).parameters())


def test_heads_must_divide_the_width():
    with pytest.raises(
        ValueError, match=r"^5 heads do not divide the width 16; heads that do: \[1, 2, 4, 8, 16\]$"
    ):
        Attention(ModelConfig(dim=16, heads=5), source="self")

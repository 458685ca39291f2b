"""Sites: what they count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contracts.variants import CONFIG, build
from normlab.nn import (
    DECODER_LAYER,
    LANGUAGE_LAYER,
    LayerNorm,
    Norm,
    RMSNorm,
    ScaleNorm,
    Site,
    sites,
    stack_of,
)


def test_sites_of_an_encoder_decoder():
    model = build(replace(CONFIG, encoder_layers=3, decoder_layers=1))
    encoder, decoder = ([s.site for s in stack] for stack in (model.encoder, model.decoder))
    assert [s.index for s in encoder] == list(range(6))
    assert [s.layer for s in encoder] == [0, 0, 1, 1, 2, 2]
    assert [s.ends_layer for s in encoder] == [False, True] * 3
    assert [s.ends_layer for s in decoder] == [False, False, True]
    assert {(s.layers, s.sublayers, s.branches, s.alone) for s in encoder} == {(3, 6, 9, False)}
    assert {(s.layers, s.sublayers, s.branches, s.alone) for s in decoder} == {(1, 3, 9, False)}


@pytest.mark.parametrize(("stack", "roles"), [("encoder", 2), ("decoder", 2)])
def test_a_stack_alone_counts_itself(stack, roles):
    other = {"encoder": "decoder", "decoder": "encoder"}[stack]
    model = build(replace(CONFIG, **{f"{stack}_layers": 4, f"{other}_layers": 0}))
    found = {(s.site.layers, s.site.sublayers, s.site.branches, s.site.alone) for s in getattr(model, stack)}
    assert found == {(4, 4 * roles, 4 * roles, True)}


def test_sites_of_a_network_of_ones_own():
    found = list(stack_of(("mix", "gate", "ffn"), 2, 8, norm=RMSNorm))
    assert [(s.index, s.layer, s.role, s.ends_layer) for s in found] == [
        (0, 0, "mix", False),
        (1, 0, "gate", False),
        (2, 0, "ffn", True),
        (3, 1, "mix", False),
        (4, 1, "gate", False),
        (5, 1, "ffn", True),
    ]
    assert {(s.dim, s.layers, s.sublayers, s.branches, s.alone, s.norm) for s in found} == {
        (8, 2, 6, 6, True, RMSNorm)
    }
    assert found[0].shared is found[2].shared
    assert found[0].shared is not found[3].shared


def test_a_decoder_alone_may_have_any_roles():
    first = Site("decoder", LANGUAGE_LAYER[0], 0, 0, 8, 0, 3, roles=LANGUAGE_LAYER)
    assert [s.role for s in sites(first)] == list(LANGUAGE_LAYER) * 3
    assert len(list(sites(replace(first, encoder_layers=2, roles=DECODER_LAYER)))) == 9


def test_the_norm_where_a_stream_ends():
    site = next(stack_of(("ffn",), 1, 8))
    assert isinstance(site.final_norm(), LayerNorm)
    fixed = replace(site, norm=Norm.registry["fixedscalenorm"])
    assert isinstance(fixed.final_norm(), ScaleNorm)
    assert replace(site, norm=lambda dim: dim).final_norm() == 8, "any function of a width is a norm"

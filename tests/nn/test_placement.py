"""Placements: the registry, what each states of itself, what it refuses, and how some start."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cases import each
from contracts.variants import BY_PLACEMENT, CONFIG, label
from normlab.nn import LayerNorm, LayerScale, MixNorm, Placement, PostNorm, PreNorm, Site, stack_of

SITE = Site("encoder", "ffn", 0, 0, 8, 2, 2)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=r"'post' .*PostNorm"):

        class Again(PostNorm, name="post"):
            pass

    assert Placement.registry["post"] is PostNorm


@each("name", Placement.registry)
def test_what_a_placement_states(name):
    place = Placement.registry[name]
    assert place.name == name
    assert "arXiv" in place.__doc__
    built = []
    site = replace(SITE, norm=lambda dim: built.append(dim) or torch.nn.Identity())
    place(site), place.begin(site), place.end(site)
    assert place.normed == bool(built)
    assert set(built) <= {site.dim}


@each("name", Placement.registry)
def test_the_stream_ends_with_a_norm_where_the_placement_says_so(name):
    """With or without one, a placement with norms gives an output of ordinary size from a large stream."""
    place = Placement.registry[name]
    norms = [m for m in place.end(SITE).modules() if isinstance(m, LayerNorm)]
    if place.final_norm:
        assert len(norms) == 1
    x = 1e3 * torch.randn(1, 3, 8)
    end = place.end(SITE)
    stream = place(SITE).write(place.begin(SITE)(x), torch.randn(1, 3, 8))
    rms = end(stream).square().mean().sqrt()
    assert (rms < 3) == (place.normed or name == "ngpt"), "nGPT divides by lengths, without a site's norm"


@each("name", [name for name, place in Placement.registry.items() if place.final_norm])
def test_a_factor_on_a_branch_reaches_the_stream_where_the_placement_is_a_sum(name):
    """A norm on the branch would divide it out, and CompleteP's factor would do nothing."""
    torch.manual_seed(0)
    stream, y = (torch.randn(1, 3, 8) for _ in range(2))
    errors = []
    for site in stack_of(["self_attention", "ffn"], 8, 8):
        place = Placement.registry[name](site).requires_grad_(False)
        place.after_step()
        alone, whole, part = (place.write(stream, factor * y) for factor in (0.0, 1.0, 0.125))
        errors.append((part - alone - 0.125 * (whole - alone)).abs().max().item())
    assert (max(errors) < 1e-6) == Placement.registry[name].sums, errors


@each(
    ("placement", "choices", "reason"),
    [
        (
            "deepnorm",
            {"decoder_placement": "post"},
            "DeepNorm's alpha and beta are derived for an encoder and a decoder that both use it",
        ),
        (
            "deepnorm",
            {"scheme": "smallinit"},
            "DeepNorm's beta is a gain on Xavier initialisation; with smallinit it is not defined",
        ),
        (
            "subln",
            {"decoder_placement": "post"},
            "Sub-LN's gains are derived for an encoder and a decoder that both use it",
        ),
        (
            "subln",
            {"scheme": "smallinit"},
            "Sub-LN's gains are on Xavier initialisation; with smallinit they are not defined",
        ),
        (
            "fixup",
            {"decoder_placement": "post"},
            "FixUp counts the branches of an encoder and a decoder that both use it",
        ),
        ("fixup", {}, "FixUp initialises the classifier with 0, which a tied embedding does not allow"),
        (
            "tfixup",
            {"encoder_placement": "post", "decoder_placement": "tfixup"},
            "T-Fixup's factors are derived for an encoder and a decoder that both use it",
        ),
        (
            "tfixup",
            {"embedding": "fixnorm"},
            "T-Fixup scales the embeddings, and scaling has no effect on fixnorm",
        ),
        (
            "tfixup",
            {"scheme": "looklinear"},
            "T-Fixup's factors are on Xavier initialisation; with looklinear they are not defined",
        ),
    ],
)
def test_what_a_placement_may_not_be_combined_with(placement, choices, reason):
    both = {"encoder_placement": placement, "decoder_placement": placement}
    assert Placement.registry[placement].conflict(replace(CONFIG, **{**both, **choices})) == reason


@each("config", BY_PLACEMENT, ids=label)
def test_every_placement_is_defined_alone_and_as_a_stack_alone(config):
    place = Placement.registry[config.encoder_placement]
    for layers in ((2, 2), (2, 0), (0, 2)):
        sized = replace(config, encoder_layers=layers[0], decoder_layers=layers[1])
        assert place.conflict(sized) is None
        # The other stack's placement says nothing where there is no other stack.
        name = "encoder_placement" if not layers[0] else "decoder_placement"
        other = replace(sized, **{name: "post"})
        assert all(layers) or place.conflict(other) is None


@each(("layers", "early"), [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3), (100, 25)])
def test_mix_ln_is_post_ln_in_the_first_quarter(layers, early):
    kinds = [type(MixNorm(site).place) for site in stack_of(("ffn",), layers, 8)]
    assert kinds == [PostNorm] * early + [PreNorm] * (layers - early)


def test_layer_scale_starts_by_depth():
    for layers, start in {1: 0.1, 18: 0.1, 19: 1e-5, 24: 1e-5, 25: 1e-6}.items():
        for site in stack_of(("ffn",), layers, 8):
            assert LayerScale(site).lam.tolist() == pytest.approx([start] * 8)


def test_scalars_have_a_shape():
    """Sharding refuses parameters without dimensions."""
    for place in Placement.registry.values():
        assert all(p.dim() == 1 for p in place(SITE).parameters())

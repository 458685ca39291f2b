"""A configuration becomes the model that it names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cases import each
from contracts.variants import CHOICES, CONFIG, VOCAB
from normlab.lab.tasks.task import build_model
from normlab.nn import Decoder, Encoder, FixNormEmbedding, Norm, Placement, Seq2Seq, Stack
from normlab.nn.init import SCHEMES

REGISTRIES = {"encoder_placement": Placement.registry, "scheme": SCHEMES, **CHOICES}


def places(stack: Stack) -> list[str]:
    return [s.place.name for s in stack.sublayers]


def roles(stack: Stack) -> list[str]:
    return [s.site.role for s in stack.sublayers]


def test_encoder_and_decoder_are_chosen_apart():
    config = replace(
        CONFIG, encoder_layers=3, decoder_layers=1, encoder_placement="pre", decoder_placement="deepnorm"
    )
    model = build_model(
        Seq2Seq, replace(config, norm="scalenorm", embedding="fixnorm", dropout=0.25), VOCAB, 1
    )
    assert places(model.encoder) == ["pre"] * 6
    assert places(model.decoder) == ["deepnorm"] * 3
    assert roles(model.encoder) == ["self_attention", "ffn"] * 3
    assert roles(model.decoder) == ["causal_attention", "cross_attention", "ffn"]
    site = model.decoder.sublayers[2].site
    assert (site.stack, site.index, site.layer, site.encoder_layers, site.decoder_layers) == (
        "decoder",
        2,
        0,
        3,
        1,
    )
    assert [s.site.layer for s in model.encoder.sublayers] == [0, 0, 1, 1, 2, 2]
    assert isinstance(model.embedding, FixNormEmbedding)
    assert {type(m).__name__ for m in model.modules() if isinstance(m, Norm)} == {"ScaleNorm"}
    assert model.dropout.p == 0.25


def test_rates_reach_their_places():
    model = build_model(
        Seq2Seq, replace(CONFIG, dropout=0.1, attention_dropout=0.2, ffn_dropout=0.3), VOCAB, 1
    )
    attention, ffn = (s.f for s in model.encoder.sublayers[:2])
    assert (attention.p, attention.dropout.p) == (0.2, 0.1)
    assert (ffn.inner_dropout.p, ffn.dropout.p) == (0.3, 0.1)


@pytest.mark.slow
@each("axis", REGISTRIES)
def test_the_seed_decides_the_start_whatever_the_global_generator_did(axis):
    for name in REGISTRIES[axis]:
        models = []
        for global_seed in (1, 2):
            torch.manual_seed(global_seed)
            models.append(build_model(Seq2Seq, replace(CONFIG, **{axis: name}), VOCAB, 9))
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@each(
    ("axis", "kind", "wrong", "right"),
    [
        ("norm", "norm", "layernrom", "layernorm"),
        ("embedding", "embedding", "fixnrm", "fixnorm"),
        ("encoder_placement", "placement", "psot", "post"),
        ("decoder_placement", "placement", "per", "pre"),
        ("scheme", "scheme", "xaver", "xavier"),
        ("position_encoding", "position encoding", "learnt", "learned"),
        ("activation", "activation", "glu", "gelu"),
        ("qk_norm", "query-key norm", "qk_norm", "qknorm"),
        ("bias", "bias", "no_bias", "nobias"),
        ("inner_norm", "inner norm", "inner_norm", "innernorm"),
        ("head_gain", "head gain", "head_gain", "headgain"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(axis, kind, wrong, right):
    sentence = rf"^unknown {kind} '{wrong}', did you mean '{right}'\? \(allowed: .*{right}.*\)$"
    with pytest.raises(ValueError, match=sentence):
        build_model(Seq2Seq, replace(CONFIG, **{axis: wrong}), VOCAB, 1)


def test_parameters_are_as_many_as_the_sizes_say():
    d, f, v = 16, 24, VOCAB
    attention, ffn, norm = 4 * (d * d + d), 2 * d * f + d + f, 2 * d
    encoder, decoder = attention + ffn + 2 * norm, 2 * attention + ffn + 3 * norm
    model = build_model(Seq2Seq, CONFIG, VOCAB, 1)
    assert sum(p.numel() for p in model.parameters()) == v * d + 2 * encoder + 2 * decoder


@pytest.mark.parametrize(("kind", "layers"), [(Seq2Seq, (2, 1)), (Encoder, (2, 0)), (Decoder, (0, 2))])
def test_every_kind_of_model_is_built_from_its_seed(kind, layers):
    config = replace(CONFIG, encoder_layers=layers[0], decoder_layers=layers[1], position_encoding="learned")
    models = [build_model(kind, config, VOCAB, seed) for seed in (4, 4, 5)]
    assert type(models[0]) is kind
    weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert all(weights[0].isfinite())
    assert not any(m.bias.any() for m in models[0].modules() if isinstance(m, torch.nn.Linear))


def test_what_a_config_leaves_open_is_what_the_placement_says():
    model = build_model(Seq2Seq, replace(CONFIG, encoder_placement="normformer"), VOCAB, 1)
    inner = [type(s.f.inner_norm).__name__ for stack in (model.encoder, model.decoder) for s in stack]
    assert inner == ["Identity", "LayerNorm"] * 2 + ["Identity"] * 6
    gains = [type(s.f.head_gain).__name__ for s in (model.encoder.sublayers[0], model.decoder.sublayers[0])]
    assert gains == ["HeadGain", "NoHeadGain"]

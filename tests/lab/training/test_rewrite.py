"""A rewritten model computes the same as the one that was given, and is the plainer of the two."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from beams import beam_search
from cases import each
from contracts.outsiders import enrolled
from contracts.variants import ALONE, CONFIG, SEQ2SEQ, VOCAB, inputs, kind_of, label, perturbed
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.recipes.grammar import resolve
from normlab.lab.training.rewrite import rewrite
from normlab.nn import Norm, Placement, Seq2Seq

FLOAT64, FLOAT32 = 1e-12, 1e-5
"""The largest difference of logits relative to the largest logit."""
UNTIED = {"embedding": "untied", "position_encoding": "learned", "separate_source": True}
BECOMES = {
    "admin": ("post", UNTIED),
    "admin_code+rmsnorm": ("post", UNTIED),
    "admin_free+dyt": ("post", UNTIED),
    "admin+rope": ("post", {**UNTIED, "position_encoding": "rope"}),
    "admin+nobias+swiglu": ("post", UNTIED),
    "deepnorm": ("post", UNTIED),
    "deepnorm+fixnorm+fixedscalenorm": ("post", {**UNTIED, "norm": "scalenorm"}),
    "rezero_post": ("post", {}),
    "rezero": ("tfixup", {}),
    "skipinit": ("tfixup", {}),
    "fixup+untied": ("tfixup", {"bias": ""}),
    "layerscale": ("pre", {}),
    "prores": ("pre", {}),
    "lnscale+scalenorm": ("pre", {}),
    "subln": ("pre", {"inner_norm": "innernorm"}),
    "b2t_code": ("b2t", {}),
    "admin_rescaled": ("post", {}),
    "pre+fixnorm": ("pre", {"embedding": "plain"}),
    "pre+fixedscalenorm": ("pre", {"norm": "scalenorm"}),
    "pre+headgain+scalarbias": ("pre", {"head_gain": "", "bias": ""}),
    "post+looklinear": ("post", {}),
    "pre+rmsnorm1p+headnormed": ("pre", {"norm": "rmsnorm"}),
    "lnscale+rmsnorm_nogain+headgate+valueresidual": ("pre", {"norm": "rmsnorm"}),
    "admin+noembedscale+softcap+elementgate": ("post", UNTIED),
}
"""The placement of both stacks, and the other choices that change."""
KEPT = (
    *("keel", "residual", "sandwich", "periln", "olmo2", "mixln", "post+scalenorm", "normformer+noheadgain"),
    *("x0lambdas", "gpas", "hybridnorm", "siamese", "ngpt"),
)


def model_config(recipe, **sizes):
    return replace(resolve(recipe, Config(model=CONFIG), force=True).model, **sizes)


@torch.no_grad()
def logits(model, config):
    """The outputs of a model, all of them, as one vector."""
    outputs = model(*inputs(model))
    return torch.cat([one.flatten() for one in (outputs if isinstance(outputs, tuple) else (outputs,))])


def assert_equal_models(config, model):
    """Compare with a model that is built from the plain config alone, in float64 and in float32."""
    before = deepcopy(model.state_dict())
    rewritten = rewrite(model, config)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    for dtype, bound in ((torch.float64, FLOAT64), (torch.float32, FLOAT32)):
        built = kind_of(config)(rewritten.config, VOCAB).to(dtype).eval()
        built.load_state_dict(rewritten.model.state_dict())
        expected = logits(deepcopy(model).to(dtype), config)
        difference = (logits(built, config) - expected).abs().max()
        assert float(difference / expected.abs().max()) < bound
    return rewritten


@pytest.mark.slow
@each("recipe", BECOMES)
def test_a_method_becomes_a_plain_model(recipe):
    config = model_config(recipe)
    rewritten = assert_equal_models(config, perturbed(config))
    placement, choices = BECOMES[recipe]
    expected = replace(config, encoder_placement=placement, decoder_placement=placement, scheme="xavier")
    assert rewritten.config == replace(expected, **choices)
    assert rewritten.changed == (recipe != "post+looklinear")


@pytest.mark.slow
@each("config", [*SEQ2SEQ, *ALONE], ids=label)
def test_every_variant_stays_the_same_model(config):
    with enrolled():
        assert_equal_models(config, perturbed(config))


@pytest.mark.parametrize("recipe", ["admin", "deepnorm+fixnorm", "rezero"])
def test_a_plain_model_is_not_folded_again(recipe):
    config = model_config(recipe)
    rewritten = rewrite(perturbed(config), config)
    again = rewrite(rewritten.model, rewritten.config)
    assert not again.changed
    assert again.config == rewritten.config


@pytest.mark.slow
@each("recipe", KEPT)
def test_what_has_no_exact_rewrite_stays_with_the_reason(recipe):
    config = model_config(recipe)
    rewritten = rewrite(perturbed(config), config)
    assert not rewritten.changed
    assert len(rewritten.kept) == 1
    reasons = {
        part.no_fold for part in (*Placement.registry.values(), *Norm.registry.values()) if part.no_fold
    }
    assert rewritten.kept[0].partition(": ")[2] in reasons


def test_one_part_is_folded_where_another_stays():
    config = model_config("enc:sandwich/dec:layerscale+fixnorm")
    rewritten = rewrite(perturbed(config), config)
    changed = replace(config, decoder_placement="pre", embedding="plain")
    assert rewritten.config == changed
    assert [why.split()[0] for why in rewritten.kept] == ["sandwich"]


def test_a_factor_for_each_channel_needs_a_gain_for_each_channel():
    config = model_config("admin+scalenorm")
    rewritten = rewrite(perturbed(config), config)
    assert rewritten.config == config
    assert any("all channels" in why for why in rewritten.kept)


def test_nothing_is_divided_by_zero():
    config = model_config("admin")
    model = perturbed(config)
    nn.init.zeros_(model.decoder.sublayers[2].place.omega[3:4])
    rewritten = rewrite(model, config)
    assert (rewritten.config.encoder_placement, rewritten.config.decoder_placement) == ("post", "admin")
    assert any("is 0" in why for why in rewritten.kept)
    assert_equal_models(config, model)


def test_gains_of_heads_behind_an_inner_norm_stay():
    config = model_config("pre+innernorm+headgain")
    rewritten = assert_equal_models(config, perturbed(config))
    assert not rewritten.changed
    assert any("of heads" in why for why in rewritten.kept)


def test_stacks_whose_plain_forms_need_different_choices_are_refused():
    config = model_config("enc:subln/dec:admin")
    with pytest.raises(UserError, match=r"'innernorm'.*'noinnernorm'"):
        rewrite(perturbed(config), config)


def test_searches_find_the_same_outputs():
    config = model_config("admin")
    model = perturbed(config)
    source = inputs(model)[0]
    assert beam_search(rewrite(model, config).model, source) == beam_search(model, source)


def test_the_first_factor_goes_into_tokens_and_positions_of_its_own_stack():
    config = model_config("admin")
    model = perturbed(config)
    plain = rewrite(model, config).model
    for stack, part in (("encoder", plain.source), ("decoder", plain)):
        omega = getattr(model, stack).sublayers[0].place.omega
        torch.testing.assert_close(part.embedding.weight, model.embedding.weight * omega)
        torch.testing.assert_close(part.position_encoding.weight[:256], model.position_encoding.table * omega)
    torch.testing.assert_close(plain.embedding.output, model.embedding.weight)


def test_a_separate_source_draws_its_own_start():
    from normlab.lab.tasks.task import build_model

    config = replace(CONFIG, position_encoding="learned")
    shared, apart = (
        build_model(Seq2Seq, replace(config, separate_source=own), VOCAB, 1) for own in (False, True)
    )
    own = [name for name in apart.state_dict() if name.startswith("source.")]
    assert own == ["source.embedding.weight", "source.position_encoding.weight"]
    for name in own:
        inner = apart.state_dict()[name.removeprefix("source.")]
        assert torch.equal(inner, shared.state_dict()[name.removeprefix("source.")])
        assert not torch.equal(apart.state_dict()[name], inner)
    assert isinstance(apart, Seq2Seq)

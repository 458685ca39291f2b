"""The full explanation of a recipe."""

from __future__ import annotations

from dataclasses import replace

from normlab.cli.presets import demo
from normlab.lab.config import Config, DataConfig, ModelConfig
from normlab.lab.recipes.build import explain
from normlab.lab.recipes.grammar import describe, resolve
from normlab.lab.tasks.task import build_model
from normlab.nn import Seq2Seq


def test_everything_that_is_not_plain_has_its_equation_and_the_rest_its_name():
    config = resolve("deepnorm+rope+warmup", demo())
    said = explain(config)
    assert said["in short"] == describe(config)
    assert said["placement"].startswith("deepnorm: DeepNorm: x ← LN(α x + f(x)). Xavier gain β on value")
    assert said["placement"].endswith(
        "(arXiv 2203.00555). Its source claims that very deep models train with it."
    )
    assert said["position encoding"].startswith("rope: RoPE: ")
    assert said["plain choices"] == (
        "plain embedding, embedscale, relu, scaled, bias, noinnernorm, noheadgain, ungated, novalueresidual, "
        "rawlogits, freeweights, standard parametrisation, adam"
    )
    assert said["warm-up"].startswith("60 steps: n/k of the peak")
    assert "forced" not in said
    assert explain(resolve("post", demo()))["warm-up"] == "none"


def test_each_stack_has_its_own_line_where_they_differ():
    said = explain(resolve("enc:olmo2/dec:post", demo()))
    assert said["placement encoder"].startswith("olmo2: ")
    assert said["placement decoder"].startswith("post: ")
    assert said["query-key norm encoder"].startswith("normed: ")
    assert {name for name in said if name.startswith("query-key ")} == {"query-key norm encoder"}


def test_the_initialisation_says_what_the_placement_does_to_the_scheme():
    assert explain(resolve("pre", demo()))["initialisation"] == "every matrix as in the scheme"
    # 6+6 layers: 0.87 (N^4 M)^(-1/16) and (12 M)^(-1/4); 30 branches
    assert explain(resolve("deepnorm", demo()))["initialisation"] == (
        "encoder value, output, ffn_in, ffn_out × 0.497; decoder value, output, ffn_in, ffn_out × 0.343"
    )
    fixup = explain(resolve("fixup+untied", demo()))
    assert fixup["norm"] == "not used"
    assert fixup["initialisation"] == (
        "encoder value, ffn_in × 0.183; encoder output, ffn_out × 0; "
        "decoder value, ffn_in × 0.183; decoder output, ffn_out × 0; classifier × 0"
    )
    assert "embeddings × 0.369" in explain(resolve("tfixup", demo()))["initialisation"]
    assert explain(resolve("admin", demo()))["initialisation"].endswith(
        "profiled on one batch before the first step"
    )


def test_parameters_are_counted_without_building_the_model():
    model = ModelConfig(dim=32, ffn_dim=64, heads=4, kv_heads=2, encoder_layers=2, decoder_layers=1)
    base = Config(model=model, data=DataConfig(vocab_size=50))
    for name in ("rezero", "pre+swiglu+untied+learned", "normformer+qknorm"):
        config = resolve(name, base)
        total = sum(p.numel() for p in build_model(Seq2Seq, config.model, 50, seed=1).parameters())
        assert explain(config)["parameters"].startswith(f"{total:,}, of which ")
    assert explain(config)["parameters"].endswith(
        "2+1 layers, width 32, feed-forward 64, 4 heads (2 for keys and values)"
    )
    large = replace(base, model=replace(model, dim=4096, ffn_dim=16384, encoder_layers=40))
    counted = explain(resolve("pre", large))["parameters"].partition(", of which")[0]
    assert int(counted.replace(",", "")) > 40 * 2 * 4096 * 16384, "more than memory holds"


def test_a_single_stack_is_a_decoder_or_an_encoder():
    model = replace(demo().model, encoder_layers=0)
    said = explain(resolve("deepnorm", replace(demo(), model=model)))
    assert said["initialisation"].startswith("decoder value")
    assert "; 0+6 layers" in said["parameters"]

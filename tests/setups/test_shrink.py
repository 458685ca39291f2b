"""Smaller models of published architectures: what must stay as it is, read off both on the meta device."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn

from cases import each
from normlab.errors import UserError
from normlab.setups import shrink
from normlab.setups.huggingface import setup_from_configuration
from normlab.setups.shrink import Shrunk, count_parameters, difference, shrunk, within_reason
from normlab.setups.sizes import Divisors, Kind, Sizes, kind_of, smaller

PUBLISHED = Path(__file__).parent / "published"
NAMES = sorted(path.name for path in PUBLISHED.iterdir() if path.is_dir())
HEADS = {"CausalLM": tf.AutoModelForCausalLM, "MaskedLM": tf.AutoModelForMaskedLM}


def build(config):
    """The model of a configuration."""
    head = next((h for name, h in HEADS.items() if config.architectures[0].endswith(name)), None)
    return (head or tf.AutoModelForSeq2SeqLM).from_config(config)


def on_meta(config) -> nn.Module:
    with torch.device("meta"):
        return build(config)


def published(name):
    return tf.AutoConfig.from_pretrained(PUBLISHED / name)


def shrunk_of(config) -> Shrunk:
    return shrunk(config, build, {})


def number(config, *names):
    """The first of these entries that the configuration has."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


RATIOS = [
    (("num_attention_heads", "num_heads"), ("num_key_value_heads",)),
    (("intermediate_size", "d_ff"), ("hidden_size", "d_model")),
    (("moe_intermediate_size",), ("hidden_size",)),
    (("shared_intermediate_size",), ("hidden_size",)),
    (("kv_lora_rank",), ("hidden_size",)),
    (("q_lora_rank",), ("hidden_size",)),
    (("qk_nope_head_dim",), ("qk_rope_head_dim",)),
    (("v_head_dim",), ("qk_rope_head_dim",)),
    (("num_local_experts", "num_experts", "n_routed_experts"), ("num_experts_per_tok",)),
    (("query_pre_attn_scalar",), ("head_dim",)),
    (("mamba_d_ssm",), ("hidden_size",)),
    (("mamba_dt_rank",), ("hidden_size",)),
    (("max_position_embeddings",), ("sliding_window",)),
]
"""Two numbers, by the names that families give them, whose ratio a smaller model keeps."""


@pytest.mark.slow
@each("name", NAMES)
def test_ratios_ties_and_special_tokens_are_kept(name):
    config = published(name)
    new = shrunk_of(config).config
    for above, below in RATIOS:
        old = number(config, *above), number(config, *below)
        if None not in old:
            assert number(new, *above) / number(new, *below) == old[0] / old[1], (name, above, below)
    heads, width = number(config, "num_attention_heads"), number(config, "hidden_size")
    size = number(config, "head_dim", "d_kv") or width // heads
    new_heads, new_width = number(new, "num_attention_heads"), number(new, "hidden_size")
    new_size = number(new, "head_dim", "d_kv") or new_width // new_heads
    if number(config, "kv_lora_rank") is None:
        assert new_heads * new_size / new_width == heads * size / width, name
    assert new.tie_word_embeddings == config.tie_word_embeddings
    special = {key for key in config.to_dict() if key.endswith("_token_id")}
    ids, new_ids = ([getattr(c, key) for key in sorted(special)] for c in (config, new))
    flat, new_flat = (
        [i for x in each for i in (x if isinstance(x, list) else [x])] for each in (ids, new_ids)
    )
    assert [a == b for a, b in itertools.combinations(flat, 2)] == [
        a == b for a, b in itertools.combinations(new_flat, 2)
    ]
    assert all(i is None or 0 <= i < new.vocab_size for i in new_flat)


@pytest.mark.slow
@each("name", NAMES)
def test_every_succession_of_layers_is_kept(name):
    config = published(name)
    new = shrunk_of(config).config
    for key, kinds in config.to_dict().items():
        if isinstance(kinds, list) and len(kinds) == config.num_hidden_layers:
            less = getattr(new, key)
            assert less == kinds[: len(less)], (name, key)
            assert {*itertools.pairwise(less)} == {*itertools.pairwise(kinds)}, (name, key)
    assert new.num_hidden_layers >= 4


def test_a_moved_scale_of_attention_follows_the_size_of_a_head():
    config = published("granite-3.1-8b")
    assert config.attention_multiplier == 1 / 128
    new = shrunk_of(config).config
    assert new.attention_multiplier == new.num_attention_heads / new.hidden_size


def test_sections_and_factors_of_a_rotation_fit_a_smaller_head():
    content = {
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_parameters": {"mrope_section": [16, 24, 24], "long_factor": [float(i) for i in range(64)]},
    }
    divisors = Divisors(width=32, heads={"": (4, 8)})
    rotation = smaller(Sizes(content, 3584), divisors)["rope_parameters"]
    assert rotation["mrope_section"] == [2, 3, 3]
    assert rotation["long_factor"] == [float(i) for i in range(0, 64, 8)]


class OfFixedDepth(tf.LlamaConfig):
    """A configuration of a class that insists on its number of layers."""

    def __init__(self, **entries):
        super().__init__(**entries)
        if self.num_hidden_layers < 6:
            raise ValueError("layer 5 has options of its own")


def test_all_layers_stay_where_the_class_takes_no_fewer():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = OfFixedDepth(**sizes, num_hidden_layers=6, vocab_size=1000, architectures=["LlamaForCausalLM"])
    new = shrunk(config, lambda config: tf.LlamaForCausalLM(config), {}).config
    assert (new.num_hidden_layers, new.hidden_size) == (6, 64)


def test_a_list_outside_a_rotation_stays_even_if_its_sum_is_a_number_of_frequencies():
    content = {"hidden_sizes": [64, 256], "num_attention_heads": [2, 8], "mlp_ratios": [4, 4, 4, 4]}
    assert smaller(Sizes(content, 256), Divisors(width=4, heads={"": (1, 4)}))["mlp_ratios"] == [4, 4, 4, 4]


@each(
    ("size", "new", "explained"),
    [
        (30_720, 256, True),
        (30_720 + 1024, 256 + 128, True),  # entries beyond the vocabulary, as of prompts
        (30_720 + 1024, 256 + 1024, False),
        (1000, 1000, True),
        (1000, 500, True),
        (1001, 1001, False),
        (512, 64, True),
        (512, 32, False),
    ],
)
def test_what_explains_the_size_of_a_smaller_table(size, new, explained):
    sizes = Sizes({"vocab_size": 30_720, "hidden_size": 512, "num_labels": 1000}, 512)
    assert shrink._explained(size, new, sizes, Divisors(width=8)) == explained


KINDS = {
    "num_hidden_layers": Kind.LAYERS,
    "encoder_layers": Kind.LAYERS,
    "n_layer": Kind.LAYERS,
    "attn_layer_period": None,
    "num_key_value_heads": Kind.HEADS,
    "n_head": Kind.HEADS,
    "decoder_attention_heads": Kind.HEADS,
    "qk_rope_head_dim": Kind.HEAD_SIZE,
    "d_kv": Kind.HEAD_SIZE,
    "mamba_d_head": Kind.HEAD_SIZE,
    "kv_lora_rank": Kind.WIDTH,
    "moe_intermediate_size": Kind.WIDTH,
    "n_embd": Kind.WIDTH,
    "hidden_sizes": Kind.WIDTH,
    "embed_dims": Kind.WIDTH,
    "d_model": Kind.WIDTH,
    "n_routed_experts": Kind.EXPERTS,
    "n_shared_experts": None,
    "num_experts_per_tok": Kind.CHOSEN,
    "moe_topk": Kind.CHOSEN,
    "topk_group": None,
    "vocab_size": Kind.VOCABULARY,
    "type_vocab_size": None,
    "eos_token_id": Kind.SPECIAL,
    "sliding_window": Kind.WINDOW,
    "max_position_embeddings": Kind.CONTEXT,
    "mamba_d_conv": None,
    "rope_theta": None,
    "patch_size": None,
}


@each("name", KINDS)
def test_a_name_says_what_a_number_measures(name):
    assert kind_of(name) is KINDS[name]


# -------------------------------------------------------------------------------------------------- estimates


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000}


def test_parameters_beyond_what_is_built_follow_from_its_numbers(monkeypatch):
    monkeypatch.setattr(shrink, "MOST", {Kind.LAYERS: 4, Kind.EXPERTS: 16})
    content = {**json.loads((PUBLISHED / "mixtral-8x7b" / "config.json").read_text())}
    width, inner, vocabulary = content["hidden_size"], content["intermediate_size"], content["vocab_size"]
    content |= {"num_hidden_layers": 10**8, "num_local_experts": 10**6}
    within, asked = within_reason(content)
    assert asked == {Kind.LAYERS: 10**8, Kind.EXPERTS: 10**6}
    attention = 2 * width**2 + 2 * width * width // 4
    layer = attention + 10**6 * (3 * width * inner + width) + 2 * width
    parameters = 2 * width * vocabulary + 10**8 * layer + width
    config = tf.MixtralConfig.from_dict(within)
    assert math.isclose(count_parameters(build, config, asked), parameters, rel_tol=1e-9)


@pytest.mark.slow
def test_absurd_numbers_build_nothing_huge(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 10**8}))
    named = setup_from_configuration(tmp_path, seed=1)
    assert named.setup.model.config.num_hidden_layers == 4
    assert "num_hidden_layers 100000000 → 4" in named.facts["shrunk"]
    with pytest.raises(UserError, match="parameters"):
        setup_from_configuration(tmp_path, seed=1, shrink=False)


@pytest.mark.slow
def test_a_small_model_is_shrunk_if_that_is_asked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 256, "intermediate_size": 512}))
    original = setup_from_configuration(tmp_path, seed=1)
    smaller = setup_from_configuration(tmp_path, seed=1, shrink=True)
    assert "shrunk" not in original.facts
    assert original.setup.model.config.hidden_size == 256
    assert smaller.setup.model.config.hidden_size == 64


# ----------------------------------------------------------------------------------------- what is in the way


@each(
    ("changes", "words"),
    [
        ({"intermediate_size": 11007}, "intermediate_size 11007 stands in the way"),
        ({"num_attention_heads": 10**8, "num_key_value_heads": 4}, "the smallest that keeps them has"),
    ],
)
def test_the_number_that_stands_in_the_way_is_named(changes, words):
    config = tf.Qwen3Config(architectures=["Qwen3ForCausalLM"], **changes)
    with pytest.raises(UserError, match=words):
        shrunk_of(config)


def test_layers_stay_where_their_kind_depends_on_how_many_there_are():
    """The last layers of Gemma 3n share what the layers before them compute."""
    config = tf.Gemma3nTextConfig(
        architectures=["Gemma3nForCausalLM"], num_hidden_layers=10, num_kv_shared_layers=4
    )
    assert shrunk_of(config).config.num_hidden_layers == 10
    alike = tf.MiniCPM3Config(architectures=["MiniCPM3ForCausalLM"], num_hidden_layers=10)
    assert shrunk_of(alike).config.num_hidden_layers == 4, "each layer divides by the root of their number"


def test_another_structure_is_seen():
    config = tf.LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=512, intermediate_size=1024, num_hidden_layers=4
    )
    sizes, divisors = Sizes(config.to_dict(), 512), Divisors(8, {"": (8, 1)})
    model = on_meta(config)
    others = {
        "modules": {"num_hidden_layers": 4, "model_type": "llama", "hidden_act": "gelu"},
        "ties": {"tie_word_embeddings": True},
        "parameters": {"attention_bias": True},
        "does not explain": {"intermediate_size": 1024},
    }
    for words, changes in others.items():
        content = {**smaller(sizes, divisors), **changes}
        other = on_meta(tf.LlamaConfig.from_dict(content))
        assert words in difference(model, other, sizes, divisors), words
    assert (
        difference(model, on_meta(tf.LlamaConfig.from_dict(smaller(sizes, divisors))), sizes, divisors) == ""
    )

"""Tiny models of other people's classes, with random weights, are read."""

from __future__ import annotations

import pytest
import torch

from diagnosis.following import alike, follow, shape_of
from normlab.diagnosis import read_structure

tf = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
xt = pytest.importorskip("x_transformers", reason="the extra normlab[hf] is not installed")

IDS = torch.randint(5, 90, (3, 7), generator=torch.Generator().manual_seed(1))
PAIR = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = {"vocab_size": 100, **SMALL, **SPECIAL}
GROUPED = {**WORDS, "num_key_value_heads": 1}
NAMES = {"vocab_size": 100, "n_embd": 16, "n_layer": 2, "n_head": 2, **SPECIAL}
BOTH = {"vocab_size": 100, "d_model": 16, "decoder_start_token_id": 1, **SPECIAL} | {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
}
ENCODER, DECODER = "self_attention ffn", "self_attention cross_attention ffn"


def made(name: str, config: str, **choices):
    torch.manual_seed(0)
    return getattr(tf, name)(getattr(tf, config)(**choices))


def encoder_decoder(encoder: str, decoder: str, placement: str):
    return {encoder: alike(2, ENCODER, placement), decoder: alike(2, DECODER, placement)}


def t5gemma():
    stack = tf.T5GemmaModuleConfig(**GROUPED, head_dim=8)
    return made(
        "T5GemmaForConditionalGeneration", "T5GemmaConfig", encoder=stack, decoder=stack, vocab_size=100
    )


def swin():
    sizes = {"image_size": (16, 32), "patch_size": 2, "window_size": 3}
    return made("SwinModel", "SwinConfig", **sizes, embed_dim=8, depths=[2, 1], num_heads=[1, 2])


T5 = {"vocab_size": 100, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
FAMILIES = {
    "bert": (
        lambda: made("BertForMaskedLM", "BertConfig", **WORDS),
        {"input_ids": IDS},
        {"bert.encoder.layer": alike(2, ENCODER, "post")},
    ),
    "bert with memory": (
        lambda: made("BertLMHeadModel", "BertConfig", **WORDS, is_decoder=True, add_cross_attention=True),
        {"input_ids": IDS, "encoder_hidden_states": torch.randn(3, 5, 16)},
        {"bert.encoder.layer": alike(2, DECODER, "post")},
    ),
    "gpt2": (
        lambda: made("GPT2LMHeadModel", "GPT2Config", **NAMES),
        IDS,
        {"transformer.h": alike(2, ENCODER, "pre")},
    ),
    "llama": (
        lambda: made("LlamaForCausalLM", "LlamaConfig", **GROUPED),
        {"input_ids": IDS},
        {"model.layers": alike(2, ENCODER, "pre")},
    ),
    "t5": (
        lambda: made("T5ForConditionalGeneration", "T5Config", **T5),
        PAIR,
        encoder_decoder("encoder.block", "decoder.block", "pre"),
    ),
    "bart": (
        lambda: made("BartForConditionalGeneration", "BartConfig", **BOTH),
        PAIR,
        encoder_decoder("model.encoder.layers", "model.decoder.layers", "post"),
    ),
    "marian": (
        lambda: made("MarianMTModel", "MarianConfig", **BOTH),
        PAIR,
        encoder_decoder("model.encoder.layers", "model.decoder.layers", "post"),
    ),
    "vit": (
        lambda: made("ViTForImageClassification", "ViTConfig", **SMALL, image_size=16, patch_size=4),
        {"pixel_values": IMAGES},
        {"vit.layers": alike(2, ENCODER, "pre")},
    ),
    "swin, attention in shifted windows": (
        swin,
        {"pixel_values": torch.cat([IMAGES, IMAGES.flip(-1)], -1)},
        {f"encoder.layers.{i}.blocks": alike(n, ENCODER, "pre") for i, n in enumerate((2, 1))},
    ),
    "opt, whose feed-forward flattens the stream": (
        lambda: made("OPTForCausalLM", "OPTConfig", **WORDS, ffn_dim=32, word_embed_proj_dim=16),
        {"input_ids": IDS},
        {"model.decoder.layers": alike(2, ENCODER, "pre")},
    ),
    "albert, one layer called three times": (
        lambda: made("AlbertModel", "AlbertConfig", **WORDS | {"num_hidden_layers": 3}, embedding_size=8),
        {"input_ids": IDS},
        {"encoder.albert_layer_groups": alike(3, ENCODER, "post")},
    ),
    "gpt-neox, parallel": (
        lambda: made("GPTNeoXForCausalLM", "GPTNeoXConfig", **WORDS),
        {"input_ids": IDS},
        {"gpt_neox.layers": alike(2, ENCODER, "other")},
    ),
    "phi, parallel under one dropout": (
        lambda: made("PhiForCausalLM", "PhiConfig", **WORDS),
        {"input_ids": IDS},
        {"model.layers": alike(2, ENCODER, "other")},
    ),
    "gemma 2, sandwich": (
        lambda: made("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=8),
        {"input_ids": IDS},
        {"model.layers": alike(2, ENCODER, "sandwich")},
    ),
    "gemma 3, sandwich": (
        lambda: made("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=8),
        {"input_ids": IDS},
        {"model.layers": alike(2, ENCODER, "sandwich")},
    ),
    "t5gemma, sandwich": (
        t5gemma,
        PAIR,
        encoder_decoder("model.encoder.layers", "model.decoder.layers", "sandwich"),
    ),
    "granite, scaled branches": (
        lambda: made("GraniteForCausalLM", "GraniteConfig", **GROUPED, residual_multiplier=0.22),
        {"input_ids": IDS},
        {"model.layers": alike(2, ENCODER, "other")},
    ),
    "mixtral, experts": (
        lambda: made("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=2),
        {"input_ids": IDS},
        {"model.layers": alike(2, ENCODER, "pre")},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hugging_face_model_is_read(family):
    build, batch, expected = FAMILIES[family]
    structure = read_structure(model := build(), batch)
    assert shape_of(structure) == expected
    assert structure.unread == ()
    follow(model, batch, structure)


def relations(family: str) -> set[str]:
    build, batch, _ = FAMILIES[family]
    return {view.relation for view in read_structure(build(), batch).stacks[0].sublayers}


def test_what_is_neither_post_nor_pre_is_told_in_words():
    read = "branch reads norm(before)"
    assert relations("gpt-neox, parallel") == {f"after = before + branch + the parallel branch, {read}"}
    assert relations("gemma 2, sandwich") == {f"after = before + branch, {read}, branch is normed"}
    assert relations("granite, scaled branches") == {f"after = before + 0.22 branch, {read}"}


def test_parallel_branches_name_each_other_and_their_own_norms():
    build, batch, _ = FAMILIES["gpt-neox, parallel"]
    attention, ffn, *_ = read_structure(build(), batch).stacks[0].sublayers
    assert (attention.beside, ffn.beside) == ((ffn.branch,), (attention.branch,))
    assert (attention.before, attention.total) == (ffn.before, ffn.total)
    block = "gpt_neox.layers.0"
    assert (attention.norm_read, ffn.norm_read) == (
        f"{block}.input_layernorm",
        f"{block}.post_attention_layernorm",
    )


def test_taps_and_norms_have_the_names_of_the_model():
    build, batch, _ = FAMILIES["bert"]
    view = read_structure(build(), batch).stacks[0].sublayers[3]
    layer = "bert.encoder.layer.1"
    assert [str(tap) for tap in (view.before, view.branch, view.total, view.after)] == [
        f"{layer}.attention.output.LayerNorm.output",
        f"{layer}.output.dropout.output",
        f"{layer}.output.LayerNorm.input[0]",
        f"{layer}.output",
    ]
    assert (view.norm_read, view.norm_write) == (None, f"{layer}.output.LayerNorm")

    build, batch, _ = FAMILIES["gpt2"]
    (stack,) = read_structure(build(), batch).stacks
    assert [str(stack.sublayers[0].branch), stack.sublayers[0].norm_read, stack.final_norm] == [
        "transformer.h.0.attn.output[0]",
        "transformer.h.0.ln_1",
        "transformer.ln_f",
    ]


X_TRANSFORMERS = {
    "as it comes": ({}, "pre"),
    "rms and gated": ({"use_rmsnorm": True, "ff_glu": True, "rotary_pos_emb": True}, "pre"),
    "post": ({"pre_norm": False}, "post"),
    "sandwich": ({"sandwich_norm": True}, "sandwich"),
}


@pytest.mark.parametrize("options", X_TRANSFORMERS)
def test_an_x_transformers_model_is_read(options):
    chosen, placement = X_TRANSFORMERS[options]
    layers = xt.Decoder(dim=16, depth=2, heads=2, **chosen)
    model = xt.TransformerWrapper(num_tokens=100, max_seq_len=16, attn_layers=layers)
    structure = read_structure(model, IDS)
    assert shape_of(structure) == {"attn_layers.layers": alike(2, ENCODER, placement)}
    follow(model, IDS, structure)


def test_an_x_transformers_encoder_decoder_is_read():
    sizes = {"num_tokens": 100, "depth": 2, "heads": 2, "max_seq_len": 16}
    both = {f"{stack}_{name}": size for stack in ("enc", "dec") for name, size in sizes.items()}
    model = xt.XTransformer(dim=16, **both)
    structure = read_structure(model, (IDS, IDS))
    names = "encoder.attn_layers.layers", "decoder.net.attn_layers.layers"
    assert shape_of(structure) == encoder_decoder(*names, "pre")
    follow(model, (IDS, IDS), structure)


def test_gates_in_the_place_of_sums_are_not_read():
    layers = xt.Decoder(dim=16, depth=2, heads=2, gate_residual=True)
    model = xt.TransformerWrapper(num_tokens=100, max_seq_len=16, attn_layers=layers)
    with pytest.raises(ValueError, match=r"attn_layers\.layers .*ModuleList"):
        read_structure(model, IDS)

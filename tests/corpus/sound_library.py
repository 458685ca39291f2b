"""Sound models of transformers, first list: decoders, encoders, encoder-decoders and images."""

from __future__ import annotations

from functools import partial

import torch

from .case import Arguments, Case, collect
from .gpt import VOCAB
from .library import (
    BART,
    ENCODER,
    GPT2,
    GROUPED,
    IMAGES,
    PADDED,
    SPECIAL,
    T5,
    Row,
    in_bfloat16,
    library,
    sound_cases,
)
from .setups import (
    ROWS,
    classified_batch,
    image_batch,
    language_batch,
    masked_batch,
    padded_batch,
    tokens,
    translation_batch,
)

WINDOWED = {**GROUPED, "head_dim": 16, "sliding_window": 8}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}

DECODERS: dict[str, Row] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", WINDOWED),
    "gemma3": ("Gemma3ForCausalLM", WINDOWED),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "mixtral": (
        "MixtralForCausalLM",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    ),
    "neox": (
        "GPTNeoXForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            **ENDS,
        },
    ),
    "mamba": (
        "MambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "state_size": 8, **SPECIAL},
    ),
    "rwkv": (
        "RwkvForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "attention_hidden_size": 64,
            "intermediate_size": 128,
            **ENDS,
        },
    ),
    "falcon": (
        "FalconForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, **ENDS},
    ),
}
PADDED_DECODERS: dict[str, Row] = {
    "gpt2_pad": ("GPT2LMHeadModel", {**GPT2, "attn_implementation": "eager"}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "ffn_dim": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 64,
            **SPECIAL,
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 4, "n_head": 4, **SPECIAL},
    ),
}
ENCODERS: dict[str, Row] = {
    "bert": ("BertForMaskedLM", ENCODER),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "modernbert": (
        "ModernBertForMaskedLM",
        {
            **ENCODER,
            "num_hidden_layers": 6,
            **ENDS,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 8,
            "reference_compile": False,
        },
    ),
    "deberta": (
        "DebertaV2ForMaskedLM",
        {
            **ENCODER,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
        },
    ),
    "albert": ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 32}),
}
ENCODER_DECODERS: dict[str, Row] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART),
}
CLASSIFIERS_OF_IMAGES: dict[str, Row] = {
    "vit": ("ViTForImageClassification", {**IMAGES, "num_labels": 10}),
    "dinov2": ("Dinov2ForImageClassification", {**IMAGES, "num_labels": 10}),
    "beit": ("BeitForImageClassification", {**IMAGES, "num_labels": 10}),
    "deit": ("DeiTForImageClassification", {**IMAGES, "num_labels": 10}),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 24,
            "depths": [2, 4],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 10,
        },
    ),
}

SOUND: dict[str, Case] = {
    **sound_cases(DECODERS, language_batch),
    **sound_cases(PADDED_DECODERS, padded_batch, PADDED),
    **sound_cases(ENCODERS, masked_batch, PADDED),
    **sound_cases(
        {"bert_cls": ("BertForSequenceClassification", {**ENCODER, "num_labels": 3})},
        classified_batch,
        PADDED,
    ),
    **sound_cases(ENCODER_DECODERS, translation_batch, PADDED),
    **sound_cases(CLASSIFIERS_OF_IMAGES, image_batch),
}
LOW = {
    "llama_bf16": "llama",
    "qwen3_bf16": "qwen3",
    "gemma2_bf16": "gemma2",
    "gpt2_bf16": "gpt2_pad",
    "bert_bf16": "bert",
    "t5_bf16": "t5",
    "mixtral_bf16": "mixtral",
    "vit_bf16": "vit",
}
"""Cases that are built in bfloat16 too."""
SOUND |= {name: Case(name, partial(in_bfloat16, SOUND[of].build)) for name, of in LOW.items()}
case = collect(SOUND)


@case()
def llama_packed() -> Arguments:
    """Two documents in each row, without a cache of keys, so that positions that restart separate them."""
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None].repeat(ROWS, 1)
    batch = language_batch() | {"use_cache": False, "position_ids": positions}
    return library("LlamaForCausalLM", GROUPED, batch)


@case()
def clip() -> Arguments:
    """A contrastive model: the loss compares each row with all others."""
    texts = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": VOCAB - 1,
    }
    ends = torch.full((ROWS, 1), VOCAB - 1)
    batch = {
        "input_ids": torch.cat([tokens(vocab=VOCAB - 1), ends], 1),
        "pixel_values": image_batch()["pixel_values"],
        "return_loss": True,
    }
    options = {"text_config": texts, "vision_config": IMAGES, "projection_dim": 32}
    return library("CLIPModel", options, batch)


@case()
def vitmae() -> Arguments:
    """A masked autoencoder, which draws the patches that it hides."""
    decoder = {
        "decoder_hidden_size": 48,
        "decoder_num_hidden_layers": 3,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 96,
    }
    batch = {"pixel_values": image_batch()["pixel_values"]}
    return library("ViTMAEForPreTraining", {**IMAGES, **decoder}, batch)

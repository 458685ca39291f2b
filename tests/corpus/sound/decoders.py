"""Decoders of transformers, and classifiers on them."""

from __future__ import annotations

import torch

from corpus.batches import ROWS, VOCAB, classified_batch, language_batch, padded_batch
from corpus.case import LIBRARY_1, LIBRARY_2, Arguments, sound
from corpus.models.library import (
    DECODER,
    GPT2,
    GROUPED,
    PADDED,
    SPECIAL,
    Row,
    add_in_bfloat16,
    add_sound,
    library,
)

WINDOWED = {**GROUPED, "head_dim": 16, "sliding_window": 8}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
HEAD = {**GROUPED, "head_dim": 16}
TWO_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 8}


DECODERS_1: dict[str, Row] = {
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


DECODERS_2: dict[str, Row] = {
    "gemma": ("GemmaForCausalLM", HEAD),
    "phi": ("PhiForCausalLM", GROUPED),
    "phi3": ("Phi3ForCausalLM", GROUPED),
    "stablelm": ("StableLmForCausalLM", GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", GROUPED),
    "cohere": ("CohereForCausalLM", GROUPED),
    "granite": ("GraniteForCausalLM", GROUPED),
    "nemotron": ("NemotronForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", {**GROUPED, **WINDOW}),
    "olmo": ("OlmoForCausalLM", GROUPED),
    "olmo3": ("Olmo3ForCausalLM", {**GROUPED, **WINDOW}),
    "olmoe": ("OlmoeForCausalLM", {**GROUPED, **TWO_EXPERTS}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {**HEAD, **TWO_EXPERTS, "moe_intermediate_size": 64}),
    "smollm3": ("SmolLM3ForCausalLM", GROUPED),
    "glm4": ("Glm4ForCausalLM", HEAD),
    "dsv3": (
        "DeepseekV3ForCausalLM",
        {
            **DECODER,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "gptj": ("GPTJForCausalLM", {**GPT2, "rotary_dim": 8}),
    "codegen": ("CodeGenForCausalLM", {**GPT2, "rotary_dim": 8}),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 64},
    ),
    "gptneo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 8,
            "max_position_embeddings": 64,
            **ENDS,
        },
    ),
    "bigcode": ("GPTBigCodeForCausalLM", GPT2),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
            **SPECIAL,
        },
    ),
    "gptoss": ("GptOssForCausalLM", {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW}),
    "llama4": (
        "Llama4ForCausalLM",
        {
            **HEAD,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 8,
        },
    ),
    "xglm": (
        "XGLMForCausalLM",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "ffn_dim": 128,
            "num_layers": 4,
            "attention_heads": 4,
            "max_position_embeddings": 64,
            **SPECIAL,
        },
    ),
    "biogpt": ("BioGptForCausalLM", DECODER),
    "jamba": (
        "JambaForCausalLM",
        {
            **GROUPED,
            "num_experts": 4,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_dt_rank": 8,
        },
    ),
    "qwen3next": (
        "Qwen3NextForCausalLM",
        {
            **HEAD,
            **TWO_EXPERTS,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}


CLASSIFIER: dict[str, Row] = {
    "gpt2_cls": ("GPT2ForSequenceClassification", {**GPT2, "num_labels": 3, "pad_token_id": 0})
}
XLNET: dict[str, Row] = {
    "xlnet": (
        "XLNetLMHeadModel",
        {"vocab_size": VOCAB, "d_model": 64, "n_layer": 4, "n_head": 4, "d_inner": 128},
    )
}
add_sound(LIBRARY_1, DECODERS_1, language_batch)
add_sound(LIBRARY_1, PADDED_DECODERS, padded_batch, PADDED)
add_sound(LIBRARY_2, DECODERS_2, padded_batch, PADDED)
add_sound(LIBRARY_2, CLASSIFIER, classified_batch, PADDED)
add_sound(LIBRARY_2, XLNET, language_batch, not_right={"xlnet": "without a permutation it copies"})
add_in_bfloat16(
    LIBRARY_1,
    {
        "llama_bf16": "llama",
        "qwen3_bf16": "qwen3",
        "gemma2_bf16": "gemma2",
        "gpt2_bf16": "gpt2_pad",
        "mixtral_bf16": "mixtral",
    },
)


@sound(origin=LIBRARY_1)
def llama_packed() -> Arguments:
    """Two documents in each row, without a cache of keys, so that positions that restart separate them."""
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None].repeat(ROWS, 1)
    batch = language_batch() | {"use_cache": False, "position_ids": positions}
    return library("LlamaForCausalLM", GROUPED, batch)

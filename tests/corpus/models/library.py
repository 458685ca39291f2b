"""Small models of transformers as training steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers as tf
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

from corpus.batches import VOCAB, language_batch, padded_batch
from corpus.case import CASES, Arguments, Case, Origin, add
from corpus.training import WideAdamW, adamw

tf.logging.set_verbosity_error()

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    **SPECIAL,
}
"""Options of most decoders."""
GROUPED = {**DECODER, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
BART = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    **SPECIAL,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 4,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
IMAGES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
PADDED = {"pad_id": 0}
"""What the user of a padded batch declares."""

Batch = dict[str, torch.Tensor | bool]


def library(
    name: str, options: Mapping[str, Any], batch: Batch, declare: Mapping[str, Any] | None = None
) -> Arguments:
    """Return the step of a model of transformers, drawn anew from its configuration."""
    torch.manual_seed(0)
    kind = getattr(tf, name)
    model = kind(kind.config_class(**options)).train()
    arguments: Arguments = {"model": model, "batch": batch, "optimizer": adamw(model)}
    return arguments | ({"declare": dict(declare)} if declare else {})


Row = tuple[str, Mapping[str, Any]]
"""The model's class and the options of its configuration."""


def add_sound(
    origin: Origin,
    table: Mapping[str, Row],
    batch: Callable[[], Batch],
    declare: Mapping[str, Any] | None = None,
    *,
    not_right: Mapping[str, str] | None = None,
) -> None:
    """Add a sound case for each row of a table, all of one kind of batch."""

    def build(row: Row) -> Arguments:
        return library(*row, batch(), declare)

    for name, row in table.items():
        reason = (not_right or {}).get(name, "")
        add(Case(name, partial(build, row), origin, what=f"a sound {row[0]}", not_right=reason))


def add_in_bfloat16(origin: Origin, names: Mapping[str, str]) -> None:
    """Add the steps of other cases with weights and images in bfloat16."""
    for name, other in names.items():
        build = partial(in_bfloat16, CASES[other].build)
        add(Case(name, build, origin, what=f"{CASES[other].what} in bfloat16"))


def in_bfloat16(build: Callable[[], Arguments]) -> Arguments:
    """Return the same step with weights and images in bfloat16, and an optimizer that keeps wide copies."""
    arguments = build()
    model = arguments["model"].to(torch.bfloat16)
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in arguments["batch"].items()}
    optimizer = WideAdamW([{"params": list(model.parameters())}], lr=1e-3)
    return arguments | {"batch": batch, "optimizer": optimizer}


def padded_llama() -> Arguments:
    """Return the step of a sound Llama on padded rows."""
    return library("LlamaForCausalLM", GROUPED, padded_batch(), PADDED)


def language_gpt2() -> Arguments:
    """Return the step of a sound GPT-2."""
    return library("GPT2LMHeadModel", GPT2, language_batch())


class LaidOut(LlamaAttention):
    """Attention of queries, keys and values that a subclass lays out and rotates."""

    def laid_out(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[B, H, T, w]` of hidden states `[B, T, D]`."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.laid_out(hidden_states, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        y, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(y.flatten(2)), weights

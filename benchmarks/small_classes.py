"""Ten classes of other libraries at a small size, for forecasts of runs of models that are not ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional

VOCAB, DIM, HEADS, LAYERS, FFN, MASK = 512, 64, 4, 4, 256, 511


@dataclass(frozen=True)
class Foreign:
    """A class of somebody else's."""

    build: Callable[[], nn.Module]
    placement: str
    norm: str
    masked: bool = False
    """Whether it predicts masked tokens, and not each next one."""

    @property
    def choices(self) -> dict[str, str | float]:
        """The configuration as far as a baseline reads it."""
        words = {"text": "brown", "placement": self.placement, "norm": self.norm, "optimiser": "adamw"}
        return {**words, "layers": LAYERS, "width": DIM, "warmup": 0}


def _hf(name: str, config: str, **choices: Any) -> nn.Module:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": FFN,
        "attn_implementation": "eager",
        "pad_token_id": 0,
    }
    return getattr(tf, name)(getattr(tf, config)(**sizes | choices))


class Block(nn.Module):
    """A Pre-LN layer as small scripts write it."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, FFN), nn.GELU(), nn.Linear(FFN, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """The stream after both branches."""
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class Small(nn.Module):
    """A causal model in plain PyTorch, with PyTorch's own initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        """An object with ``logits``, as those of transformers."""
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return tf.modeling_outputs.CausalLMOutput(logits=self.head(self.ln_f(x)))


_GPT2 = {"n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS, "bos_token_id": 1, "eos_token_id": 2}
FOREIGN: Mapping[str, Foreign] = {
    "BERT": Foreign(partial(_hf, "BertForMaskedLM", "BertConfig"), "post", "layernorm", masked=True),
    "GPT-2": Foreign(partial(_hf, "GPT2LMHeadModel", "GPT2Config", **_GPT2), "pre", "layernorm"),
    "Llama": Foreign(partial(_hf, "LlamaForCausalLM", "LlamaConfig"), "pre", "rmsnorm"),
    "Gemma 3": Foreign(
        partial(_hf, "Gemma3ForCausalLM", "Gemma3TextConfig", num_key_value_heads=2, head_dim=DIM // HEADS),
        "sandwich",
        "rmsnorm",
    ),
    "ModernBERT": Foreign(
        partial(_hf, "ModernBertForMaskedLM", "ModernBertConfig"), "pre", "layernorm", masked=True
    ),
    "OPT": Foreign(
        partial(_hf, "OPTForCausalLM", "OPTConfig", ffn_dim=FFN, word_embed_proj_dim=DIM), "pre", "layernorm"
    ),
    "GPT-NeoX": Foreign(partial(_hf, "GPTNeoXForCausalLM", "GPTNeoXConfig"), "pre", "layernorm"),
    "Qwen3": Foreign(
        partial(_hf, "Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=2, head_dim=DIM // HEADS),
        "pre",
        "rmsnorm",
    ),
    "OLMo 2": Foreign(partial(_hf, "Olmo2ForCausalLM", "Olmo2Config"), "olmo2", "rmsnorm"),
    "nanoGPT-like": Foreign(Small, "pre", "layernorm"),
}

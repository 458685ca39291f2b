"""Language models of 4 layers and width 64, by the name of their family, drawn by their own classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch.nn.functional as F
import transformers as tf
from text import CONTEXT, EOS, PAD, VOCAB
from torch import Tensor, nn

from normlab.lab.config import Config, ModelConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.tasks.task import build_model
from normlab.nn import Decoder

DIM, LAYERS, HEADS = 64, 4, 4
SPECIAL: Final = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": PAD}
LLAMA: Final = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "intermediate_size": 4 * DIM,
    "max_position_embeddings": CONTEXT,
}
"""Sizes in the words of most families."""
GPT2: Final = {"vocab_size": VOCAB, "n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT}
"""Sizes in GPT-2's words."""


def made(model: str, config: str, sizes: dict[str, Any], **others: Any) -> nn.Module:
    """A class of transformers, without dropout: no text is seen twice."""
    built = getattr(tf, config)(**{**SPECIAL, **sizes, **others})
    for name, value in built.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(built, name, 0.0)
    return getattr(tf, model)(built)


def opt(*, post: bool = False) -> nn.Module:
    """OPT, Pre-LN or as its smallest published size, Post-LN."""
    sizes = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "intermediate_size")}
    return made(
        "OPTForCausalLM",
        "OPTConfig",
        sizes,
        ffn_dim=4 * DIM,
        word_embed_proj_dim=DIM,
        do_layer_norm_before=not post,
    )


class Block(nn.Module):
    """Pre-LN causal attention and a feed-forward network of GELUs, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after both branches `[B, T, D]`."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class NanoGPT(nn.Module):
    """A decoder as nanoGPT starts it: 0.02, less for what writes to the stream, tied, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM, bias=False), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        for path, p in self.named_parameters():
            if p.dim() > 1:
                writes = path.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, 0, 0.02 / math.sqrt(2 * LAYERS) if writes else 0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and logits `[B, T, V]`."""
        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


def recipe(name: str) -> Config:
    """The configuration of one of normlab's recipes as a language model, resolved."""
    model = ModelConfig(
        encoder_layers=0, decoder_layers=LAYERS, dim=DIM, ffn_dim=4 * DIM, heads=HEADS, dropout=0.0
    )
    return resolve(name, Config(task="language_model", model=model))


class Recipe(nn.Module):
    """A decoder of one of normlab's recipes, which computes its loss as the others do."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__()
        self.decoder = build_model(Decoder, config.model, VOCAB, seed)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and logits `[B, T, V]`."""
        logits = self.decoder(input_ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


FAMILIES: Final[dict[str, Callable[[], nn.Module]]] = {
    "GPT-2": lambda: made("GPT2LMHeadModel", "GPT2Config", GPT2),
    "Llama": lambda: made("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "Qwen3": lambda: made("Qwen3ForCausalLM", "Qwen3Config", LLAMA, head_dim=DIM // HEADS),
    "Gemma 2": lambda: made("Gemma2ForCausalLM", "Gemma2Config", LLAMA, head_dim=DIM // HEADS),
    "OLMo 2": lambda: made("Olmo2ForCausalLM", "Olmo2Config", LLAMA),
    "GPT-NeoX": lambda: made("GPTNeoXForCausalLM", "GPTNeoXConfig", LLAMA),
    "Mixtral": lambda: made(
        "MixtralForCausalLM", "MixtralConfig", LLAMA, num_local_experts=4, num_experts_per_tok=2
    ),
    "OPT": opt,
    "Mamba": lambda: made(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": LAYERS},
    ),
    "nanoGPT": NanoGPT,
    "OPT, Post-LN": lambda: opt(post=True),
    "GPT": lambda: made("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", GPT2),
    "BERT": lambda: made("BertForMaskedLM", "BertConfig", LLAMA),
    "T5": lambda: made(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCAB, "d_model": DIM, "d_kv": DIM // HEADS, "d_ff": 4 * DIM, "num_heads": HEADS},
        num_layers=LAYERS // 2,
        decoder_start_token_id=PAD,
    ),
    "Phi": lambda: made("PhiForCausalLM", "PhiConfig", LLAMA),
    "GPT-J": lambda: made("GPTJForCausalLM", "GPTJConfig", GPT2, rotary_dim=DIM // HEADS // 2),
    "BLOOM": lambda: made(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": DIM, "n_layer": LAYERS, "n_head": HEADS},
    ),
}

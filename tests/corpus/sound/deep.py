"""The four architectures in which faults are planted, and six families in two sizes each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import transformers as tf
from torch import nn
from torch.optim import Adafactor, Adam, AdamW

from corpus.batches import PAD
from corpus.case import DEEP, Case, add, sentence
from corpus.models.deep import (
    DEEP_VOCAB,
    Training,
    arguments_of,
    deep_bert,
    deep_gpt2,
    deep_llama,
    deep_translation,
    masked_words_batch,
    padded_words,
    seq2seq,
    target_loss,
    words_batch,
)


@dataclass(frozen=True)
class Size:
    """Layers of each stack and their width."""

    layers: int
    dim: int

    @property
    def heads(self) -> int:
        return self.dim // 32

    def options(self, layers: str, dim: str, heads: str, ffn: str) -> dict[str, int]:
        """Return the sizes in the words of a family."""
        return {
            layers: self.layers,
            dim: self.dim,
            heads: self.heads,
            ffn: 4 * self.dim,
            "vocab_size": DEEP_VOCAB,
        }


SIZES = (Size(6, 128), Size(12, 256))
HUGGING_FACE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


def decoder(model: nn.Module, lr: float) -> Training:
    """A decoder of Hugging Face with its AdamW, 2,000 steps of warm-up and clipping at 1."""
    optimizer = partial(AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    return Training(model, words_batch(), optimizer, lr, warmup_steps=2000)


def gpt2_of(size: Size) -> Training:
    """GPT-2 of Hugging Face."""
    sizes = size.options("n_layer", "n_embd", "n_head", "n_inner")
    config = tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, use_cache=False)
    return decoder(tf.GPT2LMHeadModel(config), 6e-4)


def llama_of(size: Size) -> Training:
    """Llama with two heads of keys and values."""
    config = tf.LlamaConfig(**size.options(*HUGGING_FACE), num_key_value_heads=2, use_cache=False)
    return decoder(tf.LlamaForCausalLM(config), 3e-4)


def gemma3_of(size: Size) -> Training:
    """Gemma 3 with one head of keys and values, and windows of 32 tokens."""
    config = tf.Gemma3TextConfig(
        **size.options(*HUGGING_FACE), num_key_value_heads=1, head_dim=32, sliding_window=32, use_cache=False
    )
    return decoder(tf.Gemma3ForCausalLM(config), 3e-4)


def bert_of(size: Size) -> Training:
    """BERT in pre-training, with masked words."""
    model = tf.BertForMaskedLM(tf.BertConfig(**size.options(*HUGGING_FACE)))
    optimizer = partial(AdamW, lr=1e-4, weight_decay=0.01)
    return Training(model, masked_words_batch(), optimizer, 1e-4, warmup_steps=10_000)


def t5_of(size: Size) -> Training:
    """T5 with Adafactor, whose rate is relative to the size of each parameter."""
    sizes = size.options("num_layers", "d_model", "num_heads", "d_ff")
    config = tf.T5Config(**sizes, d_kv=32, pad_token_id=PAD, decoder_start_token_id=PAD, use_cache=False)
    source, target = padded_words(), padded_words(seed=2)
    batch = {
        "input_ids": source,
        "attention_mask": (source != PAD).long(),
        "labels": target.masked_fill(target == PAD, -100),
    }
    optimizer = partial(Adafactor, lr=1e-2)
    return Training(tf.T5ForConditionalGeneration(config), batch, optimizer, 1e-2, warmup_steps=10_000)


def normlab_of(size: Size) -> Training:
    """An encoder-decoder of normlab: the small one Pre-LN, the larger one Post-LN."""
    placement = "pre" if size == SIZES[0] else "post"
    model = seq2seq(size.dim, size.layers // 2, size.heads, placement)
    return Training(
        model,
        {"source": padded_words(), "target_in": padded_words(seed=2)},
        partial(Adam, lr=5e-4, betas=(0.9, 0.98)),
        5e-4,
        warmup_steps=4000,
        loss=target_loss,
        max_grad_norm=None,
        declare={"pad_id": PAD},
    )


FAMILIES: dict[str, Callable[[Size], Training]] = {
    "gpt2": gpt2_of,
    "llama": llama_of,
    "gemma3": gemma3_of,
    "bert": bert_of,
    "t5": t5_of,
    "normlab": normlab_of,
}


for architecture in (deep_gpt2, deep_bert, deep_llama, deep_translation):
    name = f"{architecture.__name__.removeprefix('deep_')}_sound"
    add(Case(name, partial(arguments_of, architecture), DEEP, what=sentence(architecture)))
for family, training_of in FAMILIES.items():
    for size in SIZES:
        build = partial(arguments_of, partial(training_of, size))
        add(Case(f"{family}-{size.layers}x{size.dim}", build, DEEP, what=sentence(training_of)))

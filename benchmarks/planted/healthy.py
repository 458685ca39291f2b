"""Twelve sound models, six families in two sizes each, with their usual rate and its usual warm-up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from torch.optim import Adafactor, Adam, AdamW

from normlab.init import initialise_
from normlab.nn import PAD, Seq2Seq
from normlab.spec.model import ModelConfig

from .models import SEED, VOCAB, Case, language_batch, masked_batch, own_loss, padded_words, target_loss


@dataclass(frozen=True)
class Size:
    """Layers of each stack and their width."""

    layers: int
    dim: int

    @property
    def heads(self) -> int:
        return self.dim // 32

    def named_by(self, layers: str, dim: str, heads: str, ffn: str) -> dict[str, int]:
        """Return the sizes in the words of a family."""
        return {layers: self.layers, dim: self.dim, heads: self.heads, ffn: 4 * self.dim, "vocab_size": VOCAB}


SIZES = (Size(6, 128), Size(12, 256))
HUGGING_FACE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
FAMILIES: dict[str, Callable[[Size], Case]] = {}


def family(build: Callable[[Size], Case]) -> Callable[[Size], Case]:
    """Add a function to the families by its name."""
    FAMILIES[build.__name__] = build
    return build


def language(name: str, model: nn.Module, lr: float, **choices: Any) -> Case:
    """A decoder of Hugging Face with its AdamW, 2,000 steps of warm-up and clipping at 1."""
    optimiser = partial(AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    return Case(
        name,
        model,
        language_batch(),
        own_loss,
        optimiser,
        lr,
        warmup_steps=2000,
        causal="input_ids",
        **choices,
    )


@family
def gpt2(size: Size) -> Case:
    """GPT-2 of Hugging Face."""
    sizes = size.named_by("n_layer", "n_embd", "n_head", "n_inner")
    config = tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, use_cache=False)
    return language("gpt2", tf.GPT2LMHeadModel(config), 6e-4)


@family
def llama(size: Size) -> Case:
    """Llama with two heads of keys and values."""
    config = tf.LlamaConfig(**size.named_by(*HUGGING_FACE), num_key_value_heads=2, use_cache=False)
    return language("llama", tf.LlamaForCausalLM(config), 3e-4)


@family
def gemma3(size: Size) -> Case:
    """Gemma 3 with one head of keys and values, and windows of 32 tokens."""
    config = tf.Gemma3TextConfig(
        **size.named_by(*HUGGING_FACE), num_key_value_heads=1, head_dim=32, sliding_window=32, use_cache=False
    )
    return language("gemma3", tf.Gemma3ForCausalLM(config), 3e-4)


@family
def bert(size: Size) -> Case:
    """BERT in pre-training, with masked words."""
    config = tf.BertConfig(**size.named_by(*HUGGING_FACE))
    optimiser = partial(AdamW, lr=1e-4, weight_decay=0.01)
    return Case(
        "bert",
        tf.BertForMaskedLM(config),
        masked_batch(),
        own_loss,
        optimiser,
        lr=1e-4,
        warmup_steps=10_000,
        padded="attention_mask",
    )


@family
def t5(size: Size) -> Case:
    """T5 with Adafactor, whose rate is relative to the size of each parameter."""
    sizes = size.named_by("num_layers", "d_model", "num_heads", "d_ff")
    config = tf.T5Config(**sizes, d_kv=32, pad_token_id=PAD, decoder_start_token_id=PAD, use_cache=False)
    source, target = padded_words(), padded_words(seed=2)
    batch: dict[str, Tensor] = {
        "input_ids": source,
        "attention_mask": (source != PAD).long(),
        "labels": target.masked_fill(target == PAD, -100),
    }
    return Case(
        "t5",
        tf.T5ForConditionalGeneration(config),
        batch,
        own_loss,
        partial(Adafactor, lr=1e-2),
        lr=1e-2,
        warmup_steps=10_000,
        padded="attention_mask",
    )


@family
def normlab(size: Size) -> Case:
    """An encoder-decoder of normlab: the small one Pre-LN, the larger one Post-LN."""
    placement = "pre" if size == SIZES[0] else "post"
    config = ModelConfig(
        dim=size.dim,
        ffn_dim=4 * size.dim,
        heads=size.heads,
        encoder_layers=size.layers // 2,
        decoder_layers=size.layers // 2,
        encoder_placement=placement,
        decoder_placement=placement,
    )
    model = Seq2Seq(config, VOCAB)
    initialise_(model, "xavier", SEED)
    return Case(
        "normlab",
        model,
        {"source": padded_words(), "target_in": padded_words(seed=2)},
        target_loss,
        partial(Adam, lr=5e-4, betas=(0.9, 0.98)),
        lr=5e-4,
        warmup_steps=4000,
        causal="target_in",
        padded="source",
        max_grad_norm=None,
    )


@dataclass(frozen=True)
class Healthy:
    """A sound model by its family and size."""

    family: str
    size: Size

    @property
    def name(self) -> str:
        return f"{self.family}-{self.size.layers}x{self.size.dim}"

    def case(self) -> Case:
        """Build the model, with the same random numbers each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return FAMILIES[self.family](self.size)


HEALTHY = [Healthy(name, size) for name in FAMILIES for size in SIZES]

"""Families of transformers with unusual options, optimizers, schedules and steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from corpus.batches import EOS, FIRST, PAD, language_batch, left_padded_text, masked_batch, padded_text, text
from corpus.case import LATER, UNSEEN, Arguments, sound
from corpus.models.library import ENCODER, GROUPED, PADDED, T5
from corpus.training import decay_groups, loss_setup


def library_step(model: nn.Module, batch: Mapping[str, Tensor], optimizer: Any, scheduler: Any) -> Tensor:
    """Take a step as the Trainer of transformers does."""
    model.train()
    loss = model(**batch).loss
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.detach()


# -------------------------------------------------------------------------------------------------- decoders


def gemma() -> nn.Module:
    """Draw a Gemma 3 whose windows are of 8 tokens in two of three layers."""
    options = {
        **GROUPED,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "attention_bias": True,
        "final_logit_softcapping": 30.0,
    }
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**options))


@sound(origin=LATER)
def gemma_with_short_windows() -> Arguments:
    """Padded rows whose ends are counted; a cosine schedule that warms up from zero."""
    ids, mask = padded_text([36, 22, 30, 17], seed=42)
    return loss_setup(
        gemma,
        {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)},
        None,
        partial(decay_groups, lr=5e-4, decay=0.01),
        seed=42,
        scheduler=lambda optimizer: tf.get_cosine_schedule_with_warmup(optimizer, 10, 200),
        step=library_step,
        declare={"pad_id": PAD, "eos_id": EOS, "steps": 200, "peak_lr": 5e-4},
    )


def granite() -> nn.Module:
    """Draw a Granite with its multipliers."""
    options = {
        **GROUPED,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 1.0 / 16,
        "logits_scaling": 4.0,
        "tie_word_embeddings": True,
    }
    return tf.GraniteForCausalLM(tf.GraniteConfig(**options))


@sound(origin=UNSEEN)
def granite_with_muon() -> Arguments:
    """A Granite with its multipliers; Muon for the matrices of its layers, AdamW for the rest."""

    def share_out(model: nn.Module) -> list[Optimizer]:
        matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
        inside = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in inside]
        return [
            torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.01),
            AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    batch = language_batch(text(seed=42))
    return loss_setup(granite, batch, None, share_out, seed=210, declare={"tied": True})


def lfm() -> nn.Module:
    """Draw an LFM2: short gated convolutions, and attention in one of four layers."""
    options = {
        **GROUPED,
        "block_multiple_of": 16,
        "conv_L_cache": 3,
        "conv_bias": True,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    }
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**options))


@sound(origin=LATER)
def hybrid_that_counts_its_labels() -> Arguments:
    """Prompts have no labels; the halves of a batch have different numbers of them."""

    def step(model: nn.Module, batch: Mapping[str, Tensor], optimizer: Any, scheduler: Any) -> Tensor:
        count = (batch["labels"][:, 1:] != -100).sum()
        losses = []
        for half in (slice(0, 2), slice(2, 4)):
            part = {name: entry[half] for name, entry in batch.items()}
            loss = model(**part, num_items_in_batch=count).loss
            loss.backward()
            losses.append(loss.detach())
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    ids = text(seed=44)
    is_prompt = torch.arange(32) < torch.tensor([5, 12, 8, 17])[:, None]
    batch = {"input_ids": ids, "labels": ids.masked_fill(is_prompt, -100)}
    return loss_setup(lfm, batch, None, seed=44, step=step, declare={"causal": True})


def judge() -> nn.Module:
    """Draw a Qwen2 with three classes."""
    options = {**GROUPED, "num_hidden_layers": 3, "num_key_value_heads": 1, "num_labels": 3}
    return tf.Qwen2ForSequenceClassification(tf.Qwen2Config(**options))


@sound(origin=UNSEEN)
def left_padded_judge() -> Arguments:
    """A Qwen2 classifier of rows padded on the left, with the warm-up of Transformers, from zero."""
    ids, mask = left_padded_text([28, 12, 19, 7, 23, 15], seed=41)
    return loss_setup(
        judge,
        {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 2, 1, 1, 0, 2])},
        None,
        partial(decay_groups, lr=2e-4, decay=0.01),
        seed=209,
        scheduler=lambda optimizer: tf.get_cosine_schedule_with_warmup(optimizer, 10, 200),
        step=library_step,
        declare=PADDED,
    )


# -------------------------------------------------------------------------------- encoders, encoder-decoders


def t5() -> nn.Module:
    """Draw a T5 with gated feed-forwards and more decoder than encoder layers."""
    options = {
        **T5,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 32,
        "feed_forward_proj": "gated-gelu",
        "eos_token_id": EOS,
    }
    return tf.T5ForConditionalGeneration(tf.T5Config(**options))


@sound(origin=UNSEEN)
def gated_t5_with_adafactor() -> Arguments:
    """A T5 with gated feed-forwards, more decoder than encoder layers, and Adafactor."""
    source, mask = padded_text([20, 12, 17, 9], seed=38)
    target, real = padded_text([10, 16, 13, 15], seed=39)
    batch = {"input_ids": source, "attention_mask": mask, "labels": target.masked_fill(real == 0, -100)}

    def adafactor(model: nn.Module) -> Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=1e-2)

    return loss_setup(t5, batch, None, adafactor, seed=207, declare={"pad_id": PAD, "eos_id": EOS})


def albert() -> nn.Module:
    """Draw an ALBERT: one block four times over, a narrow embedding, dropout."""
    options = {**ENCODER, "embedding_size": 32, "num_hidden_groups": 1, "bos_token_id": 1, "eos_token_id": 2}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return tf.AlbertForMaskedLM(tf.AlbertConfig(**options, **dropout))


@sound(origin=UNSEEN)
def looped_albert() -> Arguments:
    """An ALBERT: one block four times over, a narrow embedding, masked tokens, dropout."""
    declare = {"pad_id": PAD, "causal": False, "tied": True}
    return loss_setup(albert, masked_batch(), None, seed=208, declare=declare)


def deberta() -> nn.Module:
    """Draw a DeBERTa without positions in its input, with a convolution after the first layer."""
    options = {
        **ENCODER,
        "num_hidden_layers": 3,
        "relative_attention": True,
        "position_buckets": 16,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
        "type_vocab_size": 0,
        "num_labels": 7,
    }
    return tf.DebertaV2ForTokenClassification(tf.DebertaV2Config(**options))


def slower_below(model: nn.Module) -> AdamW:
    """Give each layer nine tenths of the rate of the one above it."""
    groups: list[dict[str, Any]] = []
    for path, parameter in model.named_parameters():
        parts = path.split(".")
        depth = 0 if "embeddings" in parts else 4 if "classifier" in parts else 1
        if "layer" in parts:
            depth = int(parts[parts.index("layer") + 1]) + 1
        decay = 0.0 if parameter.dim() < 2 else 0.01
        groups.append({"params": [parameter], "lr": 3e-4 * 0.9 ** (4 - depth), "weight_decay": decay})
    return AdamW(groups, lr=3e-4)


@sound(origin=LATER)
def deberta_that_labels_tokens() -> Arguments:
    """Lower layers learn more slowly; only some tokens of a row have labels."""
    ids, mask = padded_text([28, 15, 23, 19], seed=43)
    labels = (ids * 5 % 7).masked_fill((mask == 0) | (ids < FIRST) | (ids % 4 == 0), -100)
    return loss_setup(
        deberta,
        {"input_ids": ids, "attention_mask": mask, "labels": labels},
        None,
        slower_below,
        seed=43,
        scheduler=lambda optimizer: tf.get_linear_schedule_with_warmup(optimizer, 0, 300),
        step=library_step,
        declare={"pad_id": PAD, "causal": False, "steps": 300},
    )

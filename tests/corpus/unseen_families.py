"""Sound models of Hugging Face families, with options and optimizers that are less usual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    get_cosine_schedule_with_warmup,
)

from corpus.case import Arguments, Case, collect
from corpus.unseen_parts import BOS, EOS, FIRST, PAD, adamw, groups, left_padded, padded, text

CASES: dict[str, Case] = {}
case = collect(CASES)


def _t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=300,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_decoder_layers=3,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=32,
            feed_forward_proj="gated-gelu",
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=PAD,
        )
    )


@case()
def gated_t5_with_adafactor() -> Arguments:
    """A T5 with gated feed-forwards, more decoder than encoder layers, and Adafactor."""
    torch.manual_seed(207)
    source, mask = padded([20, 12, 17, 9], 20, 300, seed=38)
    target, real = padded([10, 16, 13, 15], 16, 300, seed=39)
    return {
        "model": _t5(),
        "batch": {"input_ids": source, "attention_mask": mask, "labels": target.masked_fill(real == 0, -100)},
        "optimizer": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
        "make": _t5,
        "declare": {"pad_id": PAD, "eos_id": EOS},
    }


def _albert() -> AlbertForMaskedLM:
    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=280,
            embedding_size=32,
            hidden_size=64,
            num_hidden_layers=4,
            num_hidden_groups=1,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


@case()
def looped_albert() -> Arguments:
    """An ALBERT: one block four times over, a narrow embedding, masked tokens, dropout."""
    torch.manual_seed(208)
    whole, mask = padded([32, 21, 27, 18], 32, 280, seed=40)
    chosen = (torch.rand(whole.shape) < 0.2) & (whole >= FIRST)
    return {
        "model": _albert(),
        "batch": {
            "input_ids": whole.masked_fill(chosen, BOS),
            "attention_mask": mask,
            "labels": whole.masked_fill(~chosen, -100),
        },
        "optimizer": adamw(5e-4, decay=0.01),
        "make": _albert,
        "declare": {"pad_id": PAD, "causal": False, "tied": True},
    }


def _judge() -> Qwen2ForSequenceClassification:
    return Qwen2ForSequenceClassification(
        Qwen2Config(
            vocab_size=240,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=64,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            num_labels=3,
        )
    )


def _judge_step(
    model: nn.Module, batch: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, scheduler: Any
) -> Tensor:
    model.train()
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.detach()


@case()
def left_padded_judge() -> Arguments:
    """A Qwen2 classifier of rows padded on the left, with the warm-up of Transformers, from zero."""
    torch.manual_seed(209)
    ids, mask = left_padded([28, 12, 19, 7, 23, 15], 28, 240, seed=41)
    return {
        "model": _judge(),
        "batch": {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 2, 1, 1, 0, 2])},
        "optimizer": lambda model: torch.optim.AdamW(groups(model, 0.01), lr=2e-4),
        "scheduler": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 10, 200),
        "step": _judge_step,
        "make": _judge,
        "declare": {"pad_id": PAD},
    }


def _granite() -> GraniteForCausalLM:
    return GraniteForCausalLM(
        GraniteConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=1.0 / 16,
            logits_scaling=4.0,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


@case()
def granite_with_muon() -> Arguments:
    """A Granite with its multipliers; Muon for the matrices of its layers, AdamW for the rest."""
    torch.manual_seed(210)
    model = _granite()
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    inner = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inner]
    ids = text(4, 32, 256, seed=42)
    return {
        "model": model,
        "batch": {"input_ids": ids, "labels": ids.clone()},
        "optimizer": [
            torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
        ],
        "make": _granite,
        "declare": {"tied": True},
    }

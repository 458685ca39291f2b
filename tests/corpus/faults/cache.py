"""Faults that ``cache`` names: generation that goes on otherwise than one pass over the whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from corpus.batches import language_batch, text
from corpus.case import LATER, UNSEEN, Arguments, twins
from corpus.models.library import GPT2, GROUPED
from corpus.models.llama import Rotations
from corpus.training import loss_setup


class PositionedGpt(tf.GPT2LMHeadModel):
    """A GPT-2 that counts its positions from the tokens in its cache on."""

    def past(self, cache: Any) -> int:
        """Return the number of tokens that came before."""
        return cache.get_seq_length() if cache is not None else 0

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **options: Any) -> Any:
        start = self.past(past_key_values)
        at = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        options["position_ids"] = at.expand_as(input_ids)
        return super().forward(input_ids, past_key_values=past_key_values, **options)


class RestartingGpt(PositionedGpt):
    """The same, but positions are counted from zero in each call."""

    def past(self, cache: Any) -> int:
        return 0


@twins("cache", origin=UNSEEN)
def cached_positions_restart(*, faulty: bool) -> Arguments:
    """Positions are counted from zero in each call, so that a token after a cache stands at the start."""
    make = partial(RestartingGpt if faulty else PositionedGpt, tf.GPT2Config(**GPT2))
    return loss_setup(make, language_batch(text(length=24, seed=20)), None, declare={"tied": True})


class FromTheRowsStart(LlamaRotaryEmbedding):
    """Count positions from the first one that is handed over."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotations:
        return super().forward(x, position_ids - position_ids[:, :1])


@twins("cache", place="model*|", origin=LATER)
def cached_positions_start_anew(*, faulty: bool) -> Arguments:
    """Positions count from the first one of a call, so that each cached step stands at position zero."""
    config = tf.LlamaConfig(**GROUPED)

    def make() -> nn.Module:
        model = tf.LlamaForCausalLM(config)
        if faulty:
            model.model.rotary_emb = FromTheRowsStart(config)
        return model

    return loss_setup(make, language_batch(text(length=24, seed=27)), None)

"""Faults of attention, positions and padding, first list."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

from .case import Arguments, Case, collect
from .gpt import Block, made_of, small, with_one
from .library import ENCODER, GPT2, GROUPED, PADDED, library
from .places import TARGETS
from .rotary import RotaryBlock, RotaryGPT, rotate
from .rotary import made_of as rotary_of
from .setups import LENGTH, LENGTHS, ROWS, adamw, decay_groups, language_batch, masked_batch, own, tokens

FAULTS: dict[str, Case] = {}
fault = collect(FAULTS)

# -------------------------------------------------------------------------------------------------- scores


class Unmasked(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@fault("causality", place="h.0*")
def no_causal_mask() -> Arguments:
    """No layer has a causal mask."""
    return own(made_of(Unmasked))


class SeesTheNext(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        mask = torch.ones(length, length, dtype=torch.bool).tril(1)
        return F.scaled_dot_product_attention(q, k, v, mask)


@fault("causality", place="h.2*")
def mask_off_by_one_layer2() -> Arguments:
    """The mask of one layer shows the next token."""
    return own(with_one(SeesTheNext, 2))


def masked_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scores with a large negative number for later tokens."""
    length = q.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (q @ k.transpose(-1, -2) * scale).masked_fill(later, -1e9)


class SoftmaxOverQueries(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return masked_scores(q, k, 1 / math.sqrt(q.shape[-1])).softmax(-2) @ v


@fault("attention_scale", "causality", place="h.0*")
def softmax_dim() -> Arguments:
    """The softmax goes over queries, not over keys."""
    return own(made_of(SoftmaxOverQueries))


class Unscaled(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return masked_scores(q, k, 1.0).softmax(-1) @ v


@fault("attention_scale", place="h.0*")
def no_scale() -> Arguments:
    """Scores are not divided by the root of the head's width."""
    return own(made_of(Unscaled))


class ScaledByModel(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dim = self.heads * q.shape[-1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=dim**-0.5)


@fault("attention_scale", place="h.0*")
def scale_dmodel() -> Arguments:
    """Scores are divided by the root of the model's width, not the head's."""
    return own(made_of(ScaledByModel))


class DropsInEvaluation(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)


@fault("evaluation_repeats", place="h.0*")
def dropout_in_eval() -> Arguments:
    """Attention drops weights in evaluation, too."""
    return own(made_of(DropsInEvaluation))


class DropsAHead(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.cat([y[:, :-1], torch.zeros_like(y[:, -1:])], 1)


@fault("gradients", place="h.2*")
def head_dropped() -> Arguments:
    """The last head of one layer is replaced by zeros."""
    return own(with_one(DropsAHead, 2))


# ----------------------------------------------------------------------------------------------- positions


class QueriesRotated(RotaryBlock):
    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q), k


@fault("order", place="layers.0*")
def rope_q_only() -> Arguments:
    """Queries are rotated, keys are not."""
    return own(rotary_of(QueriesRotated))


class RotatedOverHeads(RotaryBlock):
    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (rotate(y.transpose(1, 2)).transpose(1, 2) for y in (q, k))
        return q, k


@fault("order", place="layers.0*")
def rope_batch_axis() -> Arguments:
    """The rotation goes along the heads, not along the tokens."""
    return own(rotary_of(RotatedOverHeads))


class RotaryModule(nn.Module):
    """A rotation that computes its angles in the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[-2:]
        frequencies = (10000.0 ** (-torch.arange(0, width, 2).float() / width)).to(x.dtype)
        angles = torch.arange(length, dtype=x.dtype)[:, None] * frequencies
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class LowRotaryBlock(RotaryBlock):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.rot = RotaryModule()

    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.rot(q), self.rot(k)


@fault("precision", place="layers.0*")
def bf16_positions() -> Arguments:
    """The angles of 256 positions are computed in bfloat16, which has 8 bits."""
    torch.manual_seed(0)
    model = RotaryGPT(block=LowRotaryBlock).to(torch.bfloat16)
    ids = tokens(2, 257)
    return {"model": model, "batch": (ids[:, :-1], ids[:, 1:]), "optimizer": adamw(model)}


# ------------------------------------------------------------------------------------- padding, documents


@fault("counted", place=TARGETS)
def pad_counted() -> Arguments:
    """Padding is among the targets."""
    ids = tokens(length=LENGTH + 1)
    ids[1, 12:] = 0
    ids[2, 8:] = 0
    return own(batch=(ids[:, :-1], ids[:, 1:]), step=None, declare={"pad_id": 0})


class IgnoresItsMask(nn.Module):
    """BERT that is not handed the attention mask."""

    def __init__(self):
        super().__init__()
        self.m = tf.BertForMaskedLM(tf.BertConfig(**ENCODER))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.m(input_ids=input_ids, labels=labels)


@fault("padding", "inputs", place="|m|m.bert|m.bert.encoder|m.bert.encoder.layer.0*|attention_mask")
def mask_ignored_bert() -> Arguments:
    """The attention mask is not passed on."""
    torch.manual_seed(0)
    model = IgnoresItsMask()
    return {"model": model, "batch": masked_batch(), "optimizer": adamw(model), "declare": PADDED}


@fault("padding", place="|transformer|transformer.wpe|transformer.h.0*|attention_mask|input_ids|position_ids")
def left_pad_gpt2() -> Arguments:
    """Rows are padded on the left, and positions are counted from the padding on."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    mask[2, :3] = 0
    ids = ids.masked_fill(mask == 0, 0)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return library("GPT2LMHeadModel", GPT2, batch, PADDED)


@fault("counted", place=TARGETS)
def eos_masked() -> Arguments:
    """Padding is the end of a text, and the labels ignore both by their one id."""
    ends = torch.tensor(LENGTHS)[:, None]
    positions = torch.arange(LENGTH)
    ids = tokens().masked_fill(positions >= ends - 1, 2)
    mask = (positions < ends).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids == 2, -100)}
    return library("GPT2LMHeadModel", GPT2, batch, {"pad_id": 2})


@fault("documents", place="model|model.layers.0*|position_ids")
def packed_leak() -> Arguments:
    """Positions restart, but with its cache of keys the model takes the row for one document."""
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None].repeat(ROWS, 1)
    return library("LlamaForCausalLM", GROUPED, language_batch() | {"position_ids": positions})


class NormOverRows(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0, keepdim=True)) / (x.std(0, keepdim=True) + 1e-5) * self.g


@fault("rows", "norms", place="h.1*")
def norm_over_batch() -> Arguments:
    """A norm takes its mean and deviation over the rows of the batch."""

    def make() -> nn.Module:
        model = small()
        model.h[1].n2 = NormOverRows(64)
        return model

    return own(make)


# ------------------------------------------------------------------------------------------------- targets


@fault("targets", place=TARGETS)
def double_shift() -> Arguments:
    """Targets are shifted in the batch and again in the loss."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0])[0][:, :-1].transpose(1, 2), batch[1][:, 1:])

    torch.manual_seed(0)
    model = small()
    ids = tokens(length=LENGTH + 2)
    return {
        "model": model,
        "batch": (ids[:, :-2], ids[:, 1:-1]),
        "loss": loss,
        "optimizer": decay_groups(model),
    }


@fault("targets", place=TARGETS)
def no_shift() -> Arguments:
    """The target of each token is the token itself."""
    torch.manual_seed(0)
    model = small()
    ids = tokens()
    return {"model": model, "batch": (ids, ids), "optimizer": decay_groups(model)}

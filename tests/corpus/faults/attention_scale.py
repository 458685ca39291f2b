"""Faults that ``attention_scale`` names: scores that are divided by something else, or not at all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import text
from corpus.case import DEEP, LATER, PLANTED_1, PLANTED_2, Arguments, fault, twins
from corpus.models.deep import Training, deep_gpt2, planted
from corpus.models.gpt import Attention, gpt_of
from corpus.models.library import padded_llama
from corpus.models.llama import Rms, Rotary, Rotations, llama_of, rotate
from corpus.models.parts import becomes, causal, heads_of
from corpus.places import FIRST_ATTENTION
from corpus.training import full_setup, loss_setup


class Unscaled(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2)


@fault("attention_scale", place="blocks.0*", origin=PLANTED_1)
def no_scale() -> Arguments:
    """Scores are not divided by the root of the head's width."""
    return full_setup(gpt_of(Unscaled))


@fault("attention_scale", place=FIRST_ATTENTION, origin=DEEP)
@planted(deep_gpt2)
def unscaled_attention(training: Training) -> None:
    """The scores of twelve layers are not divided by the root of the head's width."""
    for block in training.model.blocks:
        becomes(block.attn, Unscaled)


class ScaledByModel(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dim = self.out.in_features
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=dim**-0.5)


@fault("attention_scale", place="blocks.0*", origin=PLANTED_1)
def scale_dmodel() -> Arguments:
    """Scores are divided by the root of the model's width, not the head's."""
    return full_setup(gpt_of(ScaledByModel))


@fault("attention_scale", "siblings", place="model.layers.2*", origin=PLANTED_2)
def hf_scale_one() -> Arguments:
    """The scores of one layer are scaled twice as much as the others'."""
    arguments = padded_llama()
    arguments["model"].model.layers[2].self_attn.scaling *= 2
    return arguments


class SoftmaxOverQueries(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = ~self.sees(q.shape[-2], q.device)
        # not minus infinity, with which the first query's column would be no number
        return self.scores(q, k).masked_fill(hidden, -1e9).softmax(-2) @ v


@fault("attention_scale", "causality", place="blocks.0*", origin=PLANTED_1)
def softmax_dim() -> Arguments:
    """The softmax goes over queries, not over keys."""
    return full_setup(gpt_of(SoftmaxOverQueries))


@fault("attention_scale", "causality", place=FIRST_ATTENTION, origin=DEEP)
@planted(deep_gpt2)
def softmax_over_queries(training: Training) -> None:
    """The softmax of twelve layers goes over the queries, not over the keys."""
    for block in training.model.blocks:
        becomes(block.attn, SoftmaxOverQueries)


class LatentAttention(nn.Module):
    """Latent attention: keys and values from a narrow latent, positions in 8 features of their own."""

    scaled_for = 16

    def __init__(self, dim: int):
        super().__init__()
        self.q = nn.Linear(dim, 4 * 16, bias=False)
        self.down, self.norm = nn.Linear(dim, 24, bias=False), Rms(24)
        self.up = nn.Linear(24, 4 * (8 + dim // 4), bias=False)
        self.k_rope = nn.Linear(dim, 8, bias=False)
        self.rotary = Rotary(8)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotations: Rotations, seen: Tensor | None = None) -> Tensor:
        rotations = self.rotary(torch.arange(x.shape[1], device=x.device))
        q_plain, q_rope = heads_of(self.q(x), 4).chunk(2, -1)
        k_plain, v = heads_of(self.up(self.norm(self.down(x))), 4).tensor_split([8], -1)
        k_rope = rotate(self.k_rope(x), *rotations)[:, None].expand(-1, 4, -1, -1)
        q = torch.cat((q_plain, rotate(q_rope, *rotations)), -1)
        scores = q @ torch.cat((k_plain, k_rope), -1).transpose(-1, -2) * self.scaled_for**-0.5
        hidden = ~causal(x.shape[1], x.device)
        y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class ScaledForHalf(LatentAttention):
    scaled_for = 8


@twins(
    "attention_scale",
    place="blocks.?|blocks.?.attn*",
    origin=LATER,
    not_right="its scores are no single product",
)
def latent_scale_of_half_the_features(*, faulty: bool) -> Arguments:
    """Scores over 16 features are scaled for the 8 that hold no position."""
    return loss_setup(llama_of(ScaledForHalf if faulty else LatentAttention), text(seed=6))

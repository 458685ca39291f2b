"""Faults that ``evaluation_repeats``, ``training_equals_evaluation`` and ``dropout_repeats`` name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from corpus.batches import text
from corpus.case import (
    COVERING,
    DEEP,
    LATER,
    PLANTED_1,
    PLANTED_2,
    PLANTED_3,
    UNSEEN,
    Arguments,
    fault,
    twins,
)
from corpus.models import gpt, llama
from corpus.models.deep import Training, deep_gpt2, planted
from corpus.models.experts import Experts, mixture_of, next_token_and_balance
from corpus.models.gpt import Attention, Gpt, gpt_of, steady
from corpus.models.llama import Rotations, llama_of
from corpus.models.parts import becomes
from corpus.places import FIRST_ATTENTION, within
from corpus.training import changed, full_setup, loss_setup

# ----------------------------------------------------------------------------------------- evaluation_repeats


class DropsInEvaluation(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)


@fault("evaluation_repeats", place="blocks.0*", origin=PLANTED_1)
def dropout_in_eval() -> Arguments:
    """Attention drops weights in evaluation, too."""
    return full_setup(gpt_of(DropsInEvaluation))


class MultiQuery(llama.Attention):
    """Attention with one head of keys and values, normed queries and keys, and dropout."""

    always = False

    def __init__(self, dim: int):
        super().__init__(dim, groups=1)
        width = dim // llama.HEADS
        self.norm_q, self.norm_k = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)

    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        return super().place(self.norm_q(q), self.norm_k(k), rotations)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        p = 0.1 if self.training or self.always else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)


class AlwaysDrops(MultiQuery):
    always = True


@twins("evaluation_repeats", place="blocks.?|blocks.*.attn*", origin=UNSEEN)
def attention_dropout_in_evaluation(*, faulty: bool) -> Arguments:
    """The fused attention gets its dropout in evaluation too."""
    make = partial(llama_of(AlwaysDrops if faulty else MultiQuery), tied=True)
    return loss_setup(make, text(seed=11), declare={"tied": True})


class NoisyExperts(Experts):
    """Noise of a learned size spreads the tokens over the experts."""

    always = False

    def __init__(self, dim: int):
        super().__init__(dim)
        self.noise = nn.Linear(dim, 4, bias=False)

    def scores(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        if self.training or self.always:
            scores = scores + torch.randn_like(scores) * F.softplus(self.noise(x))
        return scores


class AlwaysNoisy(NoisyExperts):
    always = True


@twins("evaluation_repeats", place="blocks.0*|blocks.?.mlp*", origin=LATER)
def router_noise_in_evaluation(*, faulty: bool) -> Arguments:
    """The router draws its noise in evaluation, too."""
    make = mixture_of(AlwaysNoisy if faulty else NoisyExperts)
    return loss_setup(make, text(seed=2), next_token_and_balance, remade=False)


class MakesItsMap(Attention):
    def merge(self, y: Tensor) -> Tensor:
        return nn.Linear(64, 64).to(y)(y.transpose(1, 2).flatten(2))


@fault("evaluation_repeats", place=FIRST_ATTENTION, origin=DEEP)
@planted(deep_gpt2)
def linear_made_in_forward(training: Training) -> None:
    """Attention makes its output map in forward: new random weights at each call, which no one trains."""
    for block in training.model.blocks:
        becomes(block.attn, MakesItsMap)
        del block.attn.out


class AlwaysDropout(nn.Dropout):
    """Dropout by the function, which drops in evaluation, too, unless it is given training=False."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.Dropout's argument
        return F.dropout(input, self.p)


@fault("evaluation_repeats", place=f"blocks.0|{within('blocks.0.mlp')}", origin=DEEP)
@planted(deep_gpt2)
def dropout_in_evaluation(training: Training) -> None:
    """The feed-forwards call F.dropout without training=self.training, so that evaluation is random."""
    for block in training.model.blocks:
        becomes(block.mlp.drop, AlwaysDropout)


# --------------------------------------------------------------------------------- training_equals_evaluation


class CausalInEvaluation(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=not self.training)


@fault("training_equals_evaluation", "causality", place="blocks.0*", origin=PLANTED_2)
def causal_only_eval() -> Arguments:
    """The causal mask is there in evaluation only."""
    return full_setup(gpt_of(CausalInEvaluation))


class ApproximateInEvaluation(gpt.Mlp):
    """A feed-forward whose evaluation runs a fast GELU."""

    def forward(self, x: Tensor) -> Tensor:
        approximate = "none" if self.training else "tanh"
        return self.drop(self.down(F.gelu(self.up(x), approximate=approximate)))


@twins("training_equals_evaluation", place="blocks.0|blocks.0.mlp*", origin=COVERING)
def gelu_approximated_in_evaluation(*, faulty: bool) -> Arguments:
    """Evaluation runs a fast approximation of GELU, with which the model was not trained."""

    def approximate(model: Gpt) -> None:
        for block in model.blocks:
            becomes(block.mlp, ApproximateInEvaluation)

    return full_setup(changed(approximate) if faulty else Gpt)


# -------------------------------------------------------------------------------------- compiled_equals_plain


def in_low_precision(graph: torch.fx.GraphModule, _: Any) -> Callable[..., list[Any]]:
    """Compile a graph to one whose results are rounded to bfloat16."""

    def run(*inputs: Any) -> list[Any]:
        return [y.bfloat16().to(y.dtype) for y in graph(*inputs)]

    return run


@twins("compiled_equals_plain", origin=COVERING)
def compiled_to_low_precision(*, faulty: bool) -> Arguments:
    """The compiler's backend rounds the results of each graph to bfloat16."""
    backend = in_low_precision if faulty else "eager"
    return loss_setup(lambda: torch.compile(steady(), backend=backend), text(), remade=False)


# -------------------------------------------------------------------------------------------- dropout_repeats


class DrawsAgain(Gpt):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return x


@fault("dropout_repeats", "derivative", place="|blocks|blocks.*", origin=PLANTED_3)
def ckpt_rng() -> Arguments:
    """Checkpoints draw other dropout masks in the backward pass than in the forward pass."""
    return full_setup(DrawsAgain)

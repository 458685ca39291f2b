"""Faults planted in GPT-2 of one file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from .case import Case
from .places import STEP, TARGETS, within
from .planted_models import DEVIATION, DIM, GPT, Attention, Block, Training, becomes, gpt2, planting

PLANTED: dict[str, Case] = {}
fault = planting(gpt2, PLANTED)
FIRST_ATTENTION = f"h.0|{within('h.0.attn')}"

# ------------------------------------------------------------------------------------------- masks, scores


@fault("causality", place=FIRST_ATTENTION)
def no_causal_mask(training: Training) -> None:
    """No layer has a causal mask."""
    for block in training.model.h:
        block.attn.mask = torch.ones_like(block.attn.mask)


@fault("causality", "buffers", place=within("h.3"))
def mask_overwritten_by_load(training: Training) -> None:
    """A load from an encoder's checkpoint overwrote the causal mask of layer 3."""
    loaded = {"h.3.attn.mask": torch.ones_like(training.model.h[3].attn.mask)}
    training.model.load_state_dict(loaded, strict=False)
    training.make = GPT


@fault("finite", place=FIRST_ATTENTION)
def causal_mask_hides_the_token_itself(training: Training) -> None:
    """torch.triu without diagonal=1 masks the token itself, too: the first has no key left, hence NaN."""
    for block in training.model.h:
        block.attn.mask = ~torch.ones_like(block.attn.mask).triu()


@fault("gradients", "buffers", "siblings", place=within("h.7"))
def window_of_one_token(training: Training) -> None:
    """The local window of layer 7, counted from 0, is 1 wide: each token attends to itself alone."""
    attention = training.model.h[7].attn
    attention.mask = attention.mask & torch.ones_like(attention.mask).triu()


@fault("attention_scale", place=FIRST_ATTENTION)
def unscaled_attention(training: Training) -> None:
    """The scores of attention are not divided by the root of the head's width."""
    for block in training.model.h:
        block.attn.scale = 1.0


class SoftmaxOverQueries(Attention):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        length = q.shape[2]
        scores = (q @ k.transpose(-2, -1)) * self.scale
        return F.softmax(scores.masked_fill(~self.mask[:length, :length], -math.inf), dim=-2)


@fault("attention_scale", "causality", place=FIRST_ATTENTION)
def softmax_over_queries(training: Training) -> None:
    """The softmax of attention goes over the queries, not over the keys."""
    for block in training.model.h:
        becomes(block.attn, SoftmaxOverQueries)


class MaskBehindSoftmax(Attention):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        length = q.shape[2]
        weights = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1)
        return weights.masked_fill(~self.mask[:length, :length], 0.0)


@fault("causality", "attention_scale", place=FIRST_ATTENTION)
def mask_behind_the_softmax(training: Training) -> None:
    """The causal mask stands behind the softmax, so that the weights of a query sum to less than 1."""
    for block in training.model.h:
        becomes(block.attn, MaskBehindSoftmax)


class QueriesAsKeys(Attention):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return super().weights(q, q)


@fault("gradients", place=within("h.0.attn"))
def queries_taken_for_keys(training: Training) -> None:
    """The scores are products of queries with queries: the rows of c_attn for the keys are never used."""
    for block in training.model.h:
        becomes(block.attn, QueriesAsKeys)


class TimeFirst(Attention):
    """Attention for inputs `[T, B, D]`, as nn.MultiheadAttention is without batch_first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@fault("rows", "reach", place=FIRST_ATTENTION)
def attention_over_the_batch(training: Training) -> None:
    """Attention expects time on the first axis, so that it goes over the rows of a batch, not over tokens."""
    for block in training.model.h:
        becomes(block.attn, TimeFirst)


class HeadsAsTheyLie(Attention):
    def merge(self, y: Tensor) -> Tensor:
        rows, _, length, _ = y.shape
        return self.c_proj(y.contiguous().view(rows, length, -1))


@fault("causality", place=FIRST_ATTENTION)
def heads_merged_without_transpose(training: Training) -> None:
    """The heads are merged by a view alone, without the transpose, which scatters a token over others."""
    for block in training.model.h:
        becomes(block.attn, HeadsAsTheyLie)


class MakesItsMap(Attention):
    def merge(self, y: Tensor) -> Tensor:
        return nn.Linear(DIM, DIM).to(y)(y.transpose(1, 2).flatten(2))


@fault("evaluation_repeats", place=FIRST_ATTENTION)
def linear_made_in_forward(training: Training) -> None:
    """Attention makes its output map in forward: new random weights at each call, which no one trains."""
    for block in training.model.h:
        becomes(block.attn, MakesItsMap)
        del block.attn.c_proj


# ------------------------------------------------------------------------------------ norms, stream, layers


@fault("norms", place="|ln_f|lm_head|h.11")
def no_final_norm(training: Training) -> None:
    """The stream ends without its final norm."""
    training.model.ln_f = nn.Identity()


class WithoutSkip(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return self.mlp(self.ln_2(x))


@fault("residual", place=within("h.5"))
def missing_residual(training: Training) -> None:
    """The feed-forward of layer 5, counted from 0, has no residual."""
    becomes(training.model.h[5], WithoutSkip)


class NormOverTime(nn.LayerNorm):
    """A layer norm with its mean and variance over axis 1, which is time."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.LayerNorm's argument
        variance, mean = torch.var_mean(input, 1, keepdim=True, correction=0)
        return (input - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@fault("causality", "norms", "siblings", place=within("h.4"))
def norm_over_time(training: Training) -> None:
    """A norm of layer 4, counted from 0, takes its mean and variance over time, not over features."""
    becomes(training.model.h[4].ln_1, NormOverTime)


class PastItsNorm(Block):
    """A layer that computes the norm of its feed-forward and passes on what was there before."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        _ = self.ln_2(x)
        return x + self.mlp(x)


@fault("gradients", "norms", place=within("h.0"))
def norm_of_the_feed_forward_unused(training: Training) -> None:
    """The feed-forwards read the residual stream itself: the output of their norm, ln_2, is never used."""
    for block in training.model.h:
        becomes(block, PastItsNorm)


@fault("optimizer_coverage", "state_dict", "meta", place="|optimizer|h|h.*")
def layers_in_a_plain_list(training: Training) -> None:
    """The layers stand in a plain list, so that no optimizer sees them."""
    layers = list(training.model.h)
    del training.model.h
    training.model.h = layers


# ------------------------------------------------------------------------------------------------- dropout


class AlwaysDropout(nn.Dropout):
    """Dropout by the function, which drops in evaluation, too, unless it is given training=False."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.Dropout's argument
        return F.dropout(input, self.p)


@fault("evaluation_repeats", place=f"h.0|{within('h.0.mlp')}")
def dropout_in_evaluation(training: Training) -> None:
    """The feed-forwards call F.dropout without training=self.training, so that evaluation is random."""
    for block in training.model.h:
        becomes(block.mlp.dropout, AlwaysDropout)


class DropsTheStream(Block):
    """A layer whose dropout stands behind the sums."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x + self.attn(self.ln_1(x)))
        return self.drop(x + self.mlp(self.ln_2(x)))


@fault("residual", place=within("h.0"))
def dropout_of_the_stream(training: Training) -> None:
    """Dropout acts on the sum of stream and branch, so that 24 times a tenth of the whole stream is lost."""
    for block in training.model.h:
        becomes(block, DropsTheStream)
        block.attn.dropout, block.mlp.dropout = nn.Identity(), nn.Identity()
        block.drop = nn.Dropout(0.1)


# ------------------------------------------------------------------------------------ embeddings, positions


class WithoutPositions(GPT):
    def embed(self, idx: Tensor) -> Tensor:
        return self.drop(self.wte(idx))


@fault("order", "gradients", place=f"|drop|{within('wpe', 'h.0')}")
def positions_never_added(training: Training) -> None:
    """The forward pass forgets the position vectors: layers read the words alone, and wpe is never used."""
    becomes(training.model, WithoutPositions)


@fault("start", place=within("wpe"))
@torch.no_grad()
def positions_at_torch_default(training: Training) -> None:
    """The position vectors keep torch's deviation of 1.0, and words of deviation 0.02 drown in them."""
    training.model.wpe.reset_parameters()


@fault("initial_loss", "start", place=f"loss|{within('wte', 'lm_head', 'ln_f')}")
@torch.no_grad()
def tied_deviation_of_one(training: Training) -> None:
    """The tied embedding has torch's default deviation of 1.0, so that the logits are huge."""
    training.model.wte.weight.normal_(0.0, 1.0)


@fault("frozen", "gradients", place=within("wte", "lm_head"))
def embedding_frozen_by_from_pretrained(training: Training) -> None:
    """nn.Embedding.from_pretrained freezes without freeze=False: the vectors and the tied head stay."""
    training.model.wte = nn.Embedding.from_pretrained(training.model.wte.weight.detach().clone())
    training.model.lm_head.weight = training.model.wte.weight


@fault("start", place=within("h.*.attn.c_proj", "h.*.mlp.c_proj"))
@torch.no_grad()
def depth_scale_never_applied(training: Training) -> None:
    """The output matrices were never scaled by the depth."""
    for block in training.model.h:
        block.attn.c_proj.weight.normal_(0.0, DEVIATION)
        block.mlp.c_proj.weight.normal_(0.0, DEVIATION)
    training.declare["init"] = str(Path(__file__).with_name("gpt2_start.toml"))


# ------------------------------------------------------------------------------------------ targets, losses


@fault("targets", place=TARGETS)
def targets_not_shifted(training: Training) -> None:
    """The targets are the input itself, not shifted by one, so that the model learns to copy."""
    training.batch["targets"] = training.batch["idx"].clone()


def likelihood_of_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return nll_loss of the logits, which it takes for log-probabilities."""
    logits, _ = model(batch["idx"])
    return F.nll_loss(logits.flatten(0, 1), batch["targets"].flatten())


@fault("explained", "targets", place="|loss|lm_head")
def nll_loss_of_logits(training: Training) -> None:
    """nll_loss gets logits without log_softmax, so that the loss falls without end as logits grow."""
    training.loss = likelihood_of_logits


class RectifiedLogits(GPT):
    def logits(self, x: Tensor) -> Tensor:
        return F.relu(super().logits(x))


@fault("explained", "gradients", "initial_loss", place=f"|loss|ln_f|{within('lm_head')}")
def relu_on_the_logits(training: Training) -> None:
    """A ReLU stands behind the head: no logit is below 0, and half of them are 0 and get no gradient."""
    becomes(training.model, RectifiedLogits)


# ---------------------------------------------------------------------------------------------------- step


@fault("step", "update", place=STEP)
def clipping_divides_the_step(training: Training) -> None:
    """Gradients are clipped at 0.01 where 1.0 was meant, which divides SGD's step by more than 100."""
    training.lr, training.max_grad_norm = 0.1, 0.01
    training.optimizer = partial(SGD, lr=training.lr, momentum=0.9, nesterov=True)
